"""A worker compares slots: what was stored, and what it has just stored again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.messages import ObjectPair, StepReport
from hybridkv.connector.worker.audit import Auditor, layer_numbers
from hybridkv.connector.worker.difference import Depth, LayerNumbers, NumberRange
from hybridkv.core.audit import AuditOutcome, AuditVerdict
from hybridkv.core.copies import CopyOp
from hybridkv.core.packed import SlotRef, pack_slots
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, payload_offset, slot_bytes
from tests.arenas import unnamed_arena

pytestmark = pytest.mark.engine

COUNT, NUMBERS = 4, 640
BLOCK_BYTES = 2 * NUMBERS
LAYERS = [
    LayerNumbers(name, BLOCK_BYTES, (NumberRange(0, BLOCK_BYTES, "bfloat16"),))
    for name in ("first", "second")
]
PART_BYTES = COUNT * len(LAYERS) * BLOCK_BYTES
INCONCLUSIVE = AuditVerdict(AuditOutcome.INCONCLUSIVE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(1 << 20) as own_arena:
        yield own_arena


class Rig:
    """Slots of one arena, for one rank or several."""

    def __init__(self, arena: Arena, ranks: int = 1, checksum: str = "on", shared: bool = False):
        self.arena = arena
        replicated = frozenset({0} if shared else ())
        self.slot_parts = 1 if shared else ranks
        self.parts = [PartLayout(rank, ranks, checksum, replicated) for rank in range(ranks)]
        self.auditors = [Auditor([LAYERS], [part]) for part in self.parts]
        self.next_offset = 0

    def slot(self, *seeds: int) -> SlotRef:
        """Return a signed slot with random numbers of these seeds, one for each part."""
        ref = SlotRef(self.next_offset, 1000 + self.next_offset)
        header = SlotHeader(SlotState.WRITING, ref.generation, self.slot_parts, PART_BYTES)
        self.arena.memory[ref.offset : ref.offset + HEADER_BYTES] = header.pack()
        self.next_offset += slot_bytes(PART_BYTES, self.slot_parts)
        op = CopyOp(ref, group_index=0, chunk=0, count=COUNT, first=0, blocks=())
        for seed, part in zip(seeds, self.parts, strict=False):
            generator = torch.Generator().manual_seed(seed)
            numbers = torch.randn(PART_BYTES // 2, generator=generator).bfloat16()
            start = part.part_offset(op, PART_BYTES)
            content = numbers.view(torch.uint8).numpy().tobytes()
            self.arena.memory[start : start + PART_BYTES] = content
            part.sign(self.arena, op, PART_BYTES)
        return ref

    def compare(self, stored: SlotRef, computed: SlotRef, chunk: int = 0) -> list[AuditVerdict]:
        """Let each rank compare the slots. Returns their verdicts."""
        verdicts = []
        for auditor in self.auditors:
            auditor.compare_pairs(
                self.arena, {7: ObjectPair(0, chunk, COUNT, pack_slots((stored, computed)))}
            )
            auditor.join()
            (verdict,) = auditor.take_verdicts().values()
            verdicts.append(verdict)
        return verdicts


def outcomes(verdicts: list[AuditVerdict]) -> list[AuditOutcome]:
    return [verdict.outcome for verdict in verdicts]


def test_equal_numbers_pass_and_others_differ(arena: Arena) -> None:
    rig = Rig(arena)
    stored = rig.slot(1)
    assert outcomes(rig.compare(stored, rig.slot(1))) == [AuditOutcome.PASSED]
    (verdict,) = rig.compare(stored, rig.slot(2))
    assert verdict.outcome is AuditOutcome.DIFFERED
    assert verdict.layer in ("first", "second")


def test_each_rank_compares_its_own_part(arena: Arena) -> None:
    rig = Rig(arena, ranks=2)
    verdicts = rig.compare(rig.slot(1, 2), rig.slot(1, 3))
    assert outcomes(verdicts) == [AuditOutcome.PASSED, AuditOutcome.DIFFERED]


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_part_that_ranks_share_is_compared_by_the_rank_that_wrote_it(
    arena: Arena, chunk: int
) -> None:
    rig = Rig(arena, ranks=2, shared=True)
    verdicts = outcomes(rig.compare(rig.slot(1), rig.slot(2), chunk))
    assert verdicts.index(AuditOutcome.DIFFERED) == chunk % 2
    assert verdicts.count(AuditOutcome.PASSED) == 1


def test_a_slot_that_lost_its_bytes_is_no_difference(arena: Arena) -> None:
    """That is what checksums are for, and a load finds it too."""
    rig = Rig(arena)
    stored, computed = rig.slot(1), rig.slot(1)
    arena.memory[stored.offset + payload_offset(1) + 5] ^= 0x40
    assert rig.compare(stored, computed) == [INCONCLUSIVE]


def test_every_shard_of_a_rank_is_compared(arena: Arena) -> None:
    """Nothing passes while one of the shards cannot be compared."""
    rig = Rig(arena, ranks=2)
    rig.auditors = [Auditor([LAYERS], rig.parts)]
    stored = rig.slot(1, 2)
    assert outcomes(rig.compare(stored, rig.slot(1, 2))) == [AuditOutcome.PASSED]
    assert outcomes(rig.compare(stored, rig.slot(1, 3))) == [AuditOutcome.DIFFERED]
    assert outcomes(rig.compare(stored, rig.slot(3, 2))) == [AuditOutcome.DIFFERED]
    arena.memory[stored.offset + payload_offset(2) + PART_BYTES + 5] ^= 0x40
    assert rig.compare(stored, rig.slot(1, 2)) == [INCONCLUSIVE]


@pytest.mark.parametrize("chunk", [0, 1])
def test_the_shards_of_a_rank_compare_what_is_replicated_once(arena: Arena, chunk: int) -> None:
    rig = Rig(arena, ranks=2, shared=True)
    rig.auditors = [Auditor([LAYERS], rig.parts)]
    stored = rig.slot(1)
    assert outcomes(rig.compare(stored, rig.slot(2), chunk)) == [AuditOutcome.DIFFERED]
    arena.memory[stored.offset + payload_offset(1) + 5] ^= 0x40
    assert rig.compare(stored, rig.slot(1), chunk) == [INCONCLUSIVE]


@pytest.mark.parametrize("which", [0, 1])
def test_a_slot_of_another_object_by_now_is_no_difference(arena: Arena, which: int) -> None:
    rig = Rig(arena)
    slots = [rig.slot(1), rig.slot(2)]
    slots[which] = SlotRef(slots[which].offset, slots[which].generation + 1)
    assert rig.compare(slots[0], slots[1]) == [INCONCLUSIVE]


def test_an_arena_that_is_not_mapped_is_no_difference(arena: Arena) -> None:
    rig = Rig(arena)
    auditor = rig.auditors[0]
    auditor.compare_pairs(
        None, {7: ObjectPair(0, 0, COUNT, pack_slots((rig.slot(1), rig.slot(2))))}
    )
    assert auditor.take_verdicts() == {7: INCONCLUSIVE}


def test_an_arena_that_is_closed_meanwhile_ends_nothing() -> None:
    with unnamed_arena(1 << 20) as arena:
        rig = Rig(arena)
        pair = ObjectPair(0, 0, COUNT, pack_slots((rig.slot(1), rig.slot(2))))
    rig.auditors[0].compare_pairs(arena, {7: pair})
    rig.auditors[0].join()
    assert rig.auditors[0].take_verdicts() == {7: INCONCLUSIVE}


def test_verdicts_of_all_ranks_come_together() -> None:
    passed = AuditVerdict(AuditOutcome.PASSED)
    reports = [
        StepReport(audits={3: {rank: passed}, 4 + rank: {rank: INCONCLUSIVE}}) for rank in (0, 1)
    ]
    together = reports[0].aggregate(reports[1])
    assert together.audits == {
        3: {0: passed, 1: passed},
        4: {0: INCONCLUSIVE},
        5: {1: INCONCLUSIVE},
    }


def attention(**fields: Any) -> FullAttentionSpec:
    """Return a spec with these fields, and small values for the fields that are not given."""
    small = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**small | fields)


def test_all_of_an_attention_block_is_numbers() -> None:
    view = torch.zeros(3, 2, 16, 16, dtype=torch.bfloat16)
    size = 2 * 2 * 16 * 16
    expected = LayerNumbers("a", size, (NumberRange(0, size, "bfloat16"),))
    assert layer_numbers(attention(), "a", view) == expected
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": attention()})
    assert layer_numbers(uniform, "a", view) == expected


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (attention(dtype=torch.uint8), torch.uint8),
        (attention(state_content_bytes=20), torch.bfloat16),
        (attention(dtype=torch.int8), torch.int8),
    ],
)
def test_bytes_of_another_kind_are_not_taken_for_numbers(
    spec: FullAttentionSpec, dtype: torch.dtype
) -> None:
    """One byte of float8 is one of two types, and packed states have scales among them."""
    assert not layer_numbers(spec, "a", torch.zeros(3, 2, 16, 16, dtype=dtype)).ranges


def states(*dtypes: torch.dtype) -> MambaSpec:
    return MambaSpec(block_size=128, shapes=((3, 40), (2, 4, 8)), dtypes=dtypes)


def test_each_state_of_a_recurrent_layer_has_numbers_of_its_type() -> None:
    """They stand one after another in bytes, and what follows them is padding."""
    view = torch.zeros(3, 1, 1, 512, dtype=torch.int8)
    numbers = layer_numbers(states(torch.bfloat16, torch.float32), "m", view)
    assert numbers.block_bytes == 512
    assert numbers.ranges == (NumberRange(0, 240, "bfloat16"), NumberRange(240, 496, "float32"))


def test_states_that_are_not_where_they_should_be_are_not_taken_for_numbers() -> None:
    spec = states(torch.bfloat16, torch.float32)
    assert not layer_numbers(spec, "m", torch.zeros(3, 1, 1, 400, dtype=torch.int8)).ranges
    apart = torch.zeros(2, 3, 512, dtype=torch.int8).transpose(0, 1)
    assert not layer_numbers(spec, "m", apart).ranges
    unknown = states(torch.int8, torch.float32)
    assert not layer_numbers(unknown, "m", torch.zeros(3, 1, 1, 512, dtype=torch.int8)).ranges


@pytest.mark.parametrize(
    ("name", "spec", "depth"),
    [
        ("model.layers.0.self_attn.attn", attention(), Depth.FIRST),
        ("language_model.model.layers.0.self_attn.attn", attention(), Depth.FIRST),
        ("model.layers.1.self_attn.attn", attention(), Depth.LATER),
        ("model.layers.10.self_attn.attn", attention(), Depth.LATER),
        ("mtp.layers.0.self_attn.attn", attention(), Depth.LATER),
        ("draft_model.model.layers.0.attn", attention(), Depth.LATER),
        ("model.layers.0.mixer", states(torch.bfloat16, torch.float32), Depth.FIRST_STATE),
    ],
)
def test_the_first_layer_is_that_of_the_model_itself(name: str, spec: Any, depth: Depth) -> None:
    """A drafter's first layer reads what the model's last one computed."""
    assert layer_numbers(spec, name, torch.zeros(3, 1, 1, 512, dtype=torch.int8)).depth is depth
