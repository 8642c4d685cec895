"""Engines of other tensor parallel sizes store the same bytes, and load what each other stored."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import KVCacheSpec

from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.connector.copy.shards import ShardsCopier
from hybridkv.connector.worker.copier_factory import CopierFactory, ShardBlocks
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import GeometryError, HybridKVError
from hybridkv.core.packed import SlotRef
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, payload_offset, slot_bytes
from hybridkv.vllm.blocks import block_bytes, physical
from hybridkv.vllm.layout import is_replicated, worker_layout
from hybridkv.vllm.shards import HEADS_DIM, shard_views
from tests.arenas import unnamed_arena, whole_object
from tests.engine.support import since_vllm
from tests.kv_memory import Cache, KVMemory, full, latent, latent_window, layers, sliding, state

pytestmark = [pytest.mark.engine, since_vllm(32, "share_tp is refused")]

LAYOUTS = (*("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"), *("split LBNHC", "split LBHNC"))
"""Names of vLLM's layouts; "split" ones have two blocks of the kernels in each block."""
SHARDS = 4
SIZES = [(1, 2), (2, 1), (2, 4), (4, 1)]
SOURCES, TARGETS = ((1, 2), (5, 3)), ((7, 4), (6, 8))


def attention(layout: str, heads: int) -> Cache:
    """Return a cache with full attention and windows, of which one rank has so many heads."""
    specs = layers("full", full(heads, 32, 8), 2) | layers("window", sliding(heads, 32, 8), 2)
    return cache_of(layout, specs)


def mla(layout: str, heads: int) -> Cache:
    """Return a cache of which all ranks keep the same bytes, whatever their heads are."""
    specs = layers("mla", latent(64, 72, torch.int16), 2)
    return cache_of(layout, specs | layers("window", latent_window(64, 72, torch.int16), 2))


def cache_of(layout: str, specs: Mapping[str, KVCacheSpec]) -> Cache:
    """Return a cache with one of LAYOUTS."""
    return Cache(layout.removeprefix("split "), specs, 16 if layout.startswith("split ") else None)


def settings_of_rank(rank: int, ranks: int) -> WorkerSettings:
    return WorkerSettings(
        socket_path="/nowhere/daemon.sock",
        engine_id="e",
        rank=rank,
        ranks=ranks,
        checksum="paranoid",
        shards=SHARDS,
    )


class Workers:
    """The workers of an engine of one tensor parallel size, over an arena, and their copies."""

    def __init__(self, arena: Arena, memories: Sequence[KVMemory]) -> None:
        self.arena = arena
        self.memories = memories
        self.config = memories[0].config
        specs = [group.kv_cache_spec for group in self.config.kv_cache_groups]
        self.replicated = frozenset(
            index for index, spec in enumerate(specs) if is_replicated(spec)
        )
        self.shards = [self._shards(rank) for rank in range(len(memories))]
        self.copiers = [CopierFactory(shards, None).make_copier(arena) for shards in self.shards]

    def _shards(self, rank: int) -> list[ShardBlocks]:
        settings, memory = settings_of_rank(rank, len(self.memories)), self.memories[rank]
        own = shard_views(memory.config, memory.views, len(settings.own_shards))
        names = [group.layer_names for group in memory.config.kv_cache_groups]
        return [
            ShardBlocks(
                PartLayout(shard, SHARDS, settings.checksum, self.replicated),
                [[physical(views[name]) for name in of_group] for of_group in names],
            )
            for shard, views in zip(settings.own_shards, own, strict=True)
        ]

    def part_bytes(self, gid: int) -> int:
        """Return the bytes of one block in one shard."""
        return sum(map(block_bytes, self.shards[0][0].groups[gid]))

    def store(self, ops: Sequence[CopyOp]) -> None:
        """Let every rank store its parts, and see that each op is reported once."""
        for copier, shards in zip(self.copiers, self.shards, strict=True):
            own = [op for op in ops if any(shard.part.writes(op) for shard in shards)]
            stored: list[CopyOp] = []

            def done(op: CopyOp, is_stored: bool, stored: list[CopyOp] = stored) -> None:
                assert is_stored
                stored.append(op)

            copier.store(own, done)
            assert stored == own

    def load(self, rank: int, ops: Sequence[CopyOp]) -> HybridKVError | None:
        ends: list[HybridKVError | None] = []
        self.copiers[rank].load(ops, ends.append)
        (error,) = ends
        return error


class Slots:
    """New slots of one arena, one after another."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.next_offset = 0

    def objects(self, workers: Workers, gid: int) -> list[CopyOp]:
        """Return stores of two objects of a group, with slots that are being written."""
        ops = []
        for chunk, blocks in enumerate(SOURCES):
            part_bytes = len(blocks) * workers.part_bytes(gid)
            parts = 1 if gid in workers.replicated else SHARDS
            slot = SlotRef(self.next_offset, 1000 + self.next_offset)
            header = SlotHeader(SlotState.WRITING, slot.generation, parts, part_bytes)
            self.arena.memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()
            self.next_offset += slot_bytes(part_bytes, parts)
            op = whole_object(slot, chunk, blocks)
            ops.append(CopyOp(op.slot, gid, op.chunk, op.count, op.first, op.blocks))
        return ops

    def payload(self, op: CopyOp, workers: Workers) -> bytes:
        """Return all parts of an object, without signatures."""
        parts = 1 if op.group_index in workers.replicated else SHARDS
        start = op.slot.offset + payload_offset(parts)
        size = parts * op.count * workers.part_bytes(op.group_index)
        return bytes(self.arena.memory[start : start + size])


@functools.cache
def on_ranks(
    cache: Callable[[str, int], Cache], layout: str, heads: int, ranks: int
) -> list[KVMemory]:
    """Return the memories of so many ranks, which have all heads among them.

    Tests of the same ranks share them, and each writes its own bytes or any.
    """
    return [cache(layout, heads // ranks).memory() for _ in range(ranks)]


def copy_keys_and_values(source: Sequence[KVMemory], target: Sequence[KVMemory]) -> None:
    """Give the ranks of `target` the keys and values of `source`, head by head."""
    for name, view in source[0].views.items():
        gid = next(
            gid
            for gid, group in enumerate(source[0].config.kv_cache_groups)
            if name in group.layer_names
        )
        if is_replicated(source[0].config.kv_cache_groups[gid].kv_cache_spec):
            for memory in (*source, *target):
                memory.views[name].copy_(view)
            continue
        heads = torch.cat([memory.views[name] for memory in source], HEADS_DIM)
        split = heads.chunk(len(target), HEADS_DIM)
        for memory, own in zip(target, split, strict=True):
            memory.views[name].copy_(own)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(8 << 20) as own_arena:
        yield own_arena


class Delayed:
    """A copier whose copies end when the test says so."""

    def __init__(self) -> None:
        self.stored: list[CopyOp] = []
        self.loaded: list[CopyOp] = []
        self.on_stored: Callable[[CopyOp, bool], None] = lambda op, is_stored: None
        self.on_loaded: Callable[[HybridKVError | None], None] = lambda error: None
        self.is_closed = False

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        self.stored, self.on_stored = [*ops], done

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        self.loaded, self.on_loaded = [*ops], done

    def close(self) -> None:
        self.is_closed = True


def delayed_shards() -> tuple[ShardsCopier, list[Delayed]]:
    """Return the copier of two of two shards, whose group 1 is replicated."""
    parts = [PartLayout(shard, 2, "on", frozenset({1})) for shard in range(2)]
    copiers = [Delayed(), Delayed()]
    return ShardsCopier(parts, copiers), copiers


@pytest.mark.parametrize(("storing", "loading"), SIZES)
@pytest.mark.parametrize(
    ("cache", "heads"), [(attention, 4), (attention, 8), (mla, 1)], ids=["1 head", "2 heads", "mla"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_size_stores_the_same_bytes_and_loads_them(
    arena: Arena,
    layout: str,
    cache: Callable[[str, int], Cache],
    heads: int,
    storing: int,
    loading: int,
) -> None:
    """The shards have one head or two. Blocks that are not loaded stay as they are."""
    heads = heads if cache is attention else SHARDS
    sources = on_ranks(cache, layout, heads, storing)
    targets = on_ranks(cache, layout, heads, loading)
    copy_keys_and_values(sources, targets)
    first, second, slots = Workers(arena, sources), Workers(arena, targets), Slots(arena)
    for gid in range(len(sources[0].groups)):
        ops, same = slots.objects(first, gid), slots.objects(second, gid)
        first.store(ops)
        second.store(same)
        for op, repeated in zip(ops, same, strict=True):
            assert slots.payload(op, first) == slots.payload(repeated, second)
        moved = [
            CopyOp(op.slot, gid, op.chunk, op.count, 0, blocks)
            for op, blocks in zip(ops, TARGETS, strict=True)
        ]
        for rank, memory in enumerate(targets):
            expected = memory.buffer.clone()
            for view in memory.within(expected, gid):
                view[list(sum(TARGETS, ()))] = view[list(sum(SOURCES, ()))]
            assert second.load(rank, moved) is None
            assert torch.equal(memory.buffer, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [4, 8])
def test_the_layout_of_a_shard_is_a_fact_of_every_size(layout: str, heads: int) -> None:
    laid_out = []
    for ranks in (1, 2, 4):
        (memory, *_) = on_ranks(attention, layout, heads, ranks)
        own = shard_views(memory.config, memory.views, SHARDS // ranks)
        laid_out += [worker_layout(memory.config, views) for views in own]
    assert all(layout == laid_out[0] for layout in laid_out)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_heads_are_in_the_order_of_vllms_own_mapping(layout: str) -> None:
    """vLLM maps the page of a rank to that of an engine of one rank, of which it has all heads."""
    heads = 4
    (whole,) = [Cache(layout, layers("full", full(heads, 32, 8), 1)).memory()]
    halves = [Cache(layout, layers("full", full(heads // 2, 32, 8), 1)).memory() for _ in range(2)]
    copy_keys_and_values([whole], halves)
    canonical = bytearray(block_bytes(whole.views["full.0"]))
    for rank, memory in enumerate(halves):
        parallel: Any = SimpleNamespace(
            tensor_parallel_size=2,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=2,
            rank=rank,
        )
        model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
        engine: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
        views: Any = memory.views
        mapping = canonical_mapping.derive_canonical_mappings(engine, memory.config, views)
        page = block_in_memory(memory, 3)
        for run in mapping["full.0"].runs:
            for number in range(run.num_fragments):
                local = run.local_offset + number * run.local_stride
                place = run.canonical_offset + number * run.canonical_stride
                fragment = page[local : local + run.fragment_size]
                canonical[place : place + run.fragment_size] = fragment
    assert bytes(canonical) == block_in_memory(whole, 3)


def block_in_memory(memory: KVMemory, block: int) -> bytes:
    """Return the bytes of a block of the only layer, which is one piece of memory."""
    view = physical(memory.views["full.0"])
    assert view.dim() == 2
    return bytes(view[block].view(torch.int8).numpy())


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        (Cache("LBNHC", layers("full", full(3, 16, 4), 1)), "each rank has 3 KV heads for 2"),
        (Cache("LBNHC", layers("state", state(128, 1000, 1536), 1)), "by rules of its own"),
    ],
    ids=["odd heads", "states"],
)
def test_what_cannot_be_split_is_refused(cache: Cache, sentence: str) -> None:
    memory = cache.memory()
    with pytest.raises(GeometryError, match=sentence):
        shard_views(memory.config, memory.views, 2)


def test_a_layer_of_another_shape_is_refused() -> None:
    memory = Cache("LBNHC", layers("full", full(4, 16, 4), 1)).memory()
    view = memory.views["full.0"]
    for reshaped in (view.reshape(9, -1), view.transpose(1, 2)):
        shape = re.escape(str(tuple(reshaped.shape)))
        with pytest.raises(GeometryError, match=f"its shape {shape} has not 4 heads before tokens"):
            shard_views(memory.config, {"full.0": reshaped}, 2)


@pytest.mark.parametrize("outcomes", [(True, True), (True, False), (False, True)])
def test_a_store_ends_with_its_last_shard_and_fails_with_any(outcomes: tuple[bool, bool]) -> None:
    copier, copiers = delayed_shards()
    op = whole_object(SlotRef(4096, 7), 0, (1,))
    ended: list[bool] = []
    copier.store([op], lambda op, is_stored: ended.append(is_stored))
    for inner, outcome in zip(copiers, outcomes, strict=True):
        assert ended == []
        inner.on_stored(op, outcome)
    assert ended == [all(outcomes)]


@pytest.mark.parametrize("damaged", [[0], [3], [1, 2]])
def test_a_damaged_part_fails_the_load_and_names_the_slot_once(
    arena: Arena, damaged: list[int]
) -> None:
    workers, slots = Workers(arena, on_ranks(attention, "LBHNC", 8, 1)), Slots(arena)
    ops = slots.objects(workers, 0)
    workers.store(ops)
    size = ops[1].count * workers.part_bytes(0)
    for part in damaged:
        arena.memory[ops[1].slot.offset + payload_offset(SHARDS) + part * size + 5] ^= 0x10
    error = workers.load(0, ops)
    assert isinstance(error, BadSlotError)
    assert error.slots == [ops[1].slot]
    assert workers.load(0, ops[:1]) is None


def test_a_load_ends_with_its_last_shard_and_has_the_errors_of_all() -> None:
    copier, copiers = delayed_shards()
    ops = [whole_object(SlotRef(4096 * at, 7), at, (1,)) for at in range(2)]
    ended: list[HybridKVError | None] = []
    copier.load(ops, ended.append)
    for inner, op in zip(copiers, ops, strict=True):
        assert ended == []
        inner.on_loaded(BadSlotError(op, "torn"))
    (error,) = ended
    assert isinstance(error, BadSlotError)
    assert error.slots == [op.slot for op in ops]
