"""Encrypted records: nobody reads them without the key, and no body goes under another name."""

import logging
import os
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN, payload_offset
from hybridkv.store.index import Slot
from hybridkv.tiers import encryption as module
from hybridkv.tiers.coding import PLAIN, Codec, Coding
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, pages, read
from hybridkv.tiers.contract import DamagedError, Tier, UndecodableError
from hybridkv.tiers.disk.files import FileDamage, parse_name, prove_file
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.encryption import ADDED_BYTES, TierKey, read_key
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobItem, JobKind, TierJob, execute
from hybridkv.tiers.record import encoded_header, read_encoded
from tests.unit.daemon.dict_tier import DictTier

KEY, OTHER_KEY = TierKey(bytes(32)), TierKey(b"o" * 32)


def image_of(sample: SampleObject, coding: Coding) -> bytes:
    encoded = coding.encode([sample.memory])
    assert encoded is not None
    return bytes(encoded)


def through(image: bytes, sample: SampleObject, coding: Coding) -> object:
    return read(EncodedTier(DictTier({sample.key: image}, is_remote=False), coding), sample)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("parts", [1, 13, 16])
def test_only_the_key_gives_it_back(codec: Codec, parts: int) -> None:
    # One that fills its pages to the last byte, so that it grows by a page.
    sample = make_sample(1, (2 * SLOT_ALIGN - payload_offset(parts)) // parts, parts)
    image = image_of(sample, Coding(codec, KEY))
    assert through(image, sample, Coding(key=KEY)) is None
    assert through(image, sample, Coding(codec, KEY)) is None
    for coding in (PLAIN, Coding(codec), Coding(codec, OTHER_KEY)):
        assert isinstance(through(image, sample, coding), UndecodableError)


def test_nothing_of_the_payload_is_seen_and_no_two_are_alike() -> None:
    sample = make_sample(1)
    first, second = (image_of(sample, Coding(key=KEY)) for _ in range(2))
    header = read_encoded(first)
    assert header is not None
    assert first[:HEADER_BYTES] == second[:HEADER_BYTES]
    body, second_body = (
        image[HEADER_BYTES:][: header.encoding.body_bytes] for image in (first, second)
    )
    assert len(body) == ADDED_BYTES + 8 * 2 + 9000 * 2
    assert sum(a == b for a, b in zip(body, second_body, strict=True)) < len(body) // 100
    plain = bytes(sample.memory)
    seen = [at for at in range(0, len(plain) - 16, 16) if plain[at : at + 16].strip(b"\0")]
    assert not any(plain[at : at + 16] in first[HEADER_BYTES:] for at in seen if at >= HEADER_BYTES)


def test_a_body_under_another_name_is_damaged() -> None:
    """Of the same shape and seed: only the associated data tells the two apart."""
    sample, second = make_sample(1), make_sample(2)
    coding = Coding(key=KEY)
    moved = read_encoded(image_of(second, coding))
    assert moved is not None
    image = encoded_header(sample.record, moved.encoding) + image_of(second, coding)[HEADER_BYTES:]
    assert isinstance(through(image, sample, coding), DamagedError)


def test_with_a_key_nothing_plain_is_taken() -> None:
    sample = make_sample(1)
    compressed = image_of(sample, Coding(Codec.ZPLANES))
    for image in (bytes(sample.memory), compressed):
        assert isinstance(through(image, sample, Coding(key=KEY)), UndecodableError)
        assert through(image, sample, PLAIN) is None
    # What is no record at all is not a matter of keys.
    assert isinstance(through(bytes(SLOT_ALIGN), sample, Coding(key=KEY)), DamagedError)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tier.key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def opened(root: Path, key: Path | None) -> Tier:
    option = f"&key=file:{key}" if key else ""
    tier = make_tier(parse_tier(f"disk://{root}?bytes=64MiB{option}", "tier"), "here")
    tier.open()
    return tier


def test_a_wrong_key_is_a_miss_that_is_counted_and_told_once(
    tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, other_key = tmp_path / "tier", tmp_path / "other.key"
    other_key.write_bytes(b"o" * 32)
    other_key.chmod(0o600)
    samples = [make_sample(number) for number in range(3)]
    assert opened(root, key_file).put([sample.write_request() for sample in samples]) == [None] * 3
    tier = opened(root, other_key)
    spec = parse_tier(f"disk://{root}", "tier")
    state = TierState(0, "disk", tier, spec, lambda job: None)
    memory = pages(len(samples[0].memory))
    with caplog.at_level(logging.WARNING, "hybridkv.daemon"):
        for sample in samples:
            slot = Slot(0, sample.record.part_bytes, sample.record.parts, 5)
            job = TierJob(JobKind.READ, 0, [JobItem(sample.record, slot)])
            state.submit_job(job, 0.0)
            state.on_job_done(job, execute(tier, job, memory), 0.0)
    assert state.counters["objects_undecodable"] == 3
    assert not state.counters["failures"] + state.counters["objects_damaged"]
    assert not state.is_shut
    assert [line for line in caplog.messages if "another key" in line] == caplog.messages
    assert len(caplog.messages) == 1
    assert len(list(root.glob("objects/here/??/*"))) == 3
    # The right key still reads them; a daemon with the new key replaces what it stores again.
    assert read(opened(root, key_file), samples[0]) is None
    assert tier.put([samples[1].write_request()]) == [None]
    assert read(tier, samples[1]) is None
    assert isinstance(read(opened(root, key_file), samples[1]), UndecodableError)


def test_fsck_needs_the_key(tmp_path: Path, key_file: Path) -> None:
    opened(tmp_path / "tier", key_file).put([make_sample(1).write_request()])
    (path,) = tmp_path.glob("tier/objects/here/??/*")
    key = read_key(str(key_file), "key")

    def proof(coding: Coding) -> tuple[FileDamage | None, bool]:
        found = prove_file(str(path), parse_name(path.name), coding)
        assert found is not None
        return found.damage, found.is_undecodable

    assert proof(Coding(key=key)) == (None, False)
    assert proof(PLAIN) == (None, True)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    assert proof(Coding(key=key)) == (FileDamage.BYTES, False)
    assert proof(PLAIN) == (None, True)


@pytest.mark.parametrize(("size", "mode"), [(31, 0o600), (33, 0o600), (0, 0o600)])
def test_a_key_of_another_length_is_one_sentence(key_file: Path, size: int, mode: int) -> None:
    key_file.write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=r"has not just 32 bytes; openssl rand -out .* 32 works"):
        read_key(str(key_file), "tier disk:///d")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o601])
def test_a_key_that_others_may_read_is_one_sentence(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=r"is open to others \(mode 06.*chmod 600"):
        read_key(str(key_file), "tier disk:///d")
    # As Kubernetes gives a secret to a pod's group.
    key_file.chmod(0o440)
    read_key(str(key_file), "tier disk:///d")


def test_other_faults_of_keys_are_one_sentence(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path, tmp_path / "none.key")
    for value in ("c2VjcmV0c2VjcmV0", "file:relative", "env:KEY", ""):
        with pytest.raises(ConfigError, match="must be file: and an absolute path") as caught:
            parse_tier(f"disk:///d?key={value}", "tier")
        assert not value or value not in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(module, "library", None)
        with pytest.raises(ConfigError, match=r"hybridkv\[encryption\]"):
            opened(tmp_path, key_file)
