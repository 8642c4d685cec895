"""A router's view of an engine: its KV events."""

from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

REPLAYED = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""


class Subscriber:
    """A router's subscription to KV events."""

    def __init__(self, endpoint: str) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._batches: dict[int, list[Any]] = {}
        """The events of each batch that has come, by its number, which begins at 0."""

    @property
    def events(self) -> list[Any]:
        """The events that have come, in the order in which the engine published them."""
        return [event for number in sorted(self._batches) for event in self._batches[number]]

    def poll(self) -> None:
        """Take what has come, waiting a moment for the first."""
        if self._socket.poll(100):
            _, number, payload = self._socket.recv_multipart()
            self._take(number, payload)

    def replay(self, endpoint: str) -> None:
        """Take every batch that the engine keeps and that has not come, as after a late start."""
        missing = next(n for n in range(len(self._batches) + 1) if n not in self._batches)
        asking: Any = zmq.Context.instance().socket(zmq.DEALER)
        with asking as socket:
            socket.connect(endpoint)
            socket.send_multipart([b"", missing.to_bytes(8, "big")])
            while True:
                assert socket.poll(10_000), "the replay ends"
                _, _, number, payload = socket.recv_multipart()
                if number == REPLAYED:
                    return
                self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        self._batches[int.from_bytes(number, "big")] = self._decoder.decode(payload).events

    def present(self, medium: str) -> set[Any]:
        """Returns the hashes of the blocks that a medium has, by the events that have come."""
        names: set[Any] = set()
        for event in self.events:
            if isinstance(event, AllBlocksCleared):
                names.clear()
            elif event.medium == medium and isinstance(event, BlockStored):
                names.update(event.block_hashes)
            elif event.medium == medium:
                names.difference_update(event.block_hashes)
        return names

    def stored(self, medium: str) -> list[BlockStored]:
        """Returns the BlockStored events of a medium that have come."""
        return [
            event
            for event in self.events
            if isinstance(event, BlockStored) and event.medium == medium
        ]

    def removed(self, medium: str) -> list[Any]:
        """Returns the hashes of the BlockRemoved events of a medium that have come."""
        events = [
            event
            for event in self.events
            if isinstance(event, BlockRemoved) and event.medium == medium
        ]
        return [name for event in events for name in event.block_hashes]

    def close(self) -> None:
        """End the subscription."""
        self._socket.close(0)
