"""What a lookup asks for, and where its objects are: the request, and the search in tiers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from hybridkv.core.coverage import (
    Hit,
    PromptObjects,
    SlotShape,
    compared_boundaries,
    longest_hit,
    object_shapes,
    whole_hit,
)
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tails import tail_chunk, tail_hit
from hybridkv.shm.slots import SHORT_HASH_BYTES, slot_bytes
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.health import TierState
from hybridkv.tiers.record import Record, RecordName, record_key

FIND_KEYS_MAX = 4096  # Objects that a tier is asked about at once.
FIND_KEYS_FIRST = 8  # In the first round.
FIND_KEYS_GROWTH = 8  # In each next round so many times as many, in a search that began again.


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
    record: Record  # Its name and its shape.
    namespace: Namespace
    parent: bytes  # The hash of the chunk before its own; empty before the first.

    @property
    def key(self) -> bytes:
        """The bytes that name the object in tiers."""
        return self.record.name.key


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
    resident: Hit  # The hit that RAM alone had at `asked_at`.
    tails: bytes = b""  # The names of tails, as in wire.Lookup.
    tails_from: int = 0
    audit_lease: int = 0  # As in wire.Lookup.
    promises: bool = False  # The same.
    computed_elsewhere: bool = False  # The same.
    is_scan: bool = False  # The same.
    is_prefetch: bool = False  # True where no engine asks: a prompt is expected (tiers.prefetches).

    @property
    def key(self) -> LookupKey:
        """The name of the lookup while it waits."""
        return LookupKey(self.connection_id, self.lease)

    @property
    def token_seconds(self) -> float:
        """The time in which the engine computes a token. 0 = not known."""
        return 1 / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def chunks(self) -> int:
        """The number of chunks that are looked up."""
        return len(self.hashes) // HASH_BYTES

    @property
    def tail_count(self) -> int:
        """The number of tails that are looked up."""
        return len(self.tails) // HASH_BYTES

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
        chunk_hash = self.hash_of(place.position)
        return self.namespace.find_slot(chunk_hash, place.group_index)

    def needed_places(self, hit: Hit) -> Iterator[ObjectPlace]:
        """Yields the places of the objects that a hit needs."""
        for index, start in enumerate(hit.starts):
            for chunk in range(start, hit.chunks):
                yield ObjectPlace(index, chunk)
            if hit.tail:
                yield ObjectPlace(index, self.chunks + hit.tail - 1)


@dataclass(eq=False)
class ObjectSearch:
    """The search for the objects of a lookup that RAM does not have, in rounds.

    An object is located in a tier, unknown, or asked about in this round. All others are missing.
    """

    request: LookupRequest
    resident_masks: Sequence[bytes] | None
    """RAM's presence masks per group, as the search begins with them. None once it has begun."""
    located: dict[ObjectPlace, TierState] = field(default_factory=dict)  # The tier that has it.
    unknown: dict[ObjectPlace, None] = field(default_factory=dict)
    """Objects that no tier has, as far as is known without asking, and that some may have."""
    asked: list[ObjectPlace] = field(default_factory=list)  # What this round asks tiers about.
    missing: list[ObjectPlace] = field(default_factory=list)
    """What a hit of all chunks lacks, as of the last `begin_again`. Prefixes come first."""
    tail: Hit | None = None  # The hit that ends with the tail that was located, if any was.

    def __post_init__(self) -> None:
        geometry = self.request.geometry
        self._shapes = [object_shapes(geometry, group) for group in geometry.groups]
        """Per group, the shapes of the objects, for one period of chunks."""
        self._counted_on: list[bytes] = []
        """Per group, what RAM had when it was looked at last, which no tier is asked about."""

    def _shape_of(self, place: ObjectPlace) -> SlotShape:
        """Returns the shape of an object. A part has 0 bytes where the chunk has no object."""
        shapes = self._shapes[place.group_index]
        return shapes[place.position % len(shapes)]

    def begin_again(self) -> list[ObjectPlace]:
        """Search again for what a hit of all chunks needs. Returns what is missing of it.

        Others may put it meanwhile. What is located stays so.
        """
        geometry = self.request.geometry
        places = self.request.needed_places(whole_hit(geometry, self.request.chunks))
        missing = [place for place in places if not self.is_there(place)]
        is_window = [group.kind is not GroupKind.FULL for group in geometry.groups]
        missing.sort(key=lambda place: (is_window[place.group_index], *prefix_order(place)))
        self.resident_masks = None
        self._counted_on = []
        self.missing, self.unknown = missing, dict.fromkeys(missing)
        return missing

    def ask_first(self) -> None:
        """Begin a round of the first of what is missing alone."""
        self.asked = self.missing[:FIND_KEYS_FIRST]

    def is_there(self, place: ObjectPlace) -> bool:
        """Returns whether RAM has an object, or it is located in a tier."""
        return place in self.located or self.request.slot_of(place) is not None

    def record_to_find(self, place: ObjectPlace) -> Record:
        """Returns the name of an object and of its parent, by which tiers find its record."""
        request, parent = self.request, b""
        if request.geometry.groups[place.group_index].kind is GroupKind.FULL:
            parent = request.hash_of(request.chunk_of(place.position) - 1)
        parent = parent[:SHORT_HASH_BYTES].ljust(SHORT_HASH_BYTES, b"\0")
        return Record(request.name_of(place), part_bytes=0, parts=0, seed=0, parent=parent)

    @property
    def is_begun(self) -> bool:
        """True once the objects that tiers know at once are located."""
        return self.resident_masks is None

    def _locate(self, masks: Sequence[bytes], tiers: Sequence[TierState]) -> None:
        """Locate what tiers know at once, as far as the prefix that every hit needs may reach.

        `masks` are the presence masks of RAM, per group.
        """
        groups, reach = self.request.geometry.groups, self.request.chunks
        full_first = sorted(
            range(len(groups)), key=lambda index: groups[index].kind is not GroupKind.FULL
        )
        for index in full_first:
            mask = masks[index]
            chunk = mask.find(0, 0, reach)
            while chunk >= 0:
                place = ObjectPlace(index, chunk)
                is_lost = self._shape_of(place)[0] and not self._locate_object(place, tiers)
                if is_lost and groups[index].kind is GroupKind.FULL:
                    reach = chunk
                    break
                chunk = mask.find(0, chunk + 1, reach)
        self._locate_tail(reach, tiers)

    def _locate_evicted(self, tiers: Sequence[TierState]) -> None:
        """Locate what RAM had, and has evicted while tiers were asked about the rest."""
        if not self._counted_on:
            return
        before, self._counted_on = self._counted_on, self._present()
        for index, (had, has) in enumerate(zip(before, self._counted_on, strict=True)):
            chunk = had.find(1) if had != has else -1
            while chunk >= 0:
                place = ObjectPlace(index, chunk)
                if not has[chunk] and place not in self.located:
                    self._locate_object(place, tiers)
                chunk = had.find(1, chunk + 1)

    def _present(self) -> list[bytes]:
        """Returns the presence mask per group of what RAM has now."""
        return [*map(bytes, self.request.namespace.present(self.request.hashes)[0])]

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
            if request.chunk_of(position) < resident.chunks:
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
                self.tail = tail_hit(request.geometry, request.tails_from, number + 1)
                break

    def next_round(self, tiers: Sequence[TierState]) -> list[ObjectPlace]:
        """Begin the next round. Returns the objects to ask `tiers` about. Empty = no more rounds.

        Before the first one, what tiers know at once is located.
        """
        masks, self.resident_masks = self.resident_masks, None
        if masks is not None:
            self._locate(masks, tiers)
            self._counted_on = [*masks]
        else:
            self._locate_evicted(tiers)
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

        In a search that began again each round has some times as many objects as the one before,
        because what others are putting ends somewhere.
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
        elif prefix and self.missing:
            most = min(FIND_KEYS_GROWTH * len(self.asked), FIND_KEYS_MAX)
        if len(unknown) <= most:
            order = list(unknown)
        elif prefix:
            order = sorted(prefix, key=prefix_order)
        else:
            hit = self.longest_hit(masks)
            is_longer = hit.tokens > self.request.resident.tokens
            later = [p for p in unknown if p.position >= hit.depth or not is_longer]
            if later:
                order = sorted(later, key=lambda place: (-place.position, place.group_index))
            else:
                boundaries = compared_boundaries(hit.depth)
                hits = (whole_hit(self.request.geometry, chunks) for chunks in boundaries)
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

    def longest_hit(self, masks: Sequence[bytes]) -> Hit:
        """Returns the longest hit of what there is, with the located tail if it extends it."""
        return longest_hit(self.request.geometry, masks, self.request.chunks, self.tail)

    def present_objects(self, now: float) -> PromptObjects:
        """Returns what RAM and tiers have, and what it costs to read it from where it is."""
        request, masks = self.request, self.masks()
        longest = self.longest_hit(masks)
        sizes = [
            [slot_bytes(part, parts) if part else 0 for part, parts in row] for row in self._shapes
        ]
        seconds, tail_seconds = [[0.0] * longest.depth for _ in sizes], 0.0
        for (index, position), tier in self.located.items():
            size = sizes[index][position % len(sizes[index])]
            if position < longest.depth:
                seconds[index][position] = tier.speed.seconds(size, now)
            elif position >= request.chunks:
                tail_seconds += tier.speed.seconds(size, now)
        return PromptObjects(
            geometry=request.geometry,
            masks=masks,
            resident=request.resident,
            longest=longest,
            sizes=sizes,
            seconds=seconds,
            tail_seconds=tail_seconds,
        )

    def needed_objects(self, hits: Iterable[Hit]) -> Iterator[NeededObject]:
        """Yields what the hits need of tiers, hit by hit, each prefix first and a tail last."""
        request = self.request
        places = dict.fromkeys(
            place
            for hit in hits
            for place in sorted(request.needed_places(hit), key=prefix_order)
            if place in self.located
        )
        for place in places:
            part_bytes, parts = self._shape_of(place)
            yield NeededObject(
                tier=self.located[place],
                place=place,
                record=Record(request.name_of(place), part_bytes, parts, seed=0),
                namespace=request.namespace,
                parent=request.hash_of(request.chunk_of(place.position) - 1),
            )

    def resident_slots(self, hits: Iterable[Hit]) -> list[Slot]:
        """Returns the objects in RAM of these hits and of the hit that RAM had, each once.

        They are to be held: room for more objects must cost none of them, whoever needs the room.
        """
        request = self.request
        hits = (request.resident, *hits)
        places = dict.fromkeys(place for hit in hits for place in request.needed_places(hit))
        return [*filter(None, map(request.slot_of, places))]
