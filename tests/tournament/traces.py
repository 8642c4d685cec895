"""Generated traces: chats, agents with sub-agents, documents that many ask about, and scans."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hybridkv.lab.replay import TracePrompt

BLOCK_TOKENS = 512
REQUESTS = 4000
SCAN_EVERY, SCAN_BLOCKS = 6, 200


class Timed(NamedTuple):
    """A prompt, and when it comes, in seconds."""

    seconds: float
    prompt: TracePrompt
    counts: bool = True  # Whether its hits are counted; those of a scan are not.


class Blocks:
    """Numbers of blocks; equal beginnings of prompts have equal numbers."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> list[int]:
        """So many blocks that nobody has."""
        first, self._next = self._next, self._next + count
        return [*range(first, self._next)]


def prompt_of(blocks: list[int]) -> TracePrompt:
    """The blocks, and the first tokens of another that nobody shares."""
    return TracePrompt(len(blocks) * BLOCK_TOKENS + 1, [*blocks, -1 - blocks[-1]])


def chats(rng: random.Random) -> Iterator[Timed]:
    """Conversations of a geometric number of turns, with think times of a minute or two."""
    blocks, system, now = Blocks(), [0], 0.0
    blocks.fresh(1)
    for _ in range(REQUESTS // 3):
        now += rng.expovariate(0.4)
        at, text = now, list(system)
        while True:
            text += blocks.fresh(1 + int(rng.expovariate(1 / 6)))
            yield Timed(at, prompt_of(text))
            if rng.random() < 1 / 3:
                break
            at += rng.lognormvariate(4.6, 0.9)


def agents(rng: random.Random) -> Iterator[Timed]:
    """Long sessions of quick steps; some steps start sub-agents with a shared beginning."""
    blocks, now = Blocks(), 0.0
    system, sub_system = blocks.fresh(8), blocks.fresh(6)
    for _ in range(REQUESTS // 40):
        now += rng.expovariate(1 / 60)
        at, text = now, list(system)
        for _ in range(1 + int(rng.expovariate(1 / 25))):
            text += blocks.fresh(1 + int(rng.expovariate(0.5)))
            yield Timed(at, prompt_of(text))
            if rng.random() < 0.15:
                for _ in range(rng.randint(1, 3)):
                    child, then = sub_system + blocks.fresh(3), at
                    for _ in range(rng.randint(2, 6)):
                        then += rng.expovariate(1 / 8)
                        yield Timed(then, prompt_of(child))
                        child = child + blocks.fresh(1)
                at += 30.0
            at += rng.expovariate(1 / 10) + (300.0 if rng.random() < 0.05 else 0.0)


def documents(rng: random.Random) -> Iterator[Timed]:
    """Questions about documents, some of which are asked about far more often than others."""
    blocks, now = Blocks(), 0.0
    system = blocks.fresh(2)
    known = [blocks.fresh(4 + int(rng.expovariate(1 / 20))) for _ in range(800)]
    for _ in range(REQUESTS):
        now += rng.expovariate(1.0)
        text = system + known[min(int(rng.paretovariate(0.7)) - 1, 10**6) % len(known)]
        yield Timed(now, prompt_of(text + blocks.fresh(1)))


def scans(rng: random.Random) -> Iterator[Timed]:
    """Chats, and after every sixth prompt a long one that nobody repeats."""
    fresh = 1 << 40
    for number, timed in enumerate(sorted(chats(rng), key=lambda one: one.seconds)):
        yield timed
        if number % SCAN_EVERY == 0:
            yield Timed(timed.seconds, prompt_of([*range(fresh, fresh + SCAN_BLOCKS)]), False)
            fresh += SCAN_BLOCKS


GENERATED: Mapping[str, Callable[[random.Random], Iterator[Timed]]] = {
    "chats": chats,
    "agents": agents,
    "documents": documents,
    "scans": scans,
}
