"""Load or compute: up to which boundary reading a hit from tiers is faster than computing it.

Reading up to a boundary takes the time of its bytes at the speed that was last measured.
Computing takes the engine's time for the rest of the prompt. Nothing here changes anything.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit, needed_chunks, stored_counts
from hybridkv.shm.slots import slot_bytes
from hybridkv.tiers.lookups import NeededObject, Shortfall, ShortfallKind, WaitingLookup

CUTS = 8
"""Boundaries that are compared with each other."""


class ReadPlan(NamedTuple):
    """What to read for a lookup."""

    chunks: int
    """The hit that it makes; not more than RAM has = nothing is read."""
    needs: Sequence[NeededObject] = ()
    """The objects, in the order of reading."""
    shortfall: Shortfall | None = None
    """Why the hit is shorter than tiers could make it."""


def plan_reads(lookup: WaitingLookup, now: float) -> ReadPlan:
    """Decide what is read, from what RAM has and where objects are located in tiers."""
    request, geometry = lookup.request, lookup.request.geometry
    masks = _masks(lookup)
    reach = largest_hit(geometry, masks, request.chunks)
    if reach <= request.resident:
        return ReadPlan(request.resident)
    boundaries = {
        largest_hit(geometry, masks, -(-reach * part // CUTS)) for part in range(1, CUTS + 1)
    }
    costs = _costs(lookup, reach, now)

    def read_seconds(chunks: int) -> float:
        needs = (needed_chunks(geometry, group, chunks) for group in geometry.groups)
        return sum(
            cost[need.stop] - cost[need.start] for cost, need in zip(costs, needs, strict=True)
        )

    rate = request.tokens_per_second
    chunk_seconds = geometry.chunk_tokens / rate if rate else 0.0
    patience = request.deadline - now
    chunks = best_load(request.resident, boundaries, read_seconds, chunk_seconds, patience)
    shortfall = None
    if chunks < reach:
        shortfall = Shortfall(
            ShortfallKind.SLOWER,
            tokens=reach * geometry.chunk_tokens,
            read_seconds=read_seconds(reach),
            compute_seconds=(reach - request.resident) * chunk_seconds,
        )
    needs = _needs(lookup, masks, chunks) if chunks > request.resident else ()
    return ReadPlan(chunks, needs, shortfall)


def best_load(
    resident: int,
    boundaries: Iterable[int],
    read_seconds: Callable[[int], float],
    chunk_seconds: float,
    patience_seconds: float,
) -> int:
    """The boundary, in chunks, at which a prompt is ready first.

    `resident` is the hit that needs no reading, `boundaries` are other hits. `read_seconds` tells
    the time of reading up to one of them, `chunk_seconds` that of computing a chunk (0 = not known:
    the largest hit is best). Reading that would outlast `patience_seconds` is not begun.
    """
    best, gain = resident, 0.0
    for chunks in sorted(set(boundaries), reverse=True):
        if chunks > resident:
            read, compute = read_seconds(chunks), (chunks - resident) * chunk_seconds
            saved = compute - read if chunk_seconds else float(chunks)
            if read <= patience_seconds and saved > gain:
                best, gain = chunks, saved
    return best


def _masks(lookup: WaitingLookup) -> list[bytes]:
    """Per group the presence mask of what is in RAM or located in a tier."""
    request = lookup.request
    known = request.namespace.entries
    entries = [known.get(request.hash_of(chunk)) for chunk in range(request.chunks)]
    present = [
        bytearray(entry is not None and entry.slots[index] is not None for entry in entries)
        for index in range(len(request.geometry.groups))
    ]
    for index, chunk in lookup.located:
        present[index][chunk] = 1
    return [bytes(mask) for mask in present]


def _costs(lookup: WaitingLookup, reach: int, now: float) -> list[list[float]]:
    """Per group and number of chunks, the seconds of reading what tiers have of the first ones."""
    geometry = lookup.request.geometry
    seconds = [[0.0] * reach for _ in geometry.groups]
    sizes = [
        [
            slot_bytes(count * group.block_bytes, geometry.parts(group))
            for count in stored_counts(geometry, group)
        ]
        for group in geometry.groups
    ]
    for (index, chunk), tier in lookup.located.items():
        if chunk < reach:
            size = sizes[index][chunk % len(sizes[index])]
            seconds[index][chunk] = tier.speed.seconds(size, now)
    return [list(accumulate(each, initial=0.0)) for each in seconds]


def _needs(lookup: WaitingLookup, masks: Sequence[bytes], chunks: int) -> list[NeededObject]:
    """The objects that a hit of `chunks` chunks lacks, those of half of the hit first."""
    geometry = lookup.request.geometry
    places: dict[tuple[int, int], None] = {}
    half = largest_hit(geometry, masks, chunks // 2)
    for boundary in (half, chunks) if half > lookup.request.resident else (chunks,):
        for chunk, index in sorted(
            (chunk, index)
            for index, group in enumerate(geometry.groups)
            for chunk in needed_chunks(geometry, group, boundary)
            if (index, chunk) in lookup.located
        ):
            places[index, chunk] = None
    return [NeededObject(lookup.located[place], *place) for place in places]
