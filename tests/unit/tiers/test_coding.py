"""Encoded records: what comes back is what was put, and anything else is damaged."""

import random
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN, payload_offset
from hybridkv.tiers import coding as module
from hybridkv.tiers.coding import BLOCK_BYTES, PLAIN, Codec, Coding
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, pages, read
from hybridkv.tiers.contract import DamagedError, Tier, TierError, UndecodableError
from hybridkv.tiers.disk.files import FileDamage, parse_name, prove_file
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.record import Encoding, encoded_header, read_encoded
from tests.chance import examples
from tests.unit.daemon.dict_tier import DictTier

CODING = Coding(Codec.ZPLANES)


@cache
def numbers(width: int, size: int, seed: int = 1) -> bytes:
    """Numbers as models have them: of one magnitude, with as many bits of noise as they hold."""
    rng = random.Random(seed)
    floats = [rng.gauss(0.0, 1.0) for _ in range(size // width)]
    singles = struct.pack(f"<{len(floats)}f", *floats)
    if width == 4:
        return singles
    # A bf16 is the upper half of a float32. Of one byte: the magnitude, in few values.
    halves = b"".join(singles[at + 2 : at + 4] for at in range(0, len(singles), 4))
    if width == 2:
        return halves
    return bytes(min(255, int(abs(value) * 16)) for value in floats)


def with_payload(payload: bytes, parts: int = 1) -> SampleObject:
    return make_sample(1, len(payload) // parts, parts, payload=payload)


def widths(encoded: memoryview, sample: SampleObject) -> list[int]:
    """The width of each block of an encoded record."""
    header = read_encoded(encoded)
    assert header is not None
    at, end = HEADER_BYTES + 8 + 8 * sample.record.parts, HEADER_BYTES + header.encoding.body_bytes
    found = []
    while at < end:
        found.append(encoded[at])
        at += 1
        for _ in range(found[-1]):
            at += 4 + struct.unpack_from("<I", encoded, at)[0]
    return found


def decoded(
    encoded: memoryview | bytes, sample: SampleObject, coding: Coding = CODING
) -> memoryview:
    into = pages(len(sample.memory))
    coding.decode([memoryview(encoded)], [into])
    return into


@pytest.mark.parametrize(("width", "ratio"), [(1, 1.1), (2, 1.3), (4, 1.1)])
def test_planes_are_as_wide_as_numbers(width: int, ratio: float) -> None:
    sample = with_payload(numbers(width, 3 * BLOCK_BYTES // 2))
    encoded = CODING.encode([sample.memory])
    assert encoded is not None
    assert widths(encoded, sample) == [width, width]
    assert len(sample.memory) / len(encoded) > ratio
    assert decoded(encoded, sample) == sample.memory


def test_an_object_may_have_numbers_of_several_widths() -> None:
    narrow, wide = numbers(2, BLOCK_BYTES), numbers(4, BLOCK_BYTES)
    sample = with_payload(narrow + wide + wide + narrow, parts=2)
    encoded = CODING.encode([sample.memory])
    assert encoded is not None
    assert widths(encoded, sample) == [2, 4, 4, 2]
    assert decoded(encoded, sample) == sample.memory


def test_what_does_not_get_smaller_stays_plain() -> None:
    assert CODING.encode([with_payload(random.Random(1).randbytes(300_000)).memory]) is None
    assert PLAIN.encode([with_payload(bytes(300_000)).memory]) is None


@given(st.data())
@settings(max_examples=examples(60))
def test_any_record_comes_back_from_any_pieces(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 40))
    size = data.draw(st.integers(1, 40_000))
    kind: Callable[[int], bytes] = data.draw(
        st.sampled_from([bytes, lambda size: numbers(2, 2 * size)[:size]])
    )
    sample = with_payload(kind(size) * parts, parts)
    cuts = [SLOT_ALIGN * n for n in range(1, len(sample.memory) // SLOT_ALIGN)]
    cut = data.draw(st.sampled_from([0, *cuts]))
    encoded = CODING.encode([sample.memory[:cut], sample.memory[cut:]] if cut else [sample.memory])
    if encoded is None:
        return
    assert len(encoded) < len(sample.memory)
    into = pages(len(sample.memory) + SLOT_ALIGN)
    into[: len(encoded)] = encoded
    # Where it lies, as a tier decodes it.
    plain = into[: len(sample.memory)]
    CODING.decode([into[:cut], into[cut:]] if cut else [into], [plain[:cut], plain[cut:]])
    assert plain == sample.memory


def encoded_sample() -> tuple[SampleObject, bytes]:
    sample = with_payload(numbers(2, 30_000), parts=2)
    encoded = CODING.encode([sample.memory])
    assert encoded is not None
    return sample, bytes(encoded)


def sealed(image: bytes) -> bytes:
    """An encoded record with the digest that its bytes have."""
    header = read_encoded(image)
    assert header is not None
    end = HEADER_BYTES + header.encoding.body_bytes
    content = image[HEADER_BYTES + 8 : end]
    return image[:HEADER_BYTES] + xxh3_64_digest(content) + content + image[end:]


def through_tier(image: bytes, sample: SampleObject, coding: Coding = CODING) -> TierError | None:
    return read(EncodedTier(DictTier({sample.key: image}, is_remote=False), coding), sample)


def test_not_one_bit_of_an_encoded_record_may_differ() -> None:
    sample, image = encoded_sample()
    assert through_tier(image, sample) is None
    rng = random.Random(3)
    bits = [*range(8 * (HEADER_BYTES + 64)), *rng.sample(range(8 * len(image)), 1500)]
    for bit in [*bits, *range(8 * len(image) - 64, 8 * len(image))]:
        changed = bytearray(image)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(through_tier(bytes(changed), sample), DamagedError), f"bit {bit}"


def another() -> tuple[memoryview, Encoding]:
    """An encoded record of another object, and how its header says that it is encoded."""
    encoded = CODING.encode([with_payload(numbers(2, 30_000, seed=2), parts=2).memory])
    assert encoded is not None
    header = read_encoded(encoded)
    assert header is not None
    return encoded, header.encoding


def test_a_body_of_another_record_is_damaged() -> None:
    sample, _ = encoded_sample()
    encoded, encoding = another()
    forged = encoded_header(sample.record, encoding) + bytes(encoded[HEADER_BYTES:])
    # The two records have one seed here, which the daemon's never have, so it is a whole one.
    with pytest.raises(AssertionError):
        through_tier(forged, sample)
    reseeded = encoded_header(sample.record._replace(seed=sample.record.seed + 1), encoding)
    assert isinstance(through_tier(reseeded + forged[HEADER_BYTES:], sample), DamagedError)


def test_other_bytes_in_a_sound_body_are_damaged() -> None:
    """The encoded bytes have their digest, and are not those that were signed."""
    sample, image = encoded_sample()
    encoded, encoding = another()
    start, end = HEADER_BYTES + 8, HEADER_BYTES + 8 + 8 * 2
    forged = encoded_header(sample.record, encoding) + bytes(8) + image[start:end]
    assert isinstance(through_tier(sealed(forged + bytes(encoded[end:])), sample), DamagedError)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 40) // 3])
def test_a_frame_that_promises_more_is_damaged_and_takes_no_memory(size: int) -> None:
    sample, image = encoded_sample()
    at = HEADER_BYTES + 8 + 8 * sample.record.parts + 1 + 4
    # A frame's header: magic, then 8 bytes of content size, and no checksum.
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size)
    changed = image[:at] + frame + image[at + len(frame) :]
    assert isinstance(through_tier(sealed(changed), sample), DamagedError)


@given(st.binary(max_size=2000))
@settings(max_examples=examples(150))
def test_any_body_is_damaged_and_nothing_else(noise: bytes) -> None:
    sample, image = encoded_sample()
    header = read_encoded(image)
    assert header is not None
    body = noise.ljust(header.encoding.body_bytes, b"\1")[: header.encoding.body_bytes]
    forged = image[:HEADER_BYTES] + body + bytes(-(HEADER_BYTES + len(body)) % SLOT_ALIGN)
    for changed in (forged, sealed(forged)):
        assert isinstance(through_tier(changed, sample), DamagedError)


def test_without_the_library_it_is_a_miss_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sample = with_payload(numbers(2, 30_000))
    url = f"disk://{tmp_path}?bytes=64MiB"
    make_opened(f"{url}&codec=zplanes").put([sample.write_request()])
    with monkeypatch.context() as patch:
        patch.setattr(module, "zstandard", None)
        tier = make_opened(url)
        assert tier.peek(sample.key)
        assert isinstance(read(tier, sample), UndecodableError)
        assert tier.peek(sample.key) is False
        assert tier.find([sample.key]) == [False]
        (path,) = tmp_path.glob("objects/here/??/*")
        proof = prove_file(str(path), parse_name(path.name))
        assert proof is not None
        assert (proof.damage, proof.is_undecodable) == (None, True)
        with pytest.raises(ConfigError, match=r"hybridkv\[codec\]"):
            make_tier(parse_tier(f"{url}&codec=zplanes", "tier"), "here")
        # What it has stored again, it can read.
        assert tier.put([sample.write_request()]) == [None]
        assert read(tier, sample) is None
    assert read(make_opened(f"{url}&codec=zplanes"), sample) is None


def make_opened(url: str, node: str = "here") -> Tier:
    tier = make_tier(parse_tier(url, "tier"), node)
    tier.open()
    return tier


def test_records_with_and_without_a_codec_are_in_one_directory(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}?bytes=64MiB"
    plain, coded = make_opened(url, "one"), make_opened(f"{url}&codec=zplanes", "two")
    plain_sample, coded_sample = (
        make_sample(1, payload=numbers(2, 40_000)),
        make_sample(2, payload=numbers(2, 40_000)),
    )
    plain.put([plain_sample.write_request()])
    coded.put([coded_sample.write_request()])
    for tier in (plain, coded):
        tier.tend()
        assert read(tier, plain_sample) is None
        assert read(tier, coded_sample) is None
    sizes = {path.parts[-3]: path.stat().st_size for path in tmp_path.glob("objects/*/??/*")}
    assert sizes["one"] == len(plain_sample.memory)
    assert sizes["two"] < len(coded_sample.memory)


def test_the_bound_counts_encoded_bytes(tmp_path: Path) -> None:
    samples = [make_sample(number, payload=numbers(2, 200_000)) for number in range(8)]
    kept = {}
    for codec in ("none", "zplanes"):
        tier = make_opened(f"disk://{tmp_path}/{codec}?bytes=1MiB&codec={codec}")
        for sample in samples:
            assert tier.put([sample.write_request()]) == [None]
        gauges = tier.gauges()
        kept[codec] = gauges["objects"]
        assert gauges["bytes"] <= 1 << 20
        if codec != "none":
            ratio = gauges["bytes_before_encoding"] / gauges["bytes_after_encoding"]
            assert ratio > 1.3
    assert kept == {"none": 5.0, "zplanes": 7.0}


def test_fsck_proves_encoded_records(tmp_path: Path) -> None:
    sample = with_payload(numbers(2, 30_000))
    make_opened(f"disk://{tmp_path}?bytes=64MiB&codec=zplanes").put([sample.write_request()])
    (path,) = tmp_path.glob("objects/here/??/*")
    whole, name = path.read_bytes(), parse_name(path.name)

    def damage(image: bytes) -> FileDamage | None:
        path.write_bytes(image)
        proof = prove_file(str(path), name)
        assert proof is not None
        return proof.damage

    assert damage(whole) is None
    assert damage(whole + bytes(SLOT_ALIGN)) is FileDamage.LENGTH
    assert damage(whole[:-SLOT_ALIGN]) is FileDamage.LENGTH
    assert damage(whole[:20] + b"!" + whole[21:]) is FileDamage.HEADER
    middle = payload_offset(1) + 2000
    flipped = bytes([whole[middle] ^ 1])
    assert damage(whole[:middle] + flipped + whole[middle + 1 :]) is FileDamage.BYTES
