"""Which memory of an arena is pinned, and the lane that pins it.

Memory that is not pinned, or not yet, is copied through a pinned buffer (bounce), so that nothing
waits for the pinning of an arena of hundreds of gigabytes.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator

from hybridkv.connector.copy.device import Device, DeviceError, Jobs, Lane
from hybridkv.shm.arena import Arena

logger = logging.getLogger("vllm.hybridkv")

Piece = tuple[int, int, bool]  # (offset in the arena, bytes, whether they are pinned).


class Pins:
    """The pinned pieces of one arena. The pinning lane alone changes them."""

    def __init__(self, arena: Arena, pin_bytes: int) -> None:
        self._arena = arena
        self._pin_bytes = pin_bytes
        self._starts: list[int] = []
        self._end = 0  # All pieces together are [0, _end).
        self._refused = False
        self.closed = False

    def cut(self, start: int, size: int, piece_bytes: int) -> Iterator[Piece]:
        """The range in pieces of at most `piece_bytes`, of which each is in one pinned piece."""
        stop = start + size
        while start < stop:
            if start < self._end:
                number = bisect_right(self._starts, start)
                more = self._starts[number] if number < len(self._starts) else self._end
                end = min(stop, more, start + piece_bytes)
                yield start, end - start, True
            else:
                end = min(stop, start + piece_bytes)
                yield start, end - start, False
            start = end

    def pin(self, device: Device, stop: int) -> Lane:
        """Pin all below `stop`; the first refusal is the last attempt."""
        while self._end < stop and not self._refused and not self.closed:
            start = self._end
            size = min(self._pin_bytes, stop - start)
            if not device.register(self._arena.address + start, size):
                device.clear_error()
                self._refused = True
                text = "hybridkv: this machine does not pin the cache's memory; copies are slower"
                logger.warning(text)
                return
            self._starts.append(start)
            self._end = start + size
            yield _Nothing()

    def unpin(self, device: Device) -> None:
        """Unpin everything; nothing is copied any more."""
        starts, self._starts, self._end, self.closed = self._starts, [], 0, True
        for start in starts:
            device.unregister(self._arena.address + start)


class _Nothing:
    """A wait that is over, at which a simulation may do something else."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def pinning_lane(device: Device, jobs: "Jobs[Callable[[], Lane] | None]") -> Lane:
    """Pin and unpin what the jobs say, until one is None."""
    while True:
        while not jobs.ready():
            yield jobs
        job = jobs.take()
        if job is None:
            return
        try:
            yield from job()
        except DeviceError as error:
            # Only memory that is not pinned is the result, which is copied another way.
            logger.warning("hybridkv: pinning failed: %s", error)
