"""Load or compute: where the objects of a lookup are, and which of them are worth reading.

Reading a hit up to a boundary takes the time of its bytes at the speed that was last measured.
Computing takes the engine's time for the rest of the prompt. `plan_reads` decides up to which
boundary reading is faster. `ObjectSearch` has what is known of the objects by then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, cycle, islice
from operator import attrgetter
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit, needed_chunks, stored_counts
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tails import is_tail_hit, tail_chunk, tail_tokens
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.health import TierState
from hybridkv.tiers.record import RecordName, record_key

CUTS = 8  # Boundaries that are compared with each other.
FIND_KEYS_MAX = 4096  # Objects that a tier is asked about at once.
FIND_KEYS_FIRST = 8  # In the first round.


class ShortfallKind(Enum):
    """The reasons why a lookup gets less than the tiers have: a metric, its label, a sentence."""

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
        self.sentence = sentence  # With the names of facts in braces.


class Shortfall(NamedTuple):
    """A reason why a lookup gets less than the tiers have, with its facts."""

    kind: ShortfallKind
    facts: Mapping[str, str | float]

    @property
    def sentence(self) -> str:
        """The reason for people, such as "disk does not answer"."""
        return self.kind.sentence.format(**self.facts)


class ObjectPlace(NamedTuple):
    """The place of an object in the prompt of a lookup."""

    group_index: int
    position: int
    """The number of its chunk. Positions from `LookupRequest.chunks` on are those of tails."""


prefix_order = attrgetter("position", "group_index")  # Sorts places prefix first.


class NeededObject(NamedTuple):
    """An object that a waiting lookup wants, and the tier that has it."""

    tier: TierState
    place: ObjectPlace


class PromptHit(NamedTuple):
    """A hit of a prompt."""

    chunks: int  # The last of them is a tail where `tail` counts one.
    tail: int  # The tail that the hit ends with, counted from 1. 0 = it ends with a chunk.
    tokens: int


class LookupKey(NamedTuple):
    """The name of a lookup that waits."""

    connection_id: int
    lease: int


class LookupRequest(NamedTuple):
    """A lookup, as an engine asked for it. Times are seconds of the loop's clock."""

    connection_id: int
    id: int
    lease: int
    namespace: Namespace
    geometry: Geometry
    hashes: bytes  # The chunks' hashes, HASH_BYTES each, of the longest prefix that may be hit.
    asked_at: float
    deadline: float
    tokens_per_second: int  # How fast the engine computes. 0 = not known.
    resident: PromptHit  # The hit that RAM alone had at `asked_at`.
    tails: bytes = b""  # The names of tails, as in wire.Lookup.
    tails_from: int = 0
    audit_lease: int = 0  # As in wire.Lookup.

    @property
    def key(self) -> LookupKey:
        """The name of the lookup while it waits."""
        return LookupKey(self.connection_id, self.lease)

    @property
    def chunks(self) -> int:
        """The number of chunks that are looked up."""
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, position: int) -> bytes:
        """Returns the hash of a chunk or the name of a tail. Empty before the first chunk."""
        names, start = self.hashes, position * HASH_BYTES
        if start >= len(names):
            names, start = self.tails, start - len(names)
        return names[start : start + HASH_BYTES] if start >= 0 else b""

    def chunk_of(self, position: int) -> int:
        """Returns the chunk at a position, or the chunk inside which its tail ends."""
        if position < self.chunks:
            return position
        return tail_chunk(self.geometry, self.tails_from, position - self.chunks)

    def name_of(self, place: ObjectPlace) -> RecordName:
        """Returns the name of an object in tiers."""
        gid = self.namespace.gids[place.group_index]
        return RecordName(self.namespace.identity, gid, self.hash_of(place.position))

    def key_of(self, place: ObjectPlace) -> bytes:
        """Returns the key of an object in tiers, which is that of its name."""
        gid = self.namespace.gids[place.group_index]
        return record_key(self.namespace.identity, gid, self.hash_of(place.position))

    def slot_of(self, place: ObjectPlace) -> Slot | None:
        """Returns the object in RAM, or None where RAM does not have it."""
        return self.namespace.find_slot(self.hash_of(place.position), place.group_index)

    def hit_of(self, chunks: int, tail: int = 0) -> PromptHit:
        """Returns the hit of `chunks` chunks, or that which ends with `tail` where it is not 0."""
        if not tail:
            return PromptHit(chunks, 0, chunks * self.geometry.chunk_tokens)
        chunk = tail_chunk(self.geometry, self.tails_from, tail - 1)
        return PromptHit(chunk + 1, tail, tail_tokens(self.geometry, self.tails_from, tail - 1))

    def needed_places(self, hit: PromptHit) -> Iterator[ObjectPlace]:
        """Yields the places of the objects that a hit needs."""
        for index, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, hit.chunks):
                is_tail = hit.tail and chunk == hit.chunks - 1
                yield ObjectPlace(index, self.chunks + hit.tail - 1 if is_tail else chunk)

    def resident_slots(self, hits: Iterable[PromptHit]) -> Iterable[Slot]:
        """Returns the objects of these hits that RAM has, each once."""
        places = dict.fromkeys(place for hit in hits for place in self.needed_places(hit))
        return filter(None, map(self.slot_of, places))


@dataclass(eq=False)
class ObjectSearch:
    """The search for the objects of a lookup that RAM does not have, in rounds.

    An object is located in a tier, unknown, or asked about in this round. All others are missing.
    """

    request: LookupRequest
    located: dict[ObjectPlace, TierState] = field(default_factory=dict)  # The tier that has it.
    unknown: dict[ObjectPlace, None] = field(default_factory=dict)
    """Objects that no tier has, as far as is known without asking, and that some may have."""
    asked: list[ObjectPlace] = field(default_factory=list)  # What this round asks tiers about.
    tail: int = 0  # A tail, counted from 1, that a hit may end with. 0 = none was located.

    def locate(self, masks: Sequence[bytes], tiers: Sequence[TierState]) -> None:
        """Locate what tiers know at once, as far as the prefix that every hit needs may reach.

        `masks` are the presence masks of RAM, per group.
        """
        geometry, reach = self.request.geometry, self.request.chunks
        groups = geometry.groups
        full_first = sorted(
            range(len(groups)), key=lambda index: groups[index].kind is not GroupKind.FULL
        )
        for index in full_first:
            mask, counts = masks[index], stored_counts(geometry, groups[index])
            chunk = mask.find(0, 0, reach)
            while chunk >= 0:
                place = ObjectPlace(index, chunk)
                is_lost = counts[chunk % len(counts)] and not self._locate_object(place, tiers)
                if is_lost and groups[index].kind is GroupKind.FULL:
                    reach = chunk
                    break
                chunk = mask.find(0, chunk + 1, reach)
        self._locate_tail(reach, tiers)

    def _locate_object(self, place: ObjectPlace, tiers: Sequence[TierState]) -> bool:
        """Returns whether a tier has the object, or may have it."""
        key = self.request.key_of(place)
        is_unknown = False
        for tier in tiers:
            is_there = tier.peek(key)
            if is_there:
                self.located[place] = tier
                return True
            is_unknown = is_unknown or is_there is None
        if is_unknown:
            self.unknown[place] = None
        return is_unknown

    def _locate_tail(self, reach: int, tiers: Sequence[TierState]) -> None:
        """Find the longest tail up to chunk `reach` of which RAM or tiers have every object.

        Only tiers that know at once what they have are considered: a tail is one of up to
        TAIL_UNITS_MAX names, and asking a network for each would cost more than computing the tail.
        """
        request, resident = self.request, self.request.resident
        for number in reversed(range(resident.tail, len(request.tails) // HASH_BYTES)):
            position = request.chunks + number
            if request.chunk_of(position) < resident.chunks - bool(resident.tail):
                break
            if request.chunk_of(position) > reach:
                continue
            there: dict[ObjectPlace, TierState] = {}
            for index in range(len(request.geometry.groups)):
                place = ObjectPlace(index, position)
                if request.slot_of(place) is not None:
                    continue
                key = request.key_of(place)
                tier = next((tier for tier in tiers if tier.peek(key)), None)
                if tier is None:
                    break
                there[place] = tier
            else:
                self.located |= there
                self.tail = number + 1
                break

    def next_round(self) -> list[ObjectPlace]:
        """Begin the next round. Returns the objects to ask tiers about. Empty = no more rounds."""
        self.asked = self._choose_round()
        return self.asked

    def _choose_round(self) -> list[ObjectPlace]:
        """Take the objects of the next round out of `unknown`.

        The first FIND_KEYS_FIRST objects that every hit needs are asked about alone: of a prompt
        that nobody stored that is all. Then up to FIND_KEYS_MAX are asked about at once. Of more,
        the objects that every hit needs come first, prefix first, and end where one is missing.
        Windows and states come next, the last ones first, until nothing after the longest hit is
        unknown. No need moves down while hits grow, so no longer hit needs an object before it. The
        needs of the hits with which the longest is compared come last.
        """
        unknown, most = self.unknown, FIND_KEYS_MAX
        if not unknown:
            return []
        masks = self.masks()
        if self.asked:
            reach = self._reach(masks)
            for place in [place for place in unknown if place.position >= reach]:
                del unknown[place]
        groups = self.request.geometry.groups
        prefix = [place for place in unknown if groups[place.group_index].kind is GroupKind.FULL]
        if prefix and not self.asked:
            most = min(FIND_KEYS_FIRST, FIND_KEYS_MAX)
        if len(unknown) <= most:
            order = list(unknown)
        elif prefix:
            order = sorted(prefix, key=prefix_order)
        else:
            hit = self.longest_hit(masks)
            is_longer = hit.tokens > self.request.resident.tokens
            later = [p for p in unknown if p.position >= hit.chunks or not is_longer]
            if later:
                order = sorted(later, key=lambda place: (-place.position, place.group_index))
            else:
                hits = (self.request.hit_of(cut) for cut in _cuts(hit.chunks))
                needed = (place for hit in hits for place in self.request.needed_places(hit))
                order = [place for place in dict.fromkeys(needed) if place in unknown]
        if not order:
            unknown.clear()
        for place in order[:most]:
            del unknown[place]
        return order[:most]

    def _reach(self, masks: Sequence[bytes]) -> int:
        """Returns the chunks before the first that is known to lack an object of every hit."""
        reach = self.request.chunks
        for index, group in enumerate(self.request.geometry.groups):
            chunk = masks[index].find(0, 0, reach) if group.kind is GroupKind.FULL else -1
            while 0 <= chunk < reach:
                if ObjectPlace(index, chunk) not in self.unknown:
                    reach = chunk
                    break
                chunk = masks[index].find(0, chunk + 1, reach)
        return reach

    def masks(self) -> list[bytes]:
        """Returns the presence mask per group of the objects in RAM or located in a tier.

        An object that came into RAM since it was located is not located any more.
        """
        request, chunks = self.request, self.request.chunks
        present = list(map(bytearray, request.namespace.present(request.hashes)[0]))
        for place in list(self.located):
            index, position = place
            if request.slot_of(place) is not None:
                del self.located[place]
            elif position < chunks:
                present[index][position] = 1
        return [bytes(mask) for mask in present]

    def longest_hit(self, masks: Sequence[bytes]) -> PromptHit:
        """Returns the longest hit of what there is, with the located tail if it extends it."""
        request = self.request
        whole = request.hit_of(largest_hit(request.geometry, masks, request.chunks))
        hit = request.hit_of(whole.chunks, self.tail)
        is_hit = self.tail and is_tail_hit(request.geometry, masks, hit.chunks - 1)
        return hit if is_hit and hit.tokens > whole.tokens else whole


class ReadPlan(NamedTuple):
    """What is read for a lookup, and why it is not more."""

    target: int  # The chunks of the hit that the lookup becomes where all reads succeed.
    hits: tuple[PromptHit, ...] = ()
    """The hits for which is read, ascending: the target, and one that comes earlier.

    It is empty where RAM alone has the hit."""
    needs: Sequence[NeededObject] = ()  # The objects of the hits, in the order of reading.
    shortfalls: Sequence[Shortfall] = ()  # Why tiers could make a longer hit.


def plan_reads(search: ObjectSearch, room_bytes: int, now: float) -> ReadPlan:
    """Decide what is read, from what RAM has and from where tiers have objects.

    The objects of the hit, with those that RAM alone hits, take at most `room_bytes`.
    """
    request, resident = search.request, search.request.resident
    masks = search.masks()
    longest = search.longest_hit(masks)
    if longest.tokens <= resident.tokens:
        return ReadPlan(longest.chunks)
    sizes = HitSizes(request.geometry, longest.chunks)
    candidates = _candidates(request, masks, longest, sizes, room_bytes)
    by_tokens = {
        hit.tokens: hit for hit in candidates if sizes.bytes_of((resident, hit)) <= room_bytes
    }
    fits = by_tokens[max(by_tokens)] if by_tokens else resident
    shortfalls: list[Shortfall] = []
    if fits.tokens < longest.tokens:
        room_facts = {"fits": fits.tokens, "tokens": longest.tokens}
        shortfalls.append(Shortfall(ShortfallKind.NO_ROOM, room_facts))
    if fits.tokens <= resident.tokens:
        return ReadPlan(fits.chunks, shortfalls=shortfalls)
    read_seconds = _read_seconds(search, fits.chunks, now)
    rate = request.tokens_per_second
    token_seconds = 1 / rate if rate else 0.0
    tokens = best_load(
        resident=resident.tokens,
        hits=by_tokens,
        read_seconds=lambda tokens: read_seconds(by_tokens[tokens]),
        token_seconds=token_seconds,
        patience_seconds=request.deadline - now,
    )
    best = by_tokens.get(tokens, resident)
    hits: tuple[PromptHit, ...] = ()
    if best != resident:
        half = request.hit_of(largest_hit(request.geometry, masks, best.chunks // 2))
        has_room = sizes.bytes_of((resident, half, best)) <= room_bytes
        hits = (half, best) if half.tokens > resident.tokens and has_room else (best,)
    if best.tokens < fits.tokens:
        time_facts = {
            "tokens": fits.tokens,
            "read_seconds": read_seconds(fits),
            "compute_seconds": (fits.tokens - resident.tokens) * token_seconds,
        }
        shortfalls.append(Shortfall(ShortfallKind.SLOWER, time_facts))
    return ReadPlan(best.chunks, hits, _needs(search, hits), shortfalls)


def _candidates(
    request: LookupRequest,
    masks: Sequence[bytes],
    longest: PromptHit,
    sizes: "HitSizes",
    room_bytes: int,
) -> set[PromptHit]:
    """Returns the hits to compare: the longest one, and some up to the longest that has room."""
    whole = largest_hit(request.geometry, masks, longest.chunks - bool(longest.tail))
    reach = sizes.largest_fit(masks, whole, request.resident, room_bytes)
    cuts = _cuts(reach)
    return {longest, *(request.hit_of(largest_hit(request.geometry, masks, cut)) for cut in cuts)}


def _cuts(chunks: int) -> list[int]:
    """Returns the boundaries up to `chunks` that are compared, the largest first."""
    return [-(-chunks * part // CUTS) for part in range(CUTS, 0, -1)]


class HitSizes:
    """The bytes of RAM that the objects of hits take."""

    def __init__(self, geometry: Geometry, chunks: int) -> None:
        """The hits have at most `chunks` chunks."""
        self._geometry = geometry
        periods = _slot_sizes(geometry)
        self._sums = [[*accumulate(islice(cycle(sizes), chunks), initial=0)] for sizes in periods]
        """Per group and number n of chunks, the bytes of the objects of the first n chunks."""
        self._chunk_bytes_max = max(1, sum(map(max, periods)))

    def bytes_of(self, hits: Iterable[PromptHit]) -> int:
        """Returns the bytes of the objects that any of the hits needs. The hits ascend."""
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

    def largest_fit(
        self, masks: Sequence[bytes], chunks: int, resident: PromptHit, room_bytes: int
    ) -> int:
        """Returns the largest hit of at most `chunks` chunks that RAM can hold as a whole.

        `masks` are the presence masks of all that there is. The objects of the hit `resident` take
        room as well. The result is not longer than `resident` where no longer hit has room.
        """
        chunk_tokens = self._geometry.chunk_tokens
        while chunks * chunk_tokens > resident.tokens:
            hit = PromptHit(chunks, 0, chunks * chunk_tokens)
            excess = self.bytes_of((resident, hit)) - room_bytes
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
    """Returns the hit, in tokens, with which a prompt is ready first.

    `resident` is the hit that needs no reading, `hits` are the others. `read_seconds` returns the
    seconds of reading a hit. `token_seconds` is the time of computing a token, 0 = not known: the
    largest hit is best. Reading that would outlast `patience_seconds` is not begun.
    """
    best, gain = resident, 0.0
    for tokens in sorted(set(hits), reverse=True):
        if tokens > resident:
            read, compute = read_seconds(tokens), (tokens - resident) * token_seconds
            saved = compute - read if token_seconds else float(tokens)
            if read <= patience_seconds and saved > gain:
                best, gain = tokens, saved
    return best


def _read_seconds(search: ObjectSearch, reach: int, now: float) -> Callable[[PromptHit], float]:
    """Returns a function: the seconds of reading the objects of a hit of up to `reach` chunks."""
    request, geometry = search.request, search.request.geometry
    chunk_seconds, tail_seconds = [[0.0] * reach for _ in geometry.groups], 0.0
    sizes = _slot_sizes(geometry)
    for (index, position), tier in search.located.items():
        size = sizes[index][position % len(sizes[index])]
        if position < reach:
            chunk_seconds[index][position] = tier.speed.seconds(size, now)
        elif position >= request.chunks:
            tail_seconds += tier.speed.seconds(size, now)
    sums = [list(accumulate(seconds, initial=0.0)) for seconds in chunk_seconds]

    def read_seconds(hit: PromptHit) -> float:
        total = tail_seconds if hit.tail else 0.0
        for group, group_sums in zip(geometry.groups, sums, strict=True):
            need = needed_chunks(geometry, group, hit.chunks)
            total += group_sums[need.stop - bool(hit.tail)] - group_sums[need.start]
        return total

    return read_seconds


def _slot_sizes(geometry: Geometry) -> list[list[int]]:
    """Returns per group the slot bytes of each chunk's object, for one period of chunks."""
    return [
        [
            slot_bytes(count * group.block_bytes, geometry.parts(group)) if count else 0
            for count in stored_counts(geometry, group)
        ]
        for group in geometry.groups
    ]


def _needs(search: ObjectSearch, hits: Iterable[PromptHit]) -> list[NeededObject]:
    """Returns what the hits need of tiers, hit by hit, each prefix first and a tail last."""
    places = dict.fromkeys(
        place
        for hit in hits
        for place in sorted(search.request.needed_places(hit), key=prefix_order)
        if place in search.located
    )
    return [NeededObject(search.located[place], place) for place in places]
