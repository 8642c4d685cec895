"""Whatever bytes come in: a message or a WireError, never anything else."""

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes, unpack_header
from hybridkv.wire.codec import Frames, WireError, append, decode_reply, decode_request, encode
from hybridkv.wire.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Explain,
    Hello,
    geometry_from_wire,
)
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import engine_hello


@example(b"\x91\xa1\x80")
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_wire_error(body: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(WireError):
            decode(body)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_frames_survive_any_cutting(bodies: list[bytes], step: int) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames = Frames()
    cut = [
        body for at in range(0, len(stream), step) for body in frames.feed(stream[at : at + step])
    ]
    assert cut == bodies


def test_limits() -> None:
    with pytest.raises(WireError, match="over the limit"):
        Frames().feed((MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"))
    with pytest.raises(WireError, match="Expected `int` <= "):
        decode_request(msgspec.msgpack.encode(["reserve", 1, 1 << 62, 1, 1]))
    with pytest.raises(WireError, match="matching regex"):
        decode_request(msgspec.msgpack.encode(["hello", 1, PROTOCOL_VERSION, "root"]))


def test_a_greeting_of_another_version_is_read_as_far_as_all_versions_agree() -> None:
    """Its sender then gets an error about the version, and not about a field."""
    newer = ["hello", 7, PROTOCOL_VERSION + 1, "observer", {"engine": 1}, [], "x"]
    decoded = decode_request(msgspec.msgpack.encode(newer))
    assert isinstance(decoded, Hello)
    assert (decoded.id, decoded.version) == (7, PROTOCOL_VERSION + 1)
    with pytest.raises(WireError):
        decode_request(msgspec.msgpack.encode([*newer[:2], PROTOCOL_VERSION, *newer[3:]]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_geometry_crosses_the_wire(name: str) -> None:
    geometry = LAYOUTS[name]
    hello = engine_hello(geometry, "e", b"n" * 32)
    decoded = decode_request(encode(hello)[4:])
    assert decoded == hello
    assert decoded.geometry is not None
    back = geometry_from_wire(decoded.geometry)
    assert [group.block_bytes for group in back.groups] == [
        group.block_bytes for group in geometry.groups
    ]
    assert (back.chunk_tokens, back.ranks) == (geometry.chunk_tokens, geometry.ranks)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 7))
def test_a_header_with_any_bit_flipped_is_no_header_or_the_same(at: int, bit: int) -> None:
    header = SlotHeader(
        state=SlotState.COMMITTED,
        generation=77,
        parts=2,
        part_bytes=4096,
        gid=3,
        namespace=b"n" * 32,
        chunk_hash=b"h" * 32,
    )
    raw = bytearray(header.pack())
    assert unpack_header(bytes(raw)) == header
    raw[at] ^= 1 << bit
    found = unpack_header(bytes(raw))
    if found is not None:
        found = found._replace(use=header.use)
    assert found in (None, header), "only padding and the order of eviction may change unnoticed"
    assert unpack_header(bytes(raw[:-1])) is None
    assert slot_bytes(4096, 2) == 3 * 4096


def test_what_cannot_be_encoded_leaves_nothing_behind() -> None:
    out = bytearray(b"before")
    with pytest.raises(UnicodeEncodeError):
        append(out, Explain(1, "\ud800"))
    assert out == b"before"
