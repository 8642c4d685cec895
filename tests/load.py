"""Lookups under load, by workers that do what engines do."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from typing import NamedTuple

from tests.waiting import DEADLINE_SECONDS, until


class Asked(NamedTuple):
    """The answer to a lookup of a whole prompt."""

    hit_share: float
    seconds: float
    why: str  # Why the hit was shorter than the prompt. Empty = it is not known.


class Load:
    """Lookups by several threads, until it is closed. They are counted by phase."""

    def __init__(self, workers: Sequence[Generator[Asked, None, None]]) -> None:
        """A thread takes the lookups of a worker, which ends when it is closed."""
        self.phase = "well"
        self.lookups: Counter[str] = Counter()
        self.hit_shares: defaultdict[str, float] = defaultdict(float)
        self.longest_seconds: defaultdict[str, float] = defaultdict(float)
        self.reasons: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(worker,)) for worker in workers]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def wait(self, phase: str, lookups: int) -> None:
        """Begin a phase, and wait until it has so many lookups. Raises what a worker raised."""
        self.phase = phase
        until(lambda: bool(self.faults) or self.lookups[phase] >= lookups, f"lookups while {phase}")
        self.raise_faults()

    def raise_faults(self) -> None:
        """Raise what a worker raised, if one did."""
        for fault in self.faults:
            raise fault

    def print_phases(self) -> None:
        for phase, lookups in self.lookups.items():
            share, longest = self.hit_shares[phase] / lookups, self.longest_seconds[phase]
            print(f"{phase}: {lookups} lookups, {share:.1%} hit, longest {longest:.3f} s")
        for reason, count in self.reasons.items():
            print(f"{count} hits were short while {reason}")

    def _work(self, worker: Generator[Asked, None, None]) -> None:
        try:
            with contextlib.closing(worker):
                while not self._over.is_set():
                    phase = self.phase
                    asked = next(worker)
                    with self._lock:
                        self.lookups[phase] += 1
                        self.hit_shares[phase] += asked.hit_share
                        if asked.hit_share < 1:
                            self.reasons[f"{phase} ({asked.why or 'no reason'})"] += 1
                        longest = max(self.longest_seconds[phase], asked.seconds)
                        self.longest_seconds[phase] = longest
        except BaseException as fault:  # noqa: BLE001  # raised by the test's own thread
            self.faults.append(fault)
