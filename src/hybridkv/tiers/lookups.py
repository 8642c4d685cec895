"""Lookups that wait for tiers: what was asked, what is known by now, and what is worth reading.

Load or compute: reading a hit up to a boundary takes the time of its bytes at the speed that was
last measured, computing takes the engine's time for the rest of the prompt. `plan_reads` decides up
to which boundary reading is faster.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit, needed_chunks, stored_counts
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.record import RecordName
from hybridkv.tiers.state import TierState

CUTS = 8  # Boundaries that are compared with each other.

ObjectPlace = tuple[int, int]  # (group index, chunk) of an object of a prompt.


class ShortfallKind(Enum):
    """Why a lookup got less than the tiers have: a metric, its label, and a sentence for people."""

    CROWDED = "promotions_cut", "crowded", "too many lookups wait for tiers"
    TIERS_AWAY = "promotions_cut", "tiers_away", "no tier can be asked at the moment"
    SILENT = "promotions_cut", "tiers_away", "{tier} does not answer"
    SLOWER = (
        "promotions_cut",
        "slower",
        "reading {tokens} tokens would take {read_seconds:.2g} s, "
        "computing them {compute_seconds:.2g} s",
    )
    NO_ROOM = "promotions_cut", "no_room", "RAM has no room for it"
    FAILED = "promotions_cut", "failed", "{tier}: {error}"
    NOT_FOUND_IN_TIME = "deadlines_missed", "", "no tier had a thread to look for it in time"
    NOT_READ_IN_TIME = "deadlines_missed", "", "it was not read in time"

    def __init__(self, metric: str, label: str, sentence: str) -> None:
        self.counter = metric, label
        self.sentence = sentence


class NeededObject(NamedTuple):
    """An object that a waiting lookup wants, and the tier that has it."""

    tier: TierState
    group_index: int
    chunk: int


class LookupRequest(NamedTuple):
    """What an engine asked for. Times are seconds of the loop's clock."""

    connection_id: int
    id: int
    lease: int
    namespace: Namespace
    geometry: Geometry
    hashes: bytes  # The chunks' hashes, HASH_BYTES each, of the longest prefix that may be hit.
    asked_at: float
    deadline: float
    tokens_per_second: int  # How fast the engine computes; 0 = not known.
    resident: int  # The hit in chunks that RAM alone had at `asked_at`.

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, chunk: int) -> bytes:
        """The hash of one chunk; empty before the first one."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES] if chunk >= 0 else b""

    def name_of(self, group_index: int, chunk: int) -> RecordName:
        """The name of one object in tiers."""
        namespace = self.namespace
        return RecordName(namespace.identity, namespace.gids[group_index], self.hash_of(chunk))

    def resident_slots(self, hits: Iterable[int]) -> Iterable[Slot]:
        """The objects that RAM has of hits of so many chunks."""
        places = {
            (chunk, index): None
            for chunks in hits
            for index, group in enumerate(self.geometry.groups)
            for chunk in needed_chunks(self.geometry, group, chunks)
        }
        return filter(None, (self.namespace.get(self.hash_of(at), index) for at, index in places))


@dataclass(eq=False)
class WaitingLookup:
    """A lookup that is not answered yet, with what is known by now."""

    request: LookupRequest
    is_over: bool = False
    """Whether it does not wait any more: it is answered, or nobody wants the answer."""
    target: int = 0  # The hit in chunks that the lookup may become, as far as is known.
    located: dict[ObjectPlace, TierState] = field(default_factory=dict)  # The tier that has it.
    unknown: dict[ObjectPlace, None] = field(default_factory=dict)
    """Objects of which some tier must be asked whether it has them."""
    finding: int = 0  # Tiers that are asked, or will be when it is the lookup's turn.
    todo: deque[NeededObject] = field(default_factory=deque)
    reading: int = 0  # Objects that are being read.
    held: list[Slot] = field(default_factory=list)
    """Objects that are pinned until the lookup is answered, once for each time."""
    is_planned: bool = False  # Whether it is decided what to read, once every tier has answered.
    started_at: float = 0.0  # When that was decided.
    begun_bytes: Counter[TierState] = field(default_factory=Counter)
    """Bytes of the objects whose read was started, and of those that came."""
    read_bytes: Counter[TierState] = field(default_factory=Counter)
    origins: dict[int, str] = field(default_factory=dict)
    """The name of the tier that gave (a part of) a chunk."""
    shortfall: str = ""  # Why it gets less than the tiers have, if it does.


def plan_reads(lookup: WaitingLookup, now: float) -> Mapping[str, float]:
    """Decide what is read, from what RAM has and where objects are located in tiers.

    Sets `todo`, in the order of reading, and `target`; if RAM alone has that hit nothing is read.
    Returns the facts of ShortfallKind.SLOWER where tiers could make the hit longer.
    """
    request, geometry = lookup.request, lookup.request.geometry
    masks = _masks(lookup)
    reach = lookup.target = largest_hit(geometry, masks, request.chunks)
    if reach <= request.resident:
        return {}
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
    if chunks > request.resident:
        lookup.todo.extend(_needs(lookup, masks, chunks))
    lookup.target = chunks
    if chunks == reach:
        return {}
    return {
        "tokens": reach * geometry.chunk_tokens,
        "read_seconds": read_seconds(reach),
        "compute_seconds": (reach - request.resident) * chunk_seconds,
    }


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
    present = list(map(bytearray, lookup.request.namespace.present(lookup.request.hashes)[0]))
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
