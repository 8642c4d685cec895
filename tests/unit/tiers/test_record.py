"""Records that pass through a tier come back as they were put, or as damaged; nothing raises."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SLOT_ALIGN,
    is_signed,
    part_digests,
    payload_offset,
    sign,
    slot_bytes,
)
from hybridkv.store.index import Slot
from hybridkv.tiers.contract import DamagedError, MissingError
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob, WrongBytesError, execute
from hybridkv.tiers.record import Record, RecordName, head_bytes, proven_digests, read_head
from tests.chance import examples
from tests.unit.daemon.dict_tier import DictTier

SEED, OTHER_SEED = 7, 1 << 40
SHAPES = [(1, 1), (700, 2), (3000, 1), (9000, 3), (100, 600)]
"""The last one has checksums on more than one page."""


def record_of(shape: SlotShape, seed: int = SEED, number: int = 1) -> Record:
    part_bytes, parts = shape
    return Record(
        name=RecordName(b"n" * HASH_BYTES, 3, bytes([number]) * HASH_BYTES),
        part_bytes=part_bytes,
        parts=parts,
        seed=seed,
        parent=b"parent..",
        tenant=2,
        interior=True,
    )


def item_of(record: Record, offset: int) -> JobItem:
    """Returns the item of a job for the slot at `offset`, whose generation is the seed."""
    return JobItem(record, Slot(offset, record.part_bytes, record.parts, record.seed))


def filled(shape: SlotShape, seed: int) -> memoryview:
    """A slot as a worker leaves it."""
    memory = memoryview(bytearray(slot_bytes(*shape)))
    payload = payload_offset(shape[1])
    memory[payload:] = random.Random(shape[0]).randbytes(len(memory) - payload)
    sign(memory, part_digests(memory, *shape), seed)
    return memory


def put(shape: SlotShape, number: int = 1) -> bytes:
    """The record that a tier gets of a slot."""
    memory, tier = filled(shape, SEED), DictTier({}, is_remote=False)
    record = record_of(shape, number=number)
    outcome = execute(tier, TierJob(JobKind.WRITE, 0, [item_of(record, 0)]), memory)
    assert outcome == JobOutcome(errors=[None], found=[False])
    return tier.records[record.name.key]


def get(shape: SlotShape, image: bytes | None) -> tuple[JobOutcome, memoryview]:
    """What becomes of the bytes that a tier has, between two slots that are nobody's business."""
    size = slot_bytes(*shape)
    memory = memoryview(bytearray(b"\xee") * (3 * size))
    record = record_of(shape, OTHER_SEED)
    tier = DictTier({} if image is None else {record.name.key: image}, is_remote=False)
    outcome = execute(tier, TierJob(JobKind.READ, 0, [item_of(record, size)]), memory)
    assert set(memory[:size]) == set(memory[2 * size :]) == {0xEE}, "bytes of others were written"
    assert set(memory[size : size + HEADER_BYTES]) == {0xEE}, "headers are the daemon's"
    return outcome, memory[size : 2 * size]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_put_comes_back_signed_anew(shape: SlotShape) -> None:
    image = put(shape)
    assert read_head(memoryview(image)) == record_of(shape)
    assert proven_digests(record_of(shape), memoryview(image))
    outcome, slot = get(shape, image)
    assert outcome == JobOutcome(errors=[None], tenants=[2])
    assert is_signed(slot, part_digests(slot, *shape), OTHER_SEED)
    start, size = payload_offset(shape[1]), shape[0] * shape[1]
    assert slot[start : start + size] == filled(shape, SEED)[start : start + size]


@pytest.mark.parametrize("shape", [(700, 2), (3000, 1)])
def test_not_one_bit_of_a_record_may_differ(shape: SlotShape) -> None:
    image = bytearray(put(shape))
    head = head_bytes(shape[1])
    for bit in range(8 * len(image)):
        image[bit // 8] ^= 1 << bit % 8
        known = read_head(memoryview(image)[:head])
        assert known is None or not proven_digests(known, memoryview(image)), f"bit {bit}"
        image[bit // 8] ^= 1 << bit % 8


@st.composite
def mutations(draw: st.DrawFn) -> tuple[SlotShape, bytes]:
    """A shape, and bytes that are not the record that is wanted."""
    shape = draw(st.sampled_from(SHAPES))
    image = bytearray(put(shape))
    how = draw(
        st.sampled_from(("flip", "cut", "longer", "noise", "mixed", "another", "zeros", "empty"))
    )
    match how:
        case "flip":
            for at in draw(
                st.lists(st.integers(0, len(image) - 1), min_size=1, max_size=4, unique=True)
            ):
                image[at] ^= draw(st.integers(1, 255))
        case "cut":
            del image[draw(st.integers(0, len(image) - 1)) :]
        case "longer":
            image[HEADER_BYTES:HEADER_BYTES] = bytes(draw(st.integers(1, SLOT_ALIGN)))
        case "noise":
            image[:] = draw(st.randoms(use_true_random=False)).randbytes(len(image))
        case "mixed":
            at = draw(st.integers(1, len(image) - 1))
            image[at:] = bytes(len(image) - at)
        case "another":
            image = bytearray(put(draw(st.sampled_from(SHAPES)), number=2))
        case "zeros":
            image = bytearray(len(image))
        case _:
            image = bytearray()
    return shape, bytes(image)


@settings(max_examples=examples(300))
@given(mutations())
def test_what_is_not_the_record_is_damaged(what: tuple[SlotShape, bytes]) -> None:
    shape, image = what
    outcome, slot = get(shape, image)
    (error,) = outcome.errors
    # The tier zeroes what is behind a shorter record.
    seen = image[: len(slot)].ljust(len(slot), b"\0")
    whole = seen == put(shape)
    assert isinstance(error, DamagedError) != whole
    assert outcome.error is None


@given(st.binary(max_size=200) | st.binary(min_size=SLOT_ALIGN, max_size=SLOT_ALIGN))
def test_a_head_may_be_anything(raw: bytes) -> None:
    assert read_head(memoryview(raw)) is None


def test_what_is_missing_is_missing() -> None:
    outcome, _ = get((700, 2), None)
    assert isinstance(outcome.errors[0], MissingError)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_that_went_bad_in_ram_are_not_put(shape: SlotShape) -> None:
    memory, tier = filled(shape, SEED), DictTier({}, is_remote=False)
    memory[payload_offset(shape[1])] ^= 1
    outcome = execute(tier, TierJob(JobKind.WRITE, 0, [item_of(record_of(shape), 0)]), memory)
    assert isinstance(outcome.errors[0], WrongBytesError)
    assert not tier.records
