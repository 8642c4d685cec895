"""What the daemon's loop has done by other threads: the tiers' jobs, and pages of the arena."""

import contextlib
import errno
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.arena import Arena
from hybridkv.store.store import Store
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.jobs import JobOutcome, TierJob, TierThreads
from hybridkv.tiers.state import TierState

logger = logging.getLogger("hybridkv.daemon")

RESERVE_STEP_BYTES = 32 << 20
RESERVE_AHEAD_BYTES = 256 << 20
"""Pages are made to exist so far ahead of the used part of the arena."""
RESERVE_RETRY_SECONDS = 1.0
"""How often more memory is asked for while there is none."""


class Waker:
    """Wakes the loop from other threads and from signal handlers."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        """Readable from `wake` until `clear`."""
        for end in (self.reader, self._writer):
            end.setblocking(False)

    def wake(self) -> None:
        """End the loop's sleep, now or the next time that it sleeps."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget every `wake` until now; the caller looks at every queue next."""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self._writer.close()


def make_tiers(
    specs: Iterable[TierSpec],
    node: str,
    memory: memoryview,
    done: Callable[[TierJob, JobOutcome], None],
) -> tuple[list[TierState], list[TierThreads]]:
    """The tiers below RAM, and their threads, which call `done` after each job.

    `memory` has the slots. Raises ConfigError.
    """
    tiers: list[TierState] = []
    threads: list[TierThreads] = []
    names: Counter[str] = Counter()
    for number, spec in enumerate(specs):
        tier = make_tier(spec, node)
        names[tier.name] += 1
        name = tier.name if names[tier.name] == 1 else f"{tier.name}{names[tier.name]}"
        threads.append(TierThreads(tier, memory, done))
        tiers.append(TierState(number, name, tier, spec, threads[-1].submit))
    return tiers, threads


class ArenaReserver:
    """Makes pages of the arena exist in a thread, since zeroing them takes milliseconds."""

    def __init__(
        self, arena: Arena, store: Store, wake: Callable[[], None], counters: Counter[str]
    ) -> None:
        self._arena = arena
        self._store = store
        self._wake = wake
        self._counters = counters
        self.reserved_bytes = store.extents.limit_bytes
        """Pages below this exist."""
        self._goal = min(self.reserved_bytes + RESERVE_AHEAD_BYTES, arena.slots_bytes)
        self._has_failed = False
        """Whether there was no memory the last time; the store grows no more meanwhile."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="reserve", daemon=True)
        self._thread.start()

    def adopt(self) -> None:
        """Give the store the pages that exist by now, and ask for those that are needed next."""
        extents = self._store.extents
        if self.reserved_bytes > extents.limit_bytes:
            self._store.grow(self.reserved_bytes)
        full = self._has_failed
        self._store.bound_bytes = extents.limit_bytes if full else self._arena.slots_bytes
        used = extents.limit_bytes - extents.free_bytes
        goal = min(used + RESERVE_AHEAD_BYTES, self._arena.slots_bytes)
        if goal > self._goal:
            with self._changed:
                self._goal = goal
                self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._may_go_on():
            stop = min(self.reserved_bytes + RESERVE_STEP_BYTES, self._arena.slots_bytes)
            try:
                self._arena.reserve(self.reserved_bytes, stop)
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
                kind = "shared memory is used up" if is_full else str(error)
                if not self._has_failed:
                    logger.warning("arena stays at %s: %s", format_size(self.reserved_bytes), kind)
                self._has_failed = True
                self._counters["reserves_failed"] += 1
            else:
                self.reserved_bytes, self._has_failed = stop, False
            self._wake()

    def _may_go_on(self) -> bool:
        """Wait for the next thing to do; False where the thread is to end."""
        with self._changed:
            if self._has_failed:
                self._changed.wait_for(lambda: self._closed, RESERVE_RETRY_SECONDS)
            else:
                self._changed.wait_for(lambda: self.reserved_bytes < self._goal or self._closed)
        return not self._closed
