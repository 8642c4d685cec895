"""A router's view of an engine: its KV events."""

from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch


class Subscriber:
    """A router's subscription to KV events."""

    def __init__(self, endpoint: str) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events: list[Any] = []

    def poll(self) -> None:
        """Take what has come, waiting a moment for the first."""
        if self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            self.events += self._decoder.decode(payload).events

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
