"""How much of RAM hits take, and which of them it can hold, against a search over all."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import (
    Hit,
    HitSizes,
    PromptObjects,
    largest_hit,
    loadable_hits,
    needed_chunks,
    object_shapes,
    part_bytes,
    whole_hit,
)
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.shm.slots import slot_bytes
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


def size(geometry: Geometry, *hits: Hit) -> int:
    places = {
        (group, chunk, hit.tail if chunk == hit.chunks else 0)
        for hit in hits
        for group in geometry.groups
        for chunk in needed_chunks(geometry, group, hit.depth)
    }
    shapes = ((part_bytes(geometry, group, at), geometry.parts(group)) for group, at, _ in places)
    return sum(slot_bytes(part, parts) for part, parts in shapes)


def sizes_of(geometry: Geometry) -> list[list[int]]:
    shapes = [object_shapes(geometry, group) for group in geometry.groups]
    return [[slot_bytes(part, parts) if part else 0 for part, parts in row] for row in shapes]


def hit_sizes(geometry: Geometry) -> HitSizes:
    return HitSizes(geometry, sizes_of(geometry), CHUNKS)


@given(geometry=GEOMETRIES, hits=st.lists(st.integers(0, CHUNKS), min_size=1, max_size=3))
def test_what_several_hits_need_counts_once(geometry: Geometry, hits: list[int]) -> None:
    ascending = [whole_hit(geometry, hit) for hit in sorted(hits)]
    assert hit_sizes(geometry).bytes_of(ascending) == size(geometry, *ascending)


@given(units=st.sets(st.integers(1, CHUNKS * 4), min_size=1, max_size=3))
def test_a_tail_is_as_large_as_a_chunk(units: set[int]) -> None:
    """Hits end at quarters of chunks; the tail of each is an object beside the chunk's own."""
    hits = [
        whole_hit(TAILED, -(-unit // 4))._replace(
            tail=unit if unit % 4 else 0, tokens=unit * TAILED.hash_tokens
        )
        for unit in sorted(units)
    ]
    assert hit_sizes(TAILED).bytes_of(hits) == size(TAILED, *hits)


@given(data=st.data(), geometry=GEOMETRIES, share=st.floats(0, 1.2))
def test_no_larger_hit_has_room(data: st.DataObject, geometry: Geometry, share: float) -> None:
    lacks = [data.draw(st.sets(st.integers(0, CHUNKS - 1), max_size=3)) for _ in geometry.groups]
    masks = [bytes(chunk not in lack for chunk in range(CHUNKS)) for lack in lacks]
    whole = largest_hit(geometry, masks, CHUNKS)
    hits = [at for at in range(whole + 1) if largest_hit(geometry, masks, at) == at]
    resident = data.draw(st.sampled_from(hits))
    room = round(size(geometry, whole_hit(geometry, CHUNKS)) * share)
    ends = {at: whole_hit(geometry, at) for at in hits}
    fitting = [
        at for at in hits if at > resident and size(geometry, ends[resident], ends[at]) <= room
    ]
    found = hit_sizes(geometry).largest_fit(masks, whole, ends[resident], room)
    assert found == max(fitting, default=resident)


@given(data=st.data(), geometry=GEOMETRIES, share=st.floats(0, 1.2))
def test_hits_to_compare_have_room_and_the_time_of_their_objects(
    data: st.DataObject, geometry: Geometry, share: float
) -> None:
    """The longest hit is among them where it has room. What RAM has takes no time."""
    seconds = [
        data.draw(st.lists(st.integers(0, 3), min_size=CHUNKS, max_size=CHUNKS))
        for _ in geometry.groups
    ]
    masks = [bytes([1]) * CHUNKS for _ in geometry.groups]
    longest = whole_hit(geometry, CHUNKS)
    resident = whole_hit(geometry, data.draw(st.integers(0, 4)))
    room = round(size(geometry, longest) * share)
    objects = PromptObjects(
        geometry=geometry,
        masks=masks,
        resident=resident,
        longest=longest,
        sizes=sizes_of(geometry),
        seconds=seconds,
        tail_seconds=0.0,
    )
    loadable = loadable_hits(objects, room)
    for hits, read_seconds in loadable:
        assert list(hits) == sorted(set(hits))
        if hits[-1].tokens > resident.tokens:
            assert size(geometry, resident, *hits) <= room
        assert read_seconds == sum(
            seconds[index][chunk]
            for index, group in enumerate(geometry.groups)
            for chunk in needed_chunks(geometry, group, hits[-1].chunks)
        )
    tokens = [hit.tokens for hit in loadable]
    assert tokens == sorted(set(tokens))
    if size(geometry, resident, longest) <= room:
        assert tokens[-1] == longest.tokens
    fitting = [
        chunks
        for chunks in range(resident.chunks + 1, CHUNKS + 1)
        if size(geometry, resident, whole_hit(geometry, chunks)) <= room
    ]
    if fitting:
        assert tokens[-1] == max(fitting) * geometry.chunk_tokens
    assert loadable_hits(objects._replace(longest=resident), room) == []
