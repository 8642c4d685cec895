"""What RAM has of a lookup, and the longest hit that it is."""

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.core.coverage import Hit, largest_hit, whole_hit
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import unpack_hashes
from hybridkv.core.tails import longest_tail, tail_chunk, tail_hit
from hybridkv.store.index import IndexEntry, Namespace, Slot
from hybridkv.tiers.object_search import LookupRequest
from hybridkv.wire.messages import BATCH_MAX


class ResidentHit(NamedTuple):
    """The objects that RAM has of a lookup, and the longest hit that they are."""

    masks: list[bytes]  # By group index, a byte for each chunk: 1 where the object is there.
    entries: Sequence[IndexEntry | None]  # By chunk; None for a chunk without any object.
    hit: Hit
    tail: Sequence[Slot | None] = ()  # The objects of the hit's tail, by group index.

    def needed_slots(self) -> list[Slot]:
        """Return the slots that the hit needs, group by group, each prefix first."""
        slots: list[Slot] = []
        for index, start in enumerate(self.hit.starts):
            # Every object of a hit is there.
            entries = self.entries[start : self.hit.chunks]
            slots += [entry.slots[index] for entry in entries]  # type: ignore[union-attr, misc]
            slots += self.tail[index : index + 1]  # type: ignore[arg-type]
        return slots


def resident_of(request: LookupRequest) -> ResidentHit:
    """Return what RAM has now of a lookup."""
    return resident_hit(
        request.namespace, request.geometry, request.hashes, request.tails, request.tails_from
    )


def resident_hit(
    namespace: Namespace, geometry: Geometry, hashes: bytes, tails: bytes, tails_from: int
) -> ResidentHit:
    """Return what RAM has of chunks, given their hashes, and of tails (as in wire.Lookup)."""
    masks, entries = namespace.present(hashes)
    chunks = largest_hit(geometry, masks, len(entries))
    names = unpack_hashes(tails)
    chunks_max = BATCH_MAX // len(geometry.groups)

    def objects(number: int) -> Sequence[Slot | None]:
        entry = namespace.entries.get(names[number])
        return () if entry is None else entry.slots

    def is_whole(number: int) -> bool:
        is_short = tail_chunk(geometry, tails_from, number) < chunks_max
        return is_short and bool(objects(number)) and all(objects(number))

    tail = longest_tail(
        geometry=geometry,
        masks=masks,
        chunks=chunks,
        first_chunk=tails_from,
        count=len(names),
        is_whole=is_whole,
    )
    if not tail:
        return ResidentHit(masks, entries, whole_hit(geometry, chunks))
    return ResidentHit(masks, entries, tail_hit(geometry, tails_from, tail), objects(tail - 1))
