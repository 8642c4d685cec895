"""`python -m benchmarks.pauses [TRACE]`: hit rates of RAM when sessions pause between their turns.

Four classes of users share one cache: agents that wait for tools, agents that wait for people,
short chats, and scans that nobody repeats. `TRACE` is instead a public trace with `timestamp` in
ms, of which the first `--requests` are served. Sizes are shares of all that is stored; nothing is
below RAM. "release, low priority" releases at a session's end and gives scans low priority. "all
hints" also retain a turn's history for twice the median pause of its class. "prediction" sees names
and times alone.
"""

import argparse
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.policies import ForesightCache, all_reads
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.policies import EvictionClass
from hybridkv.core.state_boundaries import StateRule
from hybridkv.daemon.advice import AdviceQueue
from hybridkv.lab.replay import (
    BLOCK_TOKENS,
    ReplayHits,
    ReplayModel,
    ReplayObject,
    TracePrompt,
    TraceReplay,
    UnlimitedCache,
    read_trace,
)
from hybridkv.tiers.demotion import Demotion

MODEL = ReplayModel(
    Geometry(
        (Group(0, GroupKind.FULL, BLOCK_TOKENS, (100,)),), BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS
    ),
    StateRule(None, BLOCK_TOKENS),
    BLOCK_TOKENS,
)
SHARES = (0.05, 0.1, 0.2)
SCANS = "scans"
MARGIN = 2  # A history is retained for so many times the pause that is expected.


@dataclass(frozen=True, slots=True)
class UserClass:
    """How the sessions of a class of users go. Each range is drawn from evenly."""

    name: str
    sessions: int
    turns: tuple[int, int]
    first_blocks: tuple[int, int]
    new_blocks: tuple[int, int]  # Of each later turn.
    pause_seconds: tuple[float, float]


CLASSES = (
    UserClass("tools", 40, (15, 30), (10, 16), (1, 5), (3.0, 240.0)),
    UserClass("people", 40, (5, 10), (10, 16), (2, 8), (180.0, 3600.0)),
    UserClass("chats", 300, (1, 4), (2, 6), (1, 2), (20.0, 180.0)),
    UserClass(SCANS, 120, (1, 1), (60, 120), (0, 0), (0.0, 0.0)),
)
DAY_SECONDS = 4 * 3600.0  # Sessions begin within it.


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trace, with its time."""

    seconds: float
    prompt: TracePrompt
    user_class: str
    session: int
    is_last: bool


@dataclass(slots=True)
class Pauses:
    """The pauses of sessions, learned from the times of their turns alone."""

    session_of: dict[bytes, int] = field(default_factory=dict)
    """The session by the hash of the last chunk of its last prompt."""
    times: list[float] = field(default_factory=list)  # Of the last turn, by session.
    pauses: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def expected_seconds(self, hashes: Sequence[bytes], now: float) -> float | None:
        """Learn a turn. Returns the median pause of its session; None = it never came back."""
        found = next((name for name in reversed(hashes) if name in self.session_of), None)
        session = len(self.times) if found is None else self.session_of.pop(found)
        if found is None:
            self.times.append(now)
        else:
            self.pauses[session].append(now - self.times[session])
            self.times[session] = now
        if hashes:
            self.session_of[hashes[-1]] = session
        known = self.pauses.get(session)
        return statistics.median(known) if known else None


class PausingReplay(TraceReplay):
    """A cache that is given hints, or predicts, or does neither. Classes are its tenants."""

    def __init__(
        self, ram_bytes: int, ttls: dict[str, float] | None, pauses: Pauses | None
    ) -> None:
        """`ttls` are the hints' times by class of users. None = there are no hints."""
        super().__init__(MODEL, ram_bytes)
        self._ttls, self._pauses = ttls, pauses
        self._tenants: dict[str, int] = {}
        self._is_scan = False

    def serve_turn(self, turn: Turn) -> ReplayHits:
        """Serve a turn at its time, then retain or release what it has."""
        retention = self.store.retention
        while retention.expire(turn.seconds, 256):
            pass
        self._is_scan = self._ttls is not None and turn.user_class == SCANS
        hits = self.serve(turn.prompt)
        hashes = MODEL.hashes(turn.prompt)
        seconds = None if turn.is_last else (self._ttls or {}).get(turn.user_class)
        if self._pauses is not None:
            seconds = self._pauses.expected_seconds(hashes, turn.seconds)
        if seconds is not None:
            tenant = self._tenants.setdefault(turn.user_class, len(self._tenants) + 1)
            until = turn.seconds + MARGIN * seconds
            for chunk_hash in hashes:
                retention.retain_chunk(self._namespace, chunk_hash, tenant, until)
        elif self._ttls is not None and turn.is_last:
            advice = AdviceQueue(self.store, Demotion(self.store, ()))
            names = b"".join(hashes)
            for _ in advice.release_chunks(self._namespace, names, is_demoted=False):
                pass
        return hits

    def store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        super().store_object(stored, EvictionClass.UNLIKELY if self._is_scan else eviction_class)


def made_turns(classes: Sequence[UserClass], seed: int = 1) -> list[Turn]:
    """Return the turns of all sessions in the order of their times."""
    chance, numbers, turns = random.Random(seed), count(), []
    sessions = count()
    for users in classes:
        system = [next(numbers) for _ in range(4)]  # All sessions of a class begin alike.
        for _ in range(users.sessions):
            session, now = next(sessions), chance.uniform(0, DAY_SECONDS)
            blocks = [] if users.name == SCANS else [*system]
            length = chance.randint(*users.turns)
            for number in range(length):
                new = chance.randint(*(users.new_blocks if number else users.first_blocks))
                blocks = blocks + [next(numbers) for _ in range(new)]
                prompt = TracePrompt(len(blocks) * BLOCK_TOKENS, blocks)
                is_last = number == length - 1
                turns.append(Turn(now, prompt, users.name, session, is_last))
                now += chance.uniform(*users.pause_seconds)
    return sorted(turns, key=lambda turn: turn.seconds)


class _Time(msgspec.Struct):
    timestamp: float


def traced_turns(path: Path, requests: int) -> list[Turn]:
    """Return the first turns of a public trace: a session goes on from the blocks of its last turn.

    Its classes are sessions of a single turn and of several. The block that all prompts share does
    not tell a session.
    """
    prompts = read_trace(path, BLOCK_TOKENS)[:requests]
    lines = path.read_bytes().splitlines()
    times = [msgspec.json.decode(line, type=_Time).timestamp / 1e3 for line in lines if line]
    session_of: dict[int, int] = {}
    sessions: list[int] = []
    for number, prompt in enumerate(prompts):
        own = prompt.blocks[1:]
        found = next((session_of[block] for block in reversed(own) if block in session_of), number)
        session_of.update(dict.fromkeys(own, found))
        sessions.append(found)
    last = {session: number for number, session in enumerate(sessions)}
    first = {session: number for number, session in reversed([*enumerate(sessions)])}
    return [
        Turn(
            times[number],
            prompts[number],
            "single" if last[session] == first[session] else "several",
            session,
            last[session] == number,
        )
        for number, session in enumerate(sessions)
    ]


def class_pauses(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the median pause by class of users, of the classes that return."""
    last: dict[int, float] = {}
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for turn in turns:
        if turn.session in last:
            pauses[turn.user_class].append(turn.seconds - last[turn.session])
        last[turn.session] = turn.seconds
    return {name: statistics.median(seconds) for name, seconds in pauses.items()}


def by_class(turns: Sequence[Turn], hits: Iterator[ReplayHits]) -> dict[str, ReplayHits]:
    """Return the hits of each class of users, and of "all"."""
    total: defaultdict[str, ReplayHits] = defaultdict(ReplayHits)
    for turn, came in zip(turns, hits, strict=True):
        total[turn.user_class] += came
        total["all"] += came
    return dict(total)


def table(turns: Sequence[Turn], shares: Sequence[float] = SHARES) -> Iterator[str]:
    """Yield the rows of the table of hit rates, in Markdown."""
    prompts = [turn.prompt for turn in turns]
    unlimited = UnlimitedCache(MODEL)
    for prompt in prompts:
        unlimited.serve(prompt)
    reads, ttls = all_reads(MODEL, prompts), class_pauses(turns)
    yield "| RAM | users | 2q today | release, low priority | all hints | prediction | ceiling |"
    yield "|---|---|---|---|---|---|---|"
    for share in shares:
        ram_bytes = int(unlimited.stored_bytes * share)
        columns = []
        for hints, pauses in ((None, None), ({}, None), (ttls, None), (None, Pauses())):
            with PausingReplay(ram_bytes, hints, pauses) as cache:
                columns.append(by_class(turns, map(cache.serve_turn, turns)))
        foresight = ForesightCache(MODEL, ram_bytes, reads)
        columns.append(by_class(turns, map(foresight.serve, prompts)))
        for name in sorted(columns[0], key=lambda name: (name == "all", name)):
            rates = " | ".join(f"{column[name].rate:.1%}" for column in columns)
            yield f"| {share:.0%} | {name} | {rates} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pauses", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="default: a trace that is made")
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    trace = options.trace
    turns = traced_turns(trace, options.requests) if trace else made_turns(CLASSES)
    print(f"{len(turns)} requests of {sum(turn.prompt.tokens for turn in turns):,} tokens\n")
    for row in table(turns):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
