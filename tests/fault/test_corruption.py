"""Every way in which a file may be wrong is noticed on the path by which the daemon reads it."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.arena import SHM_DIR
from hybridkv.shm.slots import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    SLOT_ALIGN,
    is_signed,
    part_digests,
    payload_offset,
)
from hybridkv.store.index import Slot
from hybridkv.tiers import coding
from hybridkv.tiers import record as records
from hybridkv.tiers.conformance.samples import pages
from hybridkv.tiers.contract import DamagedError, TierError, UndecodableError
from hybridkv.tiers.disk.files import FileDamage, FileName, prove_file
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.encryption import TierKey
from hybridkv.tiers.jobs import JobItem, JobKind, TierJob, execute
from hybridkv.tiers.record import (
    Record,
    RecordName,
    head_bytes,
    is_encoded,
    read_encoded,
    read_head,
    stamp_head,
    write_head,
)

SEED = 99
"""The seed of the slot that records are read into."""
POISON = 0xA5
SAMPLES = 400
"""How many bits of the payload, and of the padding, are tried."""


class Shape(NamedTuple):
    part_bytes: int
    parts: int


SHAPES = {
    "one small part": Shape(100, 1),
    "one page, no padding": Shape(SLOT_ALIGN - payload_offset(1), 1),
    "three parts": Shape(9000, 3),
    "shared by all ranks": Shape(1152 * 64, 1),
    "many parts": Shape(500, 40),
    "many pages": Shape(300_000, 2),
}


KEY = TierKey(bytes(range(32)))
CODINGS = {
    "none": coding.PLAIN,
    "zplanes": coding.Coding(coding.Codec.ZPLANES),
    "encrypted": coding.Coding(key=KEY),
    "zplanes, encrypted": coding.Coding(coding.Codec.ZPLANES, KEY),
}


class Stored:
    """A record in a real directory, and a slot between poisoned neighbours to read it into."""

    def __init__(
        self, root: Path, shape: Shape, seed: int = 1, coding: coding.Coding = coding.PLAIN
    ) -> None:
        rng = random.Random(seed)
        self.coding = coding
        self.record = Record(
            name=RecordName(rng.randbytes(HASH_BYTES), 7, rng.randbytes(HASH_BYTES)),
            part_bytes=shape.part_bytes,
            parts=shape.parts,
            seed=rng.getrandbits(60),
            parent=rng.randbytes(8),
            tenant=5,
            interior=True,
        )
        payload = payload_of(random.Random(seed), self.record)
        self.plain = bytes(make(self.record, payload))
        self.raw = self.image(self.record, payload)
        bare = DiskTier(parse_tier(f"disk://{root}?bytes=256MiB", "disk", "here"))
        self.tier = EncodedTier(bare, coding)
        self.tier.open()
        name = FileName(self.record.name.key, self.record.parent, self.record.interior)
        self.path = root / "objects/here" / name.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.raw)
        self.tier.open()
        self.size = len(self.raw)
        self.slot_bytes = self.record.size_bytes
        self._memory = pages(self.slot_bytes + 2 * SLOT_ALIGN)
        self._slot = Slot(SLOT_ALIGN, shape.part_bytes, shape.parts, SEED)
        self.file = os.open(self.path, os.O_RDWR)

    @property
    def content(self) -> range:
        """The bytes of the file that are its payload, or the encoded payload."""
        if known := read_encoded(self.raw):
            return range(HEADER_BYTES, HEADER_BYTES + known[1].body_bytes)
        start = payload_offset(self.record.parts)
        return range(start, start + self.record.part_bytes * self.record.parts)

    def image(self, record: Record, payload: bytes) -> bytes:
        """Returns the file of a record, encoded where that makes it smaller."""
        plain = make(record, payload)
        encoded = self.coding.encode([plain])
        return bytes(plain if encoded is None else encoded)

    def read(self) -> TierError | None:
        """Read the record as the daemon's thread does. Returns its error.

        Raises AssertionError where wrong bytes are taken, or other memory is written.
        """
        self._memory[:] = bytes([POISON]) * len(self._memory)
        wanted = self.record._replace(seed=SEED)
        outcome = execute(
            self.tier, TierJob(JobKind.READ, 0, [JobItem(wanted, self._slot)]), self._memory
        )
        assert outcome.error is None
        (error,) = outcome.errors
        slot = self._memory[SLOT_ALIGN : SLOT_ALIGN + self.slot_bytes]
        around = bytes(self._memory[: SLOT_ALIGN + HEADER_BYTES]) + bytes(
            self._memory[SLOT_ALIGN + self.slot_bytes :]
        )
        assert not around.strip(bytes([POISON])), (
            "what is around the slot, and its header, is the daemon's"
        )
        if error is None:
            start = payload_offset(self.record.parts)
            end = start + self.record.part_bytes * self.record.parts
            assert slot[start:end] == self.plain[start:end]
            digests = part_digests(slot, self.record.part_bytes, self.record.parts)
            assert is_signed(slot, digests, SEED)
            assert outcome.tenants == [self.record.tenant]
        return error

    def is_caught(self) -> bool:
        """Whether the reader notices damage. fsck must notice the same."""
        caught, damage = isinstance(self.read(), DamagedError), self.says_fsck()
        assert (damage is not None) == caught, f"fsck says {damage}"
        return caught

    def says_fsck(self) -> FileDamage | None:
        """Returns the damage that fsck finds in the file."""
        name = FileName(self.record.name.key, self.record.parent, self.record.interior)
        proof = prove_file(str(self.path), name, self.coding)
        assert proof is not None
        return proof.damage

    @contextmanager
    def changed(self, raw: bytes) -> Iterator[None]:
        """Gives the file other bytes for a while."""
        self._write(raw)
        yield
        self._write(self.raw)

    def flip(self, bit: int) -> bool:
        """Whether a wrong bit is noticed."""
        at = bit // 8
        os.pwrite(self.file, bytes([self.raw[at] ^ 1 << bit % 8]), at)
        caught = isinstance(self.read(), DamagedError)
        os.pwrite(self.file, self.raw[at : at + 1], at)
        return caught

    def _write(self, raw: bytes) -> None:
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, raw, 0)


def payload_of(rng: random.Random, record: Record) -> bytes:
    """Returns random bytes of few values, which a codec makes smaller."""
    return rng.randbytes(record.part_bytes * record.parts).translate(bytes(range(16)) * 16)


def make(record: Record, payload: bytes) -> memoryview:
    """Returns the bytes of a record's slot."""
    memory, head = pages(record.size_bytes), pages(head_bytes(record.parts))
    start = payload_offset(record.parts)
    memory[start : start + len(payload)] = payload
    write_head(record, memory, head)
    memory[: len(head)] = head
    return memory


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory, where tens of thousands of changes cost no disk anything."""
    path = tempfile.mkdtemp(prefix="hybridkv-test-", dir=SHM_DIR)
    yield Path(path)
    shutil.rmtree(path)


ENCODED = ("three parts", "shared by all ranks", "many parts")
CASES = [
    *((shape, "none") for shape in SHAPES),
    *((shape, "zplanes, encrypted") for shape in ENCODED),
    *(("three parts", name) for name in ("zplanes", "encrypted")),
    *(
        pytest.param((shape, name), marks=pytest.mark.soak)
        for shape in ENCODED[1:]
        for name in ("zplanes", "encrypted")
    ),
]


@pytest.fixture(params=CASES, ids=" ".join)
def stored(request: pytest.FixtureRequest, directory: Path) -> Iterator[Stored]:
    shape, name = request.param
    stored = Stored(directory, SHAPES[shape], coding=CODINGS[name])
    assert bool(is_encoded(stored.raw)) == (name != "none")
    assert stored.read() is None
    yield stored
    assert stored.read() is None, "what is right again is taken again"
    os.close(stored.file)


def test_every_bit_before_the_payload(stored: Stored) -> None:
    """Magic, version, shape, names, tenant, seed, reserved bytes, CRC, signatures and padding."""
    end = payload_offset(stored.record.parts)
    missed = [bit for bit in range(8 * end) if not stored.flip(bit)]
    assert not missed
    print(f"{8 * end} bits")


def test_a_sample_of_all_other_bits(stored: Stored, rng: random.Random) -> None:
    start, end = stored.content.start, stored.content.stop
    middle = start + min(stored.record.part_bytes, (end - start) // 2)
    edges = {start, middle, end - 1, end, stored.size - 1} & set(range(start, stored.size))
    bits = {8 * at + rng.randrange(8) for at in edges}
    for region in (stored.content, range(end, stored.size)):
        bits |= {rng.randrange(8 * region.start, 8 * region.stop) for _ in range(SAMPLES) if region}
    assert not [bit for bit in sorted(bits) if not stored.flip(bit)]
    print(f"{len(bits)} bits")


def test_torn_files(stored: Stored) -> None:
    """The file is cut at each 512 bytes, or has the right length and zeros from there on."""
    for cut in range(0, stored.size, 512 if stored.size < 1 << 17 else 15 * 512):
        with stored.changed(stored.raw[:cut]):
            assert stored.is_caught(), f"cut at {cut}"
        torn = stored.raw[:cut] + bytes(stored.size - cut)
        with stored.changed(torn):
            assert stored.is_caught() == (torn != stored.raw), f"torn at {cut}"
    for excess in (bytes(1), bytes(512), b"\1" * SLOT_ALIGN, bytes(2 * SLOT_ALIGN)):
        with stored.changed(stored.raw + excess):
            # Zeros after a record say nothing: a reader may take what is before them.
            assert isinstance(stored.read(), DamagedError) or not excess.strip(b"\0")
            assert stored.says_fsck() is FileDamage.LENGTH, f"{len(excess)} bytes too many"


def test_other_bytes(stored: Stored, rng: random.Random) -> None:
    """Bytes are random, all zeros, all ones, of the file's other half, or shifted by a sector."""
    half = stored.size // 2
    for raw in (
        rng.randbytes(stored.size),
        bytes(stored.size),
        b"\xff" * stored.size,
        stored.raw[half:] + stored.raw[:half],
        stored.raw[512:] + stored.raw[:512],
        stored.raw[: payload_offset(stored.record.parts)]
        + rng.randbytes(stored.size)[: -payload_offset(1)],
    ):
        with stored.changed(raw[: stored.size].ljust(stored.size, b"\0")):
            assert stored.is_caught()


def test_whole_records_of_something_else(stored: Stored, rng: random.Random) -> None:
    """The bytes are of another prompt, group or identity, or of the neighbour on disk."""
    record = stored.record
    names = [
        record.name._replace(namespace=rng.randbytes(HASH_BYTES)),
        record.name._replace(gid=record.name.gid + 1),
        record.name._replace(chunk_hash=rng.randbytes(HASH_BYTES)),
    ]
    for name in names:
        with stored.changed(stored.image(record._replace(name=name), payload_of(rng, record))):
            assert stored.is_caught(), name


def test_the_same_name_of_another_layout(stored: Stored, rng: random.Random) -> None:
    """As long as this one, whole and sound: of an engine with other blocks, or of other ranks."""
    record = stored.record
    shapes = [
        Shape(part_bytes, parts)
        for parts in sorted({1, 2, 3, 4, record.parts})
        for part_bytes in (
            record.part_bytes - 1,
            record.part_bytes + 1,
            record.part_bytes * record.parts // parts,
        )
        if part_bytes > 0 and (part_bytes, parts) != (record.part_bytes, record.parts)
    ]
    alike = [record._replace(part_bytes=shape.part_bytes, parts=shape.parts) for shape in shapes]
    alike = [relative for relative in alike if relative.size_bytes == record.size_bytes]
    assert alike
    for relative in alike:
        raw = stored.image(relative, payload_of(rng, relative))
        with stored.changed(raw):
            assert isinstance(stored.read(), DamagedError), relative


@pytest.mark.parametrize("version", [0, 1, records.RECORD_VERSION + 1, 0xFFFF])
def test_another_version(stored: Stored, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Sound in itself."""
    payload = payload_of(random.Random(1), stored.record)
    with monkeypatch.context() as patch:
        patch.setattr(records, "RECORD_VERSION", version)
        raw = bytes(make(stored.record, payload))
    assert raw != stored.raw
    with stored.changed(raw):
        assert stored.is_caught()


def test_a_record_that_nobody_signed(stored: Stored) -> None:
    """Its header is sound, and says nothing of the bytes."""
    raw = bytearray(stored.plain)
    payload = payload_offset(stored.record.parts)
    raw[HEADER_BYTES : HEADER_BYTES + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
    raw[payload] ^= 1
    stamp_head(memoryview(raw), stored.record.parts)
    assert read_head(memoryview(raw)) == stored.record
    with stored.changed(bytes(raw)):
        assert stored.says_fsck() is FileDamage.BYTES
        wrong = DamagedError if stored.coding.key is None else UndecodableError
        assert isinstance(stored.read(), wrong)


def test_swapped_files(directory: Path) -> None:
    """Each is whole, of the right length, and the other one."""
    first, second = (Stored(directory, SHAPES["three parts"], seed) for seed in (1, 2))
    first.tier.open()
    os.rename(first.path, directory / "aside")
    os.rename(second.path, first.path)
    os.rename(directory / "aside", second.path)
    assert isinstance(first.read(), DamagedError)
    second.tier.open()
    assert isinstance(second.read(), DamagedError)
    proofs = [prove_file(str(path), None) for path in (first.path, second.path)]
    assert [proof.damage for proof in proofs if proof is not None] == [FileDamage.MISNAMED] * 2
    for each in (first, second):
        os.close(each.file)


def test_one_wrong_record_costs_no_other(directory: Path, rng: random.Random) -> None:
    """Read in one job: each has its own error, and the right ones are right."""
    shapes = list(SHAPES.values())
    all_of_them = [Stored(directory, shape, seed) for seed, shape in enumerate(shapes)]
    tier = all_of_them[0].tier
    tier.open()
    wrong = set(rng.sample(range(len(shapes)), 3))
    for number in wrong:
        raw = bytearray(all_of_them[number].raw)
        raw[rng.randrange(len(raw))] ^= 16
        all_of_them[number].path.write_bytes(raw)
    memory = pages(sum(stored.slot_bytes for stored in all_of_them))
    items, at = [], 0
    for stored, shape in zip(all_of_them, shapes, strict=True):
        target = Slot(at, shape.part_bytes, shape.parts, SEED)
        items.append(JobItem(stored.record._replace(seed=SEED), target))
        at += stored.slot_bytes
    errors = execute(tier, TierJob(JobKind.READ, 0, items), memory).errors
    assert {
        number for number, error in enumerate(errors) if isinstance(error, DamagedError)
    } == wrong
    for item, stored in zip(items, all_of_them, strict=True):
        os.close(stored.file)
        if items.index(item) not in wrong:
            assert item.slot is not None
            slot = memory[item.slot.offset : item.slot.offset + stored.slot_bytes]
            start = payload_offset(stored.record.parts)
            assert slot[start:] == stored.raw[start:]
