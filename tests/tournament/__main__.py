"""`python -m tests.tournament [TRACE]`: what each policy of eviction hits, next to foresight.

Blocks of one size, and one full attention group. Sizes are shares of all blocks of a trace; the
numbers are shares of all tokens. Without a trace of requests the generated ones alone are run.
"told" knows which blocks are read again, with so much accuracy, and "foresight" also when.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.state_boundaries import StateRule
from hybridkv.lab.replay import (
    ForesightCache,
    Reads,
    ReplayHits,
    ReplayModel,
    UnlimitedCache,
    all_reads,
    read_trace,
)
from tests.tournament.policies import POLICIES, Policy, Told
from tests.tournament.traces import BLOCK_TOKENS, GENERATED, Timed

SHARES = (0.05, 0.1, 0.2)
ACCURACIES = (0.7, 0.8, 0.9, 0.95, 1.0)
SEED = 20261123
MODEL = ReplayModel(
    Geometry((Group(0, GroupKind.FULL, BLOCK_TOKENS, (8,)),), *[BLOCK_TOKENS] * 3),
    StateRule(None, BLOCK_TOKENS),
    BLOCK_TOKENS,
)


class _Time(msgspec.Struct):
    timestamp: float = 0.0  # In milliseconds.


def read_timed(path: Path) -> list[Timed]:
    """A trace with its times; raises ConfigError where it is none."""
    prompts = read_trace(path, BLOCK_TOKENS)
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    times = [msgspec.json.decode(line, type=_Time).timestamp / 1e3 for line in lines]
    return [Timed(*one) for one in zip(times, prompts, strict=True)]


def rate(policy: Policy, trace: Sequence[Timed]) -> float:
    """The share of the tokens that a policy hits."""
    hit = tokens = 0
    for seconds, prompt, counts in trace:
        whole = prompt.blocks[: prompt.tokens // BLOCK_TOKENS]
        blocks = policy.serve(seconds, whole)
        hit += counts * min(blocks, (prompt.tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        tokens += counts * prompt.tokens
    return hit / tokens


def foresight(ram_bytes: int, reads: Reads, trace: Sequence[Timed]) -> float:
    """The same of a cache that knows what the trace `reads`."""
    cache = ForesightCache(MODEL, ram_bytes, reads)
    hits = (cache.serve(one.prompt) if one.counts else _unheard(cache, one) for one in trace)
    return sum(hits, ReplayHits()).rate


def _unheard(cache: ForesightCache, one: Timed) -> ReplayHits:
    cache.serve(one.prompt)
    return ReplayHits()


def results(trace: Sequence[Timed]) -> Iterator[tuple[str, list[float]]]:
    """The rates of each policy at each share."""
    unlimited = UnlimitedCache(MODEL)
    for one in trace:
        unlimited.serve(one.prompt)
    block_bytes = MODEL.smallest_bytes
    sizes = [int(unlimited.stored_bytes // block_bytes * share) for share in SHARES]
    for name, policy in POLICIES.items():
        yield name, [rate(policy(room), trace) for room in sizes]
    whole = [one.prompt.blocks[: one.prompt.tokens // BLOCK_TOKENS] for one in trace]
    for accuracy in ACCURACIES:
        told = [rate(Told(room, whole, accuracy, SEED), trace) for room in sizes]
        yield f"told {accuracy:.0%}", told
    reads = all_reads(MODEL, [one.prompt for one in trace])
    yield "foresight", [foresight(room * block_bytes, reads, trace) for room in sizes]


def main() -> int:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(prog="python -m tests.tournament", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    options = parser.parse_args()
    print(f"seed {SEED}")
    traces = {name: make(random.Random(SEED)) for name, make in GENERATED.items()}
    given = {"given": iter(read_timed(options.trace))} if options.trace else {}
    for name, prompts in (given | traces).items():
        trace = sorted(prompts, key=lambda one: one.seconds)
        print(f"{name}: {len(trace)} prompts; " + "  ".join(f"{one:.0%}" for one in SHARES))
        for policy, rates in results(trace):
            print(f"  {policy:10}" + "".join(f"  {one:.3f}" for one in rates), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
