"""The file of the token book, so that the next daemon can announce what this one had.

It lies beside the arena, or in the directory of a disk tier, where it outlives a reboot::

    HEAD |size, checksum |frame |size, checksum |frame ...

A frame has descriptions in msgpack, and is encrypted where the tier's records are. Descriptions are
added alone. Once most of the file is of no use any more it is written anew. A broken end, as of a
daemon that was killed, is cut off. Only this user may read the file.
"""

import contextlib
import itertools
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from hybridkv.core.errors import HybridKVError
from hybridkv.daemon.file_thread import FileThread
from hybridkv.daemon.token_book import ChunkDescription, ChunkName, DescribedChunk
from hybridkv.tiers.encryption import TierKey

logger = logging.getLogger("hybridkv.daemon")

HEAD = b"hybridkv token book 1\n"
FRAME_CHUNKS = 256
GROWTH_BYTES = 16 << 20
"""The file is written anew where it has so much more than twice what the book has."""
WAITING_MAX = 1024  # Writes that wait for storage that hangs. Later descriptions are left out.
_FRAME = struct.Struct("<II")  # Bytes and checksum.
_UNUSABLE = "the token book %s cannot be used (%s): routers hear less after a restart"


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    chunk_hash: bytes
    parent: bytes
    content: bytes


_DECODER = msgspec.msgpack.Decoder(list[_Chunk])


class BookFile:
    """Reads and writes the file in `thread`."""

    def __init__(
        self, path: Path, key: TierKey | None, on_read: Callable[[list[DescribedChunk]], None]
    ) -> None:
        """`on_read` is called once, by the thread, with what the file had at the start."""
        self.path = path
        self.size_bytes = 0  # About the bytes of the file, with what is to be written.
        self._key, self._on_read = key, on_read
        self._is_hung = False  # True while descriptions are left out.
        self.thread = FileThread(
            "hybridkv-book", lambda error: logger.warning(_UNUSABLE, self.path, error)
        )
        """Its error stays until the file is written anew."""
        self.thread.put_work(self._read)

    def append_chunks(self, chunks: list[DescribedChunk]) -> None:
        """Add descriptions to the file, unless its storage hangs."""
        if self.thread.backlog >= WAITING_MAX:
            if not self._is_hung:
                self._is_hung = True
                logger.warning(_UNUSABLE, self.path, "its storage hangs")
            return
        self._is_hung = False
        self.size_bytes += sum(len(chunk.description.content) for chunk in chunks)
        self.thread.put_work(lambda: self._write(chunks, is_whole=False))

    def rewrite_file(self, chunks: list[DescribedChunk], held_bytes: int) -> None:
        """Write the file anew with these descriptions, which have `held_bytes` in all."""
        self.size_bytes = held_bytes
        self.thread.put_work(lambda: self._write(chunks, is_whole=True))

    def _read(self) -> None:
        chunks: list[DescribedChunk] = []
        try:
            with contextlib.suppress(FileNotFoundError):  # Nothing was described yet.
                fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                with os.fdopen(fd, "r+b") as file:
                    chunks += self._read_sound(file)
        finally:
            self._on_read(chunks)

    def _read_sound(self, file: IO[bytes]) -> list[DescribedChunk]:
        """Return the chunks of an open file up to its first fault, where the file is cut off."""
        content, chunks = file.read(), list[DescribedChunk]()
        end = len(HEAD) if content.startswith(HEAD) else 0
        for frame_end, frame_chunks in self._frames(content):
            end = frame_end
            chunks += frame_chunks
        if end < len(content):
            file.truncate(end)
        self.size_bytes += end
        return chunks

    def _write(self, chunks: Iterable[DescribedChunk], is_whole: bool) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path.with_name(f"{self.path.name}.tmp") if is_whole else self.path
        how = os.O_TRUNC if is_whole else os.O_APPEND
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags | how, 0o600), "wb") as file:
            if not os.fstat(file.fileno()).st_size:
                file.write(HEAD)
            remaining = iter(chunks)
            while part := list(itertools.islice(remaining, FRAME_CHUNKS)):
                frame = self._encode(part)
                file.write(_FRAME.pack(len(frame), zlib.crc32(frame)) + frame)
        if is_whole:
            os.replace(path, self.path)
            self.thread.error = ""

    def _encode(self, chunks: Iterable[DescribedChunk]) -> bytes:
        rows = [_Chunk(*chunk.name, *chunk.description) for chunk in chunks]
        frame = msgspec.msgpack.encode(rows)
        return frame if self._key is None else self._key.encrypt(frame, HEAD)

    def _frames(self, content: bytes) -> Iterator[tuple[int, list[DescribedChunk]]]:
        """Yield the end of each sound frame and its chunks, up to the first that is not sound."""
        at = len(HEAD)
        while content.startswith(HEAD) and at + _FRAME.size <= len(content):
            size, checksum = _FRAME.unpack_from(content, at)
            at += _FRAME.size
            frame = content[at : at + size]
            at += size
            if len(frame) < size or zlib.crc32(frame) != checksum:
                return
            try:
                if self._key is not None:
                    frame = self._key.decrypt(memoryview(frame), HEAD)
                rows = _DECODER.decode(frame)
            except (msgspec.MsgspecError, HybridKVError):
                return
            yield at, [_described(row) for row in rows]


def _described(row: _Chunk) -> DescribedChunk:
    name = ChunkName(row.identity, row.chunk_hash)
    return DescribedChunk(name, ChunkDescription(row.parent, row.content))
