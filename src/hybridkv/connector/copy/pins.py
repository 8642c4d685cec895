"""Which memory of an arena is pinned, and the lane that pins it.

Memory that is not pinned, or not yet, is copied through a pinned buffer (bounce), so that nothing
waits for the pinning of an arena of hundreds of gigabytes.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator

from hybridkv.connector.copy.device import (
    Device,
    DeviceError,
    JobQueue,
    Lane,
    Waitable,
    wait_in_lane,
)
from hybridkv.shm.arena import Arena

logger = logging.getLogger("vllm.hybridkv")

RETRY_SECONDS = 60.0  # After a refusal, pinning is tried again this much later.


class Pins:
    """The registrations that pin an arena's memory. The pinning lane alone changes them."""

    def __init__(self, arena: Arena, pin_bytes: int) -> None:
        self._arena = arena
        self._pin_bytes = pin_bytes
        self.starts: list[int] = []  # Where each registration begins, in ascending order.
        self._end = 0  # All registrations together are [0, _end).
        self._wanted = 0  # All below was asked for, by the engine's thread.
        self._retry_at = 0.0  # 0.0 = nothing is refused.
        self._is_refusal_logged = False
        self.is_closed = False  # Nothing is pinned from now on.

    def cut(self, start: int, size: int, copy_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a range of the arena into pieces of at most `copy_bytes`.

        Yields (offset, bytes, is_pinned) of each. One registration pins all of a piece, or none.
        """
        stop = start + size
        while start < stop:
            # Read once, and before the starts, to which the pinning lane may add meanwhile.
            pinned_end = self._end
            if start < pinned_end:
                number = bisect_right(self.starts, start)
                next_start = self.starts[number] if number < len(self.starts) else pinned_end
                end = min(stop, next_start, start + copy_bytes)
                yield start, end - start, True
            else:
                end = min(stop, start + copy_bytes)
                yield start, end - start, False
            start = end

    def request_pages(self, stop: int) -> bool:
        """Note that all below `stop` is wanted. Returns True if `pin` must be called for it.

        That is so when `stop` is larger than before, and when a refusal is RETRY_SECONDS old.
        """
        is_retry = 0 < self._retry_at <= time.monotonic()
        if is_retry:
            self._retry_at = 0.0
        is_due = is_retry or stop > self._wanted
        self._wanted = max(stop, self._wanted)
        return is_due

    def pin_pages(self, device: Device, stop: int) -> Lane:
        """Pin all below `stop`, up to the first refusal."""
        while self._end < stop and not self._retry_at and not self.is_closed:
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
            self.starts.append(start)
            self._end = start + size
            yield _Pause(time.perf_counter() - began)

    def unpin_pages(self, device: Device) -> None:
        """Unpin everything, once nothing is copied any more.

        Raises the first DeviceError after all was tried. What failed stays pinned.
        """
        starts, self.starts, self._end, self.is_closed = self.starts, [], 0, True
        errors: list[DeviceError] = []
        for start in starts:
            try:
                device.unregister(self._arena.address + start)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _Pause(Waitable):
    """A wait of a thread for as long as a registration took, because CUDA's calls wait for that.

    A simulation, which takes it as over, may do something else.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        time.sleep(self._seconds)


def pinning_lane(
    enter_thread: Callable[[], object], jobs: "JobQueue[Callable[[], Lane] | None]"
) -> Lane:
    """Run each job, which pins or unpins memory. A job of None ends the lane."""
    enter_thread()
    while True:
        yield from wait_in_lane(jobs)
        job = jobs.pop()
        if job is None:
            return
        try:
            yield from job()
        except Exception as error:  # noqa: BLE001  # the log has it
            # Only memory that is not pinned is the result, which is copied another way.
            logger.warning("hybridkv: pinning failed: %s", error)
