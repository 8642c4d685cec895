"""`python -m tests.storage.replay TRACE`: hit rates of the eviction policies on a trace of real requests.

TRACE has a JSON object a line: `input_length` (tokens) and `hash_ids`, one for each 512 tokens of the prompt, chained.
The real store is driven, with a chunk of 512 tokens and objects of one page: one of a full attention group and one of a
group with recurrent state for each chunk.  A hit is what the daemon would find: all full objects, and the state at the
end.  `--scan N` adds a prompt of 200 chunks that nobody repeats after every N-th request; it does not count itself.
"""

import argparse
import json
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridkv.core.eviction import Policy
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import SLOT_ALIGN, slot_bytes
from hybridkv.storage.store import Namespace, Store

CHUNK_TOKENS = 512
CHUNKS_PER_STEP = 8
SHAPE = (100, 1)
SCAN_CHUNKS = 200
assert slot_bytes(*SHAPE) == SLOT_ALIGN


def prompts(trace: Path) -> list[list[int]]:
    """The whole chunks of every prompt."""
    requests = [json.loads(line) for line in trace.read_text().splitlines()]
    return [request["hash_ids"][: request["input_length"] // CHUNK_TOKENS] for request in requests]


def with_scans(requests: Sequence[list[int]], every: int) -> Iterator[tuple[list[int], bool]]:
    """Requests, and whether they count."""
    fresh = 1 << 40
    for number, request in enumerate(requests):
        yield request, True
        if every and number % every == 0:
            yield list(range(fresh, fresh + SCAN_CHUNKS)), False
            fresh += SCAN_CHUNKS


def replay(requests: Iterator[tuple[list[int], bool]], objects: int, policy: Policy, hints: bool) -> float:
    """The share of chunks that are hits in a cache of so many objects; `hints`: it is told where prompts end."""
    with mmap.mmap(-1, objects * SLOT_ALIGN) as memory:
        view = memoryview(memory)
        store = Store(view, policy=policy)
        store.grow(len(view))
        space = Namespace(bytes(HASH_BYTES), (0, 1), (frozenset({SHAPE}),) * 2, (True, False))
        hits = asked = 0
        for chain, counts in requests:
            names = [number.to_bytes(HASH_BYTES, "little") for number in chain]
            chunks = _hit(store, space, names)
            if counts:
                hits, asked = hits + chunks, asked + len(chain)
            _store(store, space, names, hints)
        store.check()
        del store
        view.release()
    return hits / asked


def _hit(store: Store, space: Namespace, names: list[bytes]) -> int:
    slots = []
    for name in names:
        entry = space.entries.get(name)
        if entry is None or entry.slots[0] is None:
            break
        slots.append((entry.slots[0], entry.slots[1]))
    while slots and slots[-1][1] is None:
        slots.pop()
    found = [slot for slot, _ in slots]
    if slots and slots[-1][1] is not None:
        found.append(slots[-1][1])
    store.pin(found)
    store.unpin(found)
    return len(slots)


def _store(store: Store, space: Namespace, names: list[bytes], hints: bool) -> None:
    for first in range(0, len(names), CHUNKS_PER_STEP):
        for group in (0, 1):
            for at in range(first, min(len(names), first + CHUNKS_PER_STEP)):
                entry = space.entries.get(names[at])
                if entry is not None and entry.slots[group] is not None:
                    continue
                for slot in store.grant(SHAPE, 1):
                    interior = hints and group == 1 and at < len(names) - 2
                    store.commit(slot, space, group, names[at], names[at - 1] if at else b"", interior)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.storage.replay", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scan", type=int, default=0, metavar="N")
    options = parser.parse_args()
    requests = prompts(options.trace)
    everything = 2 * len({chunk for request in requests for chunk in request})
    print(f"{len(requests)} requests, {everything} objects, a scan every {options.scan} requests (0: none)")
    print("cache  lru, no hints      lru       2q")
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        rates = [
            replay(with_scans(requests, options.scan), int(everything * share), policy, hints)
            for policy, hints in ((Policy.LRU, False), (Policy.LRU, True), (Policy.TWO_QUEUES, True))
        ]
        print(f"{share:5.0%}  " + "  ".join(f"{rate:7.1%}" for rate in rates), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
