"""`python -m tests.unit.lab.replay TRACE`: hit rates of the eviction policies on real requests.

As `hybridkv replay`, for chunks of 512 tokens with two objects of one size: one of a full attention
group and one of a group with recurrent state. Sizes are shares of all objects. `--scan N` adds a
prompt of 200 chunks that nobody repeats after every N-th request; it does not count itself.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.core.state_boundaries import StateRule
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

GROUPS = (
    Group(0, GroupKind.FULL, BLOCK_TOKENS, (100,)),
    Group(1, GroupKind.RECURRENT, BLOCK_TOKENS, (100,)),
)
MODEL = ReplayModel(
    Geometry(GROUPS, BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS),
    StateRule(None, BLOCK_TOKENS),
    BLOCK_TOKENS,
)
SCAN_CHUNKS = 200


class Unmarked(TraceReplay):
    """A cache that is not told where prompts end."""

    def store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        super().store_object(stored, EvictionClass.PROMPT)


def with_scans(prompts: Sequence[TracePrompt], every: int) -> Iterator[tuple[TracePrompt, bool]]:
    """Yield (prompt, whether it counts) of the prompts and of the scans between them."""
    fresh = 1 << 40
    for number, prompt in enumerate(prompts):
        yield prompt, True
        if every and number % every == 0:
            yield TracePrompt(SCAN_CHUNKS * BLOCK_TOKENS, range(fresh, fresh + SCAN_CHUNKS)), False
            fresh += SCAN_CHUNKS


def hits(cache: TraceReplay, prompts: Iterator[tuple[TracePrompt, bool]]) -> ReplayHits:
    """Return the hits of the prompts that count."""
    total = ReplayHits()
    with cache:
        for prompt, counts in prompts:
            came = cache.serve(prompt)
            total += came if counts else ReplayHits()
    return total


def main() -> int:
    """Print a table of hit rates, a row for each size of the cache."""
    parser = argparse.ArgumentParser(prog="python -m tests.unit.lab.replay", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scan", type=int, default=0, metavar="N")
    options = parser.parse_args()
    prompts = read_trace(options.trace, BLOCK_TOKENS)
    unlimited = UnlimitedCache(MODEL)
    ceiling = sum((unlimited.serve(prompt) for prompt in prompts), ReplayHits())
    print(
        f"{len(prompts)} requests, a scan every {options.scan} requests (0: none), "
        f"at most {ceiling.rate:.1%}"
    )
    print("cache  lru, no marks      lru       2q")
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        ram_bytes = int(unlimited.stored_bytes * share)
        caches = (
            Unmarked(MODEL, ram_bytes, EvictionPolicy.LRU),
            TraceReplay(MODEL, ram_bytes, EvictionPolicy.LRU),
            TraceReplay(MODEL, ram_bytes, EvictionPolicy.TWO_QUEUES),
        )
        rates = [hits(cache, with_scans(prompts, options.scan)).rate for cache in caches]
        print(f"{share:5.0%}  " + "  ".join(f"{rate:7.1%}" for rate in rates), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
