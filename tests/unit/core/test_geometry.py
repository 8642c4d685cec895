"""Conversions between tokens, blocks and chunks."""

import pytest

from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import ConfigError, GeometryError
from hybridkv.core.geometry import Geometry, Group, GroupKind, derive_chunk_tokens
from tests.layouts import LAYOUTS, K, make


def test_deepseek_v4_blocks_of_4096_tokens() -> None:
    """4,096 tokens are [16, 64, 64, 1024, 512] blocks in the groups 256/64/64/4/8 (A31)."""
    groups = [
        (K.FULL, 256, 0),
        (K.SLIDING, 64, 128),
        (K.SLIDING, 64, 128),
        (K.SLIDING, 4, 128),
        (K.SLIDING, 8, 128),
    ]
    geometry = make(256, 4, *groups)
    assert geometry.chunk_tokens == 256
    chunks = geometry.whole_chunks(4096)
    assert [chunks * geometry.blocks_per_chunk(group) for group in geometry.groups] == [
        16,
        64,
        64,
        1024,
        512,
    ]


@pytest.mark.parametrize(
    ("name", "chunk"), [("qwen3", 128), ("gemma4", 256), ("falconh1", 640), ("gpu_blocks", 128)]
)
def test_derived_chunk(name: str, chunk: int) -> None:
    assert LAYOUTS[name].chunk_tokens == chunk


@pytest.mark.parametrize(
    ("blocks", "chunk"),
    [((32, 48), 192), ((256, 4), 256), ((1056, 16), 1056), ((640, 96), 1920), ((24, 56, 8), 168)],
)
def test_a_derived_chunk_is_a_common_multiple_of_unlike_blocks(
    blocks: tuple[int, ...], chunk: int
) -> None:
    groups = tuple(Group(gid, GroupKind.FULL, block, (block,)) for gid, block in enumerate(blocks))
    assert derive_chunk_tokens(groups, 8, 4) == chunk


@pytest.mark.parametrize("geometry", LAYOUTS.values(), ids=LAYOUTS)
def test_hash_index_names_the_end_of_a_chunk(geometry: Geometry) -> None:
    for chunk in range(5):
        assert (geometry.hash_index(chunk) + 1) * geometry.hash_tokens == (
            chunk + 1
        ) * geometry.chunk_tokens


@pytest.mark.parametrize("chunk", [1, 100, 128, 384, 1000])
def test_a_chunk_that_is_no_common_multiple_is_refused_with_one_that_works(chunk: int) -> None:
    with pytest.raises(
        ConfigError, match=r"hybrid_chunk_size=\d+ is not a multiple of .* works"
    ) as caught:
        make(256, 128, (K.SLIDING, 256, 512), (K.FULL, 128, 0), chunk=chunk)
    works = int(str(caught.value).split()[-2])
    assert (
        make(256, 128, (K.SLIDING, 256, 512), (K.FULL, 128, 0), chunk=works).chunk_tokens == works
    )


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Group(0, GroupKind.FULL, 0, (1,)),
        lambda: Group(0, GroupKind.FULL, 16, ()),
        lambda: Group(0, GroupKind.FULL, 16, (16, 0)),
        lambda: Group(0, GroupKind.SLIDING, 16, (1,)),
        lambda: Group(0, GroupKind.FULL, 16, (1,), window_tokens=4),
        lambda: Group(0, GroupKind.FULL, 16, (1,), extra_retained_tokens=4),
        lambda: Geometry((), 128, 128, 128),
        lambda: Geometry(
            (Group(1, GroupKind.FULL, 16, (1,)), Group(0, GroupKind.FULL, 16, (1,))), 128, 16, 16
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(broken: object) -> None:
    assert callable(broken)
    with pytest.raises(GeometryError):
        broken()


@pytest.mark.parametrize(
    ("ranks", "stages", "nodes", "shards"), [(2, 1, 1, 3), (2, 2, 1, 2), (2, 1, 2, 2), (4, 1, 1, 2)]
)
def test_shards_that_ranks_do_not_have_evenly_are_refused(
    ranks: int, stages: int, nodes: int, shards: int
) -> None:
    groups = (Group(0, GroupKind.FULL, 16, (1,)),)
    with pytest.raises(GeometryError, match=f"cannot have {shards} shards"):
        Geometry(groups, 16, 16, 16, ranks=ranks, stages=stages, nodes=nodes, shards=shards)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_object_has_a_part_for_each_shard_whatever_the_ranks_are(ranks: int) -> None:
    split = Group(0, GroupKind.FULL, 16, (1,))
    replicated = Group(1, GroupKind.FULL, 16, (1,), replicated=True)
    geometry = Geometry((split, replicated), 16, 16, 16, ranks=ranks, shards=4)
    assert (geometry.parts(split), geometry.parts(replicated)) == (4, 1)
    assert geometry.ranks == ranks


def test_chunked_local_objects_have_a_few_sizes() -> None:
    """Windows of 512 in chunks of 128: the chunk that ends an attention chunk is read by nobody."""
    geometry = LAYOUTS["llama4"]
    assert slot_shapes(geometry, geometry.groups[0]) == ((geometry.groups[0].block_bytes, 1),)
    odd = LAYOUTS["odd_window"]
    assert slot_shapes(odd, odd.groups[1]) == tuple(
        (n * odd.groups[1].block_bytes, 1) for n in (1, 2, 3, 4)
    )
