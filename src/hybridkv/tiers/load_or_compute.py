"""Lookups that wait for tiers: what was asked, what is known by now, and what is worth reading.

Load or compute: reading a hit up to a boundary takes the time of its bytes at the speed that was
last measured, computing takes the engine's time for the rest of the prompt. `plan_reads` decides up
to which boundary reading is faster.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, cycle, islice
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit, needed_chunks, stored_counts
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tails import is_tail_hit, tail_chunk, tail_tokens
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.health import TierState
from hybridkv.tiers.record import RecordName

CUTS = 8  # Boundaries that are compared with each other.
FIND_KEYS_MAX = 4096  # Objects that a tier is asked about at once.
FIND_KEYS_FIRST = 8  # In the first round.

ObjectPlace = tuple[int, int]
"""(group index, place) of an object of a prompt: its chunk, or behind the last chunk its tail."""


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
    NO_ROOM = "promotions_cut", "no_room", "RAM has room for {fits} of {tokens} tokens"
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
    at: int  # As in ObjectPlace.


class PromptHit(NamedTuple):
    """A hit: its chunks, the last of which is a tail where `tail` counts one from 1 on."""

    chunks: int
    tail: int
    tokens: int


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
    resident: PromptHit  # The hit that RAM alone had at `asked_at`.
    tails: bytes = b""  # The names of tails, as in wire.Lookup.
    tails_from: int = 0
    audit_lease: int = 0  # As in wire.Lookup.

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, at: int) -> bytes:
        """The hash of one chunk, or the name of a tail, by its place; empty before the first."""
        names, at = (self.hashes, at) if at < self.chunks else (self.tails, at - self.chunks)
        return names[at * HASH_BYTES : (at + 1) * HASH_BYTES] if at >= 0 else b""

    def chunk_of(self, at: int) -> int:
        """The chunk that a place is, or that its tail ends inside."""
        is_tail = at >= self.chunks
        return tail_chunk(self.geometry, self.tails_from, at - self.chunks) if is_tail else at

    def name_of(self, group_index: int, at: int) -> RecordName:
        """The name of one object in tiers."""
        namespace = self.namespace
        return RecordName(namespace.identity, namespace.gids[group_index], self.hash_of(at))

    def hit_of(self, chunks: int, tail: int = 0) -> PromptHit:
        """The hit of so many chunks, or that which ends with the tail where one is given."""
        if not tail:
            return PromptHit(chunks, 0, chunks * self.geometry.chunk_tokens)
        chunk = tail_chunk(self.geometry, self.tails_from, tail - 1)
        return PromptHit(chunk + 1, tail, tail_tokens(self.geometry, self.tails_from, tail - 1))

    def needed(self, hit: PromptHit) -> Iterator[ObjectPlace]:
        """The places of what a hit needs."""
        for index, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, hit.chunks):
                is_tail = hit.tail and chunk == hit.chunks - 1
                yield index, self.chunks + hit.tail - 1 if is_tail else chunk

    def resident_slots(self, hits: Iterable[PromptHit]) -> Iterable[Slot]:
        """The objects that RAM has of these hits."""
        places = {place: None for hit in hits for place in self.needed(hit)}
        return filter(None, (self.namespace.get(self.hash_of(at), index) for index, at in places))


@dataclass(eq=False)
class WaitingLookup:
    """A lookup that is not answered yet, with what is known by now."""

    request: LookupRequest
    is_over: bool = False
    """Whether it does not wait any more: it is answered, or nobody wants the answer."""
    target: int = 0  # The hit in chunks that the lookup may become, as far as is known.
    tail: int = 0  # A tail, counted from 1, that a hit may end with; 0 = none was located.
    hits: list[PromptHit] = field(default_factory=list)
    """The hits for which is read, ascending: the target, and one that comes earlier."""
    located: dict[ObjectPlace, TierState] = field(default_factory=dict)  # The tier that has it.
    unknown: dict[ObjectPlace, None] = field(default_factory=dict)
    """Objects of which some tier must be asked whether it has them, and was not."""
    asked: list[ObjectPlace] = field(default_factory=list)  # What this round asks tiers about.
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
    short_of: set[ShortfallKind] = field(default_factory=set)  # The reasons that were counted.


def next_finds(lookup: WaitingLookup) -> list[ObjectPlace]:
    """The next objects to ask tiers about, which are not `unknown` any more; empty = no more.

    The first FIND_KEYS_FIRST that every hit needs are asked about alone: of a prompt that nobody
    stored that is all. Then up to FIND_KEYS_MAX are asked about at once. Of more, those that every
    hit needs come first, prefix first, and end where one is missing. Then come windows and states,
    the last ones first, until nothing behind the longest hit is unknown: no need moves down while
    hits grow, so no longer hit needs what is before it. What the hits need with which that is
    compared comes last.
    """
    unknown, most = lookup.unknown, FIND_KEYS_MAX
    if not unknown:
        return []
    masks = _masks(lookup)
    if lookup.asked:
        reach = _reach(lookup, masks)
        for place in [place for place in unknown if place[1] >= reach]:
            del unknown[place]
    groups = lookup.request.geometry.groups
    prefix = [place for place in unknown if groups[place[0]].kind is GroupKind.FULL]
    if prefix and not lookup.asked:
        most = min(FIND_KEYS_FIRST, FIND_KEYS_MAX)
    if len(unknown) <= most:
        order = list(unknown)
    elif prefix:
        order = sorted(prefix, key=lambda place: (place[1], place[0]))
    else:
        hit = _longest(lookup, masks)
        is_longer = hit.tokens > lookup.request.resident.tokens
        behind = [place for place in unknown if place[1] >= hit.chunks or not is_longer]
        if behind:
            order = sorted(behind, key=lambda place: (-place[1], place[0]))
        else:
            hits = (lookup.request.hit_of(cut) for cut in _cuts(hit.chunks))
            needed = (place for hit in hits for place in lookup.request.needed(hit))
            order = [place for place in dict.fromkeys(needed) if place in unknown]
    if not order:
        unknown.clear()
    for place in order[:most]:
        del unknown[place]
    return order[:most]


def _reach(lookup: WaitingLookup, masks: Sequence[bytes]) -> int:
    """The chunks before the first one that is known to lack an object which every hit needs."""
    reach = lookup.request.chunks
    for index, group in enumerate(lookup.request.geometry.groups):
        chunk = masks[index].find(0, 0, reach) if group.kind is GroupKind.FULL else -1
        while 0 <= chunk < reach:
            if (index, chunk) not in lookup.unknown:
                reach = chunk
                break
            chunk = masks[index].find(0, chunk + 1, reach)
    return reach


def plan_reads(
    lookup: WaitingLookup, room_bytes: int, now: float
) -> list[tuple[ShortfallKind, Mapping[str, float]]]:
    """Decide what is read, from what RAM has and where objects are located in tiers.

    Sets `todo`, in the order of reading, `hits` and `target`; nothing is read if RAM alone has that
    hit, and `hits` is empty then.
    The objects of the hit, with those that RAM alone hits, take at most `room_bytes`. Returns why
    the hit is shorter than what tiers could make of it, with the facts of each reason.
    """
    request, resident = lookup.request, lookup.request.resident
    masks = _masks(lookup)
    lookup.hits = []
    longest = _longest(lookup, masks)
    lookup.target = longest.chunks
    if longest.tokens <= resident.tokens:
        return []
    sizes = HitSizes(request.geometry, longest.chunks)
    hits = _candidates(lookup, masks, longest, sizes, room_bytes)
    by_tokens = {hit.tokens: hit for hit in hits if sizes.of((resident, hit)) <= room_bytes}
    fits = by_tokens[max(by_tokens)] if by_tokens else resident
    lookup.target = fits.chunks
    short: list[tuple[ShortfallKind, Mapping[str, float]]] = []
    if fits.tokens < longest.tokens:
        short.append((ShortfallKind.NO_ROOM, {"fits": fits.tokens, "tokens": longest.tokens}))
    if fits.tokens <= resident.tokens:
        return short
    read_seconds = _reading(lookup, fits.chunks, now)
    rate = request.tokens_per_second
    token_seconds = 1 / rate if rate else 0.0

    def seconds(tokens: int) -> float:
        return read_seconds(by_tokens[tokens])

    patience = request.deadline - now
    tokens = best_load(resident.tokens, by_tokens, seconds, token_seconds, patience)
    best = by_tokens.get(tokens, resident)
    lookup.target = best.chunks
    if best != resident:
        half = request.hit_of(largest_hit(request.geometry, masks, best.chunks // 2))
        has_room = sizes.of((resident, half, best)) <= room_bytes
        lookup.hits = [half, best] if half.tokens > resident.tokens and has_room else [best]
        lookup.todo.extend(_needs(lookup))
    if best.tokens < fits.tokens:
        facts = {
            "tokens": fits.tokens,
            "read_seconds": read_seconds(fits),
            "compute_seconds": (fits.tokens - resident.tokens) * token_seconds,
        }
        short.append((ShortfallKind.SLOWER, facts))
    return short


def _longest(lookup: WaitingLookup, masks: Sequence[bytes]) -> PromptHit:
    """The longest hit of what there is, with the located tail if it ends behind all chunks."""
    request = lookup.request
    whole = request.hit_of(largest_hit(request.geometry, masks, request.chunks))
    hit = request.hit_of(whole.chunks, lookup.tail)
    is_hit = lookup.tail and is_tail_hit(request.geometry, masks, hit.chunks - 1)
    return hit if is_hit and hit.tokens > whole.tokens else whole


def _candidates(
    lookup: WaitingLookup,
    masks: Sequence[bytes],
    longest: PromptHit,
    sizes: "HitSizes",
    room_bytes: int,
) -> set[PromptHit]:
    """The hits that are compared: the longest one, and some up to the longest that has room."""
    request = lookup.request
    whole = largest_hit(request.geometry, masks, longest.chunks - bool(longest.tail))
    reach = sizes.largest(masks, whole, request.resident, room_bytes)
    cuts = _cuts(reach)
    return {longest, *(request.hit_of(largest_hit(request.geometry, masks, at)) for at in cuts)}


def _cuts(chunks: int) -> list[int]:
    """The boundaries, up to that one, that are compared with each other; the largest first."""
    return [-(-chunks * part // CUTS) for part in range(CUTS, 0, -1)]


class HitSizes:
    """The bytes of RAM that the objects of hits take."""

    def __init__(self, geometry: Geometry, chunks: int) -> None:
        """Of hits of at most `chunks` chunks."""
        self._geometry = geometry
        periods = _slot_sizes(geometry)
        self._sums = [[*accumulate(islice(cycle(sizes), chunks), initial=0)] for sizes in periods]
        """Per group and number of chunks, the bytes of the objects of the first ones."""
        self._chunk_bytes_max = max(1, sum(map(max, periods)))

    def of(self, hits: Iterable[PromptHit]) -> int:
        """The bytes of the objects that any of some hits needs; the hits ascend."""
        size = 0
        for group, sums in zip(self._geometry.groups, self._sums, strict=True):
            end = 0
            for hit in hits:
                need = needed_chunks(self._geometry, group, hit.chunks)
                stop = need.stop - bool(hit.tail)
                # A tail is as large as the object of the chunk that it ends inside.
                size += max(0, sums[stop] - sums[max(end, need.start)])
                size += sums[need.stop] - sums[stop]
                end = max(end, stop)
        return size

    def largest(
        self, masks: Sequence[bytes], chunks: int, resident: PromptHit, room_bytes: int
    ) -> int:
        """The largest hit of at most `chunks` chunks of which RAM can hold all at once.

        `masks` tell what there is, and the objects of the hit `resident` take room as well. It is
        not longer than `resident` where no longer one has room.
        """
        chunk_tokens = self._geometry.chunk_tokens
        while chunks * chunk_tokens > resident.tokens:
            hit = PromptHit(chunks, 0, chunks * chunk_tokens)
            excess = self.of((resident, hit)) - room_bytes
            if excess <= 0:
                break
            # A chunk less takes at most `_chunk_bytes_max` less: no hit in between has room.
            fewer = -(-excess // self._chunk_bytes_max)
            least = resident.tokens // chunk_tokens
            chunks = largest_hit(self._geometry, masks, max(least, chunks - fewer))
        return chunks


def best_load(
    resident: int,
    hits: Iterable[int],
    read_seconds: Callable[[int], float],
    token_seconds: float,
    patience_seconds: float,
) -> int:
    """The hit, in tokens, at which a prompt is ready first.

    `resident` is the hit that needs no reading, `hits` are other ones. `read_seconds` tells the
    time of reading one of them, `token_seconds` that of computing a token (0 = not known: the
    largest hit is best). Reading that would outlast `patience_seconds` is not begun.
    """
    best, gain = resident, 0.0
    for tokens in sorted(set(hits), reverse=True):
        if tokens > resident:
            read, compute = read_seconds(tokens), (tokens - resident) * token_seconds
            saved = compute - read if token_seconds else float(tokens)
            if read <= patience_seconds and saved > gain:
                best, gain = tokens, saved
    return best


def _masks(lookup: WaitingLookup) -> list[bytes]:
    """Per group the presence mask of what is in RAM or located in a tier.

    What came into RAM since it was located is not to be read, and is not located any more.
    """
    request = lookup.request
    present = list(map(bytearray, request.namespace.present(request.hashes)[0]))
    for index, at in list(lookup.located):
        if request.namespace.get(request.hash_of(at), index) is not None:
            del lookup.located[index, at]
        elif at < request.chunks:
            present[index][at] = 1
    return [bytes(mask) for mask in present]


def _reading(lookup: WaitingLookup, reach: int, now: float) -> Callable[[PromptHit], float]:
    """The seconds of reading what a hit of so many chunks, up to `reach`, needs of tiers."""
    request, geometry = lookup.request, lookup.request.geometry
    chunks, tail = [[0.0] * reach for _ in geometry.groups], 0.0
    sizes = _slot_sizes(geometry)
    for (index, at), tier in lookup.located.items():
        size = sizes[index][at % len(sizes[index])]
        if at < reach:
            chunks[index][at] = tier.speed.seconds(size, now)
        elif at >= request.chunks:
            tail += tier.speed.seconds(size, now)
    costs = [list(accumulate(each, initial=0.0)) for each in chunks]

    def read_seconds(hit: PromptHit) -> float:
        total = tail if hit.tail else 0.0
        for group, cost in zip(geometry.groups, costs, strict=True):
            need = needed_chunks(geometry, group, hit.chunks)
            total += cost[need.stop - bool(hit.tail)] - cost[need.start]
        return total

    return read_seconds


def _slot_sizes(geometry: Geometry) -> list[list[int]]:
    """Per group, the bytes of the slot of each chunk's object, in one period of the chunks."""
    return [
        [
            slot_bytes(count * group.block_bytes, geometry.parts(group)) if count else 0
            for count in stored_counts(geometry, group)
        ]
        for group in geometry.groups
    ]


def _needs(lookup: WaitingLookup) -> list[NeededObject]:
    """What the lookup's hits need of tiers, hit by hit, each prefix first and a tail last."""
    places = {
        (index, at): None
        for hit in lookup.hits
        for at, index in sorted((at, index) for index, at in lookup.request.needed(hit))
        if (index, at) in lookup.located
    }
    return [NeededObject(lookup.located[place], *place) for place in places]
