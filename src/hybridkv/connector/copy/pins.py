"""Which memory of an arena is pinned, and the lane that pins it.

Memory that is not pinned, or not yet, is copied through a pinned buffer (bounce), so that nothing
waits for the pinning of an arena of hundreds of gigabytes.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator

from hybridkv.connector.copy.device import Device, DeviceError, Jobs, Lane, over
from hybridkv.shm.arena import Arena

logger = logging.getLogger("vllm.hybridkv")

RETRY_SECONDS = 60.0  # After which memory is tried again that was refused.

Piece = tuple[int, int, bool]  # (offset in the arena, bytes, whether they are pinned).


class Pins:
    """The pinned pieces of one arena. The pinning lane alone changes them."""

    def __init__(self, arena: Arena, pin_bytes: int) -> None:
        self._arena = arena
        self._pin_bytes = pin_bytes
        self._starts: list[int] = []
        self._end = 0  # All pieces together are [0, _end).
        self._wanted = 0  # All below was asked for, by the engine's thread.
        self._retry_at = 0.0  # 0.0 = nothing is refused.
        self._is_refusal_logged = False
        self.closed = False

    def cut(self, start: int, size: int, piece_bytes: int) -> Iterator[Piece]:
        """The range in pieces of at most `piece_bytes`, of which each is in one pinned piece."""
        stop = start + size
        while start < stop:
            # Read once, and before the starts, to which the pinning lane may add meanwhile.
            pinned_end = self._end
            if start < pinned_end:
                number = bisect_right(self._starts, start)
                more = self._starts[number] if number < len(self._starts) else pinned_end
                end = min(stop, more, start + piece_bytes)
                yield start, end - start, True
            else:
                end = min(stop, start + piece_bytes)
                yield start, end - start, False
            start = end

    def is_due(self, stop: int) -> bool:
        """Whether to call `pin`: for the first time with `stop`, or again after a refusal."""
        is_retry = 0 < self._retry_at <= time.monotonic()
        if is_retry:
            self._retry_at = 0.0
        is_due = is_retry or stop > self._wanted
        self._wanted = max(stop, self._wanted)
        return is_due

    def pin(self, device: Device, stop: int) -> Lane:
        """Pin all below `stop`, up to the first refusal."""
        while self._end < stop and not self._retry_at and not self.closed:
            start, began = self._end, time.perf_counter()
            size = min(self._pin_bytes, stop - start)
            if not device.register(self._arena.address + start, size):
                device.clear_error()
                self._retry_at = time.monotonic() + RETRY_SECONDS
                if not self._is_refusal_logged:
                    self._is_refusal_logged = True
                    logger.warning(
                        "hybridkv: this machine does not pin the cache's memory; copies are slower"
                    )
                return
            self._starts.append(start)
            self._end = start + size
            yield _Pause(time.perf_counter() - began)

    def unpin(self, device: Device) -> None:
        """Unpin everything; nothing is copied any more. What stays pinned is said once."""
        starts, self._starts, self._end, self.closed = self._starts, [], 0, True
        errors: list[DeviceError] = []
        for start in starts:
            try:
                device.unregister(self._arena.address + start)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _Pause:
    """A wait of a thread for as long as a registration took, because CUDA's calls wait for that.

    A simulation, which takes it as over, may do something else.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        time.sleep(self._seconds)


def pinning_lane(
    enter_thread: Callable[[], object], jobs: "Jobs[Callable[[], Lane] | None]"
) -> Lane:
    """Pin and unpin what the jobs say, until one is None."""
    enter_thread()
    while True:
        yield from over(jobs)
        job = jobs.take()
        if job is None:
            return
        try:
            yield from job()
        except Exception as error:  # noqa: BLE001  # the log has it
            # Only memory that is not pinned is the result, which is copied another way.
            logger.warning("hybridkv: pinning failed: %s", error)
