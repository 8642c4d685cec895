"""Encoded records: their compression, without loss, in byte planes, and their encryption.

The payload is cut into blocks of BLOCK_BYTES of one part. A block is split into the first bytes of
its numbers, their second bytes and so on, its *planes*, and each plane is compressed by itself,
since the exponents of numbers are alike and the ends of their mantissas are noise::

    block, bf16     a0 a1  b0 b1  c0 c1          planes   a0 b0 c0 | a1 b1 c1

Objects may hold numbers of several widths, as the states of a recurrent layer do, and a daemon does
not know the widths. So each block is split by the width that compresses its start best. The width
is stored before the block.

The signatures of the parts are inside the body and over the plain bytes: decoding a record proves
the bytes that left the engine. The digest before them is over the encoded bytes. It is checked
first, so the library never gets damaged bytes::

    body     |digest of what follows, 8 bytes |signature per part |blocks

With a key (tiers.encryption) the body is that without the digest, encrypted, and a record that does
not get smaller is encrypted as it is.
"""

import importlib
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

from xxhash import xxh3_64_digest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import CodecName, TierSpec
from hybridkv.shm.slots import CHECKSUM_BYTES, HEADER_BYTES, SLOT_ALIGN, payload_offset
from hybridkv.tiers.contract import (
    DamagedError,
    TierError,
    UndecodableError,
    bytes_after,
    first_bytes,
    zero_after,
)
from hybridkv.tiers.encryption import ADDED_BYTES, TierKey, read_key
from hybridkv.tiers.record import (
    Encoding,
    Record,
    encoded_header,
    head_bytes,
    is_encoded,
    parts_of,
    read_encoded,
    read_head,
    write_header,
)

BLOCK_BYTES = 256 << 10
"""Splitting a block holds the interpreter's lock, for a quarter of a millisecond."""
SAMPLE_BYTES = 8 << 10  # The start of a block, by which its width is chosen.
WIDTHS = (1, 2, 4)  # Bytes of a number: fp8, bf16 and fp16, float32.
LEVEL = 1  # Of zstd. A higher one is slower, and finds no more in planes of numbers.
_DIGEST_BYTES = 8
BODY_BYTES_MAX = 1 << 31
_FRAME = struct.Struct("<I")  # The size of a plane's frame, stored before the frame.


class Codec(IntEnum):
    """The compression of a record's body. The number is in the record's header."""

    NONE = 0
    ZPLANES = 1  # Byte planes, each a frame of zstd.


class Cipher(IntEnum):
    """The encryption of a record's body. The number is in the record's header."""

    NONE = 0
    AES_256_GCM = 1


CODECS = {CodecName.NONE: Codec.NONE, CodecName.ZPLANES: Codec.ZPLANES}


def find_zstandard() -> ModuleType | None:
    """Returns the module `zstandard`, or None where it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


zstandard = find_zstandard()


@dataclass(frozen=True)
class Coding:
    """The encoding of a tier: how it encodes records that are put, and what it can decode."""

    codec: Codec = Codec.NONE
    key: TierKey | None = None
    takes_plain: bool = False  # Whether a tier with a key also reads records without encryption.

    @property
    def encodes(self) -> bool:
        """True if `encode` encodes records at all."""
        return self.codec is not Codec.NONE or self.key is not None

    def encode(self, pieces: Sequence[memoryview]) -> memoryview | None:
        """Returns the encoded record on pages of its own, or None: write `pieces` as they are.

        `pieces` are a whole record. A record that is encoded already stays as it is. Without a key,
        so does a record that does not get smaller. Raises TierError where a record cannot be
        encrypted.
        """
        if not self.encodes or is_encoded(gather(pieces, 0, HEADER_BYTES)):
            return None
        record = plain_record(pieces)
        if record is None or record.size_bytes >= BODY_BYTES_MAX:
            if self.key is not None:
                raise TierError("it cannot be encrypted: it is no record, or too large")
            return None
        signatures = gather(pieces, HEADER_BYTES, CHECKSUM_BYTES * record.parts)
        codec, content = self.codec, b""
        if codec is not Codec.NONE:
            content = b"".join((signatures, *_compressed(record, pieces)))
            if Encoding(_DIGEST_BYTES + len(content), codec, 0).size_bytes >= record.size_bytes:
                codec = Codec.NONE
        if self.key is None:
            if codec is Codec.NONE:
                return None
            header = encoded_header(record, Encoding(_DIGEST_BYTES + len(content), codec, 0))
            return _on_pages(header + xxh3_64_digest(content) + content)
        if codec is Codec.NONE:
            payload_bytes = record.part_bytes * record.parts
            content = signatures + gather(pieces, payload_offset(record.parts), payload_bytes)
        size = ADDED_BYTES + len(content)
        header = encoded_header(record, Encoding(size, codec, Cipher.AES_256_GCM, self.key.id))
        return _on_pages(header + self.key.encrypt(content, header))

    def decode(self, encoded: Sequence[memoryview], pieces: Sequence[memoryview]) -> None:
        """Decode the record in `encoded`, which ends with zeros, into `pieces`.

        Both may be the same memory. Raises DamagedError, and UndecodableError where a library or
        the key is missing. `pieces` has any bytes then.
        """
        start = gather(encoded, 0, HEADER_BYTES)
        header = read_encoded(start)
        if header is None:
            raise DamagedError("its header is not sound")
        record, encoding = header
        if sum(map(len, pieces)) != record.size_bytes:
            raise DamagedError("it is another object")
        body = memoryview(gather(encoded, HEADER_BYTES, encoding.body_bytes))
        padding = bytes_after(encoded, HEADER_BYTES + encoding.body_bytes)
        if len(body) < encoding.body_bytes or any(bytes(piece).strip(b"\0") for piece in padding):
            raise DamagedError(f"it has not {encoding.body_bytes} bytes")
        if encoding.codec not in tuple(Codec) or encoding.cipher not in tuple(Cipher):
            raise UndecodableError("it is encoded by a later version")
        body, signatures = self._decrypted(body, encoding, start), CHECKSUM_BYTES * record.parts
        if len(body) < signatures:
            raise DamagedError("it has no checksums")
        payload = payload_offset(record.parts)
        head = bytearray(payload)
        head[HEADER_BYTES : HEADER_BYTES + signatures] = body[:signatures]
        write_header(record, memoryview(head))
        scatter(pieces, 0, head)
        if encoding.codec == Codec.ZPLANES:
            _decompress(record, body[signatures:], pieces)
        elif len(body) == signatures + record.part_bytes * record.parts:
            scatter(pieces, payload, body[signatures:])
        else:
            raise DamagedError("it has another length than its object")
        zero_after(pieces, payload + record.part_bytes * record.parts)

    def check_plain(self) -> None:
        """Raise UndecodableError where plain records are refused.

        With a key they are refused, since anyone who may write to the tier can make a plain record.
        """
        if self.key is not None and not self.takes_plain:
            raise UndecodableError("it is not encrypted, and key= takes nothing else")

    def _decrypted(self, body: memoryview, encoding: Encoding, header: bytes) -> memoryview:
        """Returns the body without its encryption. Raises DamagedError where its proof fails."""
        if encoding.cipher == Cipher.NONE:
            self.check_plain()
            if body[:_DIGEST_BYTES] != xxh3_64_digest(body[_DIGEST_BYTES:]):
                raise DamagedError("its encoded bytes are not those that were written")
            return body[_DIGEST_BYTES:]
        if self.key is None:
            raise UndecodableError("it is encrypted, and there is no key=")
        if self.key.id != encoding.key_id:
            raise UndecodableError("it is encrypted with another key")
        return memoryview(self.key.decrypt(body, header))


PLAIN = Coding()  # Encodes nothing, and decodes what needs no key.


def coding_of(spec: TierSpec) -> Coding:
    """Returns the encoding of the tier `spec`. Raises ConfigError where a library is missing."""
    if spec.codec is not CodecName.NONE and zstandard is None:
        what = f"tier {spec.shown}: codec={spec.codec} needs the package zstandard"
        raise ConfigError(what, "pip install 'hybridkv[codec]' works")
    key = read_key(spec.key_path, f"tier {spec.shown}") if spec.key_path else None
    return Coding(CODECS[spec.codec], key)


def gather(pieces: Sequence[memoryview], start: int, size: int) -> bytes:
    """Returns `size` bytes of the pieces, from `start` on, or fewer where the pieces end."""
    return b"".join(first_bytes(bytes_after(pieces, start), size))


def scatter(
    pieces: Sequence[memoryview], start: int, content: bytes | bytearray | memoryview
) -> None:
    """Write `content` into the pieces from `start` on."""
    done, view = 0, memoryview(content)
    for piece in first_bytes(bytes_after(pieces, start), len(content)):
        piece[:] = view[done : done + len(piece)]
        done += len(piece)


def _on_pages(record: bytes) -> memoryview:
    """Returns a copy of an encoded record that starts on a page and ends with zeros."""
    size = -(-len(record) // SLOT_ALIGN) * SLOT_ALIGN
    memory = memoryview(mmap.mmap(-1, size))
    memory[: len(record)] = record
    return memory


def plain_record(pieces: Sequence[memoryview]) -> Record | None:
    """Returns the header of a plain record, or None where the pieces have no sound one."""
    parts = parts_of(gather(pieces, 0, HEADER_BYTES))
    return read_head(memoryview(gather(pieces, 0, head_bytes(parts))))


def _blocks(record: Record) -> Iterator[tuple[int, int]]:
    """Yields (start, size in bytes) of each block in a plain record."""
    payload = payload_offset(record.parts)
    for part in range(record.parts):
        for at in range(0, record.part_bytes, BLOCK_BYTES):
            start = payload + part * record.part_bytes + at
            yield start, min(BLOCK_BYTES, record.part_bytes - at)


def _compressed(record: Record, pieces: Sequence[memoryview]) -> Iterator[bytes]:
    assert zstandard is not None, "a tier without the library has no codec"
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    for start, size in _blocks(record):
        block = gather(pieces, start, size)

        def cost(width: int, sample: bytes = block[:SAMPLE_BYTES]) -> int:
            return sum(len(compressor.compress(sample[at::width])) for at in range(width))

        width = min(WIDTHS, key=cost)
        yield width.to_bytes()
        for plane in range(width):
            frame = compressor.compress(block[plane::width])
            yield _FRAME.pack(len(frame))
            yield frame


def _decompress(record: Record, body: memoryview, pieces: Sequence[memoryview]) -> None:
    if zstandard is None:
        raise UndecodableError("it is compressed, and the package zstandard is not installed")
    decompressor, at = zstandard.ZstdDecompressor(), 0

    def take_bytes(size: int) -> memoryview:
        nonlocal at
        at += size
        if at > len(body):
            raise DamagedError("its compressed bytes end too early")
        return body[at - size : at]

    for start, size in _blocks(record):
        block, width = bytearray(size), take_bytes(1)[0]
        if width not in WIDTHS:
            raise DamagedError(f"its numbers have {width} bytes")
        for plane in range(width):
            frame = take_bytes(_FRAME.unpack(take_bytes(_FRAME.size))[0])
            try:
                # The library allocates the size that a frame claims, so the size is checked first.
                if zstandard.frame_content_size(frame) != len(range(plane, size, width)):
                    raise DamagedError("its compressed bytes are not those of its numbers")
                block[plane::width] = decompressor.decompress(frame)
            except (zstandard.ZstdError, ValueError) as error:
                raise DamagedError("its compressed bytes are not sound") from error
        scatter(pieces, start, block)
    if at != len(body):
        raise DamagedError("there are bytes behind its compressed ones")
