"""How much of RAM hits take, and the largest that it can hold, against a search over all."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import largest_hit, needed_chunks, part_bytes
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.shm.slots import slot_bytes
from hybridkv.tiers.load_or_compute import HitSizes, PromptHit
from tests.layouts import LAYOUTS

CHUNKS = 24
OWN = [
    Geometry((Group(0, GroupKind.FULL, 128, (60_000,)), *partial_groups), 128, 128, 128)
    for partial_groups in (
        (Group(1, GroupKind.CHUNKED_LOCAL, 128, (30_000,), 512),),
        (Group(1, GroupKind.SLIDING, 128, (30_000,), 700),),
        (Group(1, GroupKind.RECURRENT, 128, (200_000,)),),
    )
]
TAILED = replace(OWN[-1], hash_tokens=32, alignment_tokens=32)
GEOMETRIES = st.sampled_from([*LAYOUTS.values(), *OWN])


def size(geometry: Geometry, *hits: PromptHit) -> int:
    places = {
        (group, chunk, hit.tail if chunk == hit.chunks - 1 else 0)
        for hit in hits
        for group in geometry.groups
        for chunk in needed_chunks(geometry, group, hit.chunks)
    }
    shapes = ((part_bytes(geometry, group, at), geometry.parts(group)) for group, at, _ in places)
    return sum(slot_bytes(*shape) for shape in shapes)


def whole_chunks(geometry: Geometry, chunks: int) -> PromptHit:
    return PromptHit(chunks, 0, chunks * geometry.chunk_tokens)


@given(geometry=GEOMETRIES, hits=st.lists(st.integers(0, CHUNKS), min_size=1, max_size=3))
def test_what_several_hits_need_counts_once(geometry: Geometry, hits: list[int]) -> None:
    ascending = [whole_chunks(geometry, hit) for hit in sorted(hits)]
    assert HitSizes(geometry, CHUNKS).bytes_of(ascending) == size(geometry, *ascending)


@given(units=st.sets(st.integers(1, CHUNKS * 4), min_size=1, max_size=3))
def test_a_tail_is_as_large_as_a_chunk(units: set[int]) -> None:
    """Hits end at quarters of chunks; the tail of each is an object beside the chunk's own."""
    hits = [
        PromptHit(-(-unit // 4), unit if unit % 4 else 0, unit * TAILED.hash_tokens)
        for unit in sorted(units)
    ]
    assert HitSizes(TAILED, CHUNKS).bytes_of(hits) == size(TAILED, *hits)


@given(data=st.data(), geometry=GEOMETRIES, share=st.floats(0, 1.2))
def test_no_larger_hit_has_room(data: st.DataObject, geometry: Geometry, share: float) -> None:
    lacks = [data.draw(st.sets(st.integers(0, CHUNKS - 1), max_size=3)) for _ in geometry.groups]
    masks = [bytes(chunk not in lack for chunk in range(CHUNKS)) for lack in lacks]
    whole = largest_hit(geometry, masks, CHUNKS)
    hits = [at for at in range(whole + 1) if largest_hit(geometry, masks, at) == at]
    resident = data.draw(st.sampled_from(hits))
    room = round(size(geometry, whole_chunks(geometry, CHUNKS)) * share)
    ends = {at: whole_chunks(geometry, at) for at in hits}
    fitting = [
        at for at in hits if at > resident and size(geometry, ends[resident], ends[at]) <= room
    ]
    found = HitSizes(geometry, CHUNKS).largest_fit(masks, whole, ends[resident], room)
    assert found == max(fitting, default=resident)
