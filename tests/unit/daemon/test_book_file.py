"""The file of the token book: what one daemon wrote the next one reads."""

import stat
from pathlib import Path
from queue import SimpleQueue

import pytest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.daemon.book_file import HEAD, BookFile
from hybridkv.daemon.token_book import ChunkDescription, ChunkName, DescribedChunk
from hybridkv.tiers.encryption import KEY_BYTES, TierKey

CHUNKS = [
    DescribedChunk(
        ChunkName(bytes([number]) * HASH_BYTES, bytes(HASH_BYTES)),
        ChunkDescription(b"" if number else b"p" * HASH_BYTES, b"secret tokens %d" % number),
    )
    for number in range(4)
]
KEY = TierKey(bytes(range(KEY_BYTES)))


def read(path: Path, key: TierKey | None = None) -> tuple[BookFile, list[DescribedChunk]]:
    """Open a file. Returns it, and what it has."""
    found: SimpleQueue[list[DescribedChunk]] = SimpleQueue()
    file = BookFile(path, key, found.put)
    return file, found.get(timeout=60)


def write(path: Path, *parts: list[DescribedChunk], key: TierKey | None = None) -> None:
    """Add to a file."""
    file, _ = read(path, key)
    for part in parts:
        file.append_chunks(part)
    file.thread.close(60)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_what_is_written_is_read_by_the_next_daemon(tmp_path: Path, key: TierKey | None) -> None:
    path = tmp_path / "books" / "node"
    write(path, CHUNKS[:2], CHUNKS[2:3], key=key)
    write(path, CHUNKS[3:], key=key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (b"secret tokens" in path.read_bytes()) == (key is None)
    file, found = read(path, key)
    assert found == CHUNKS
    size = file.size_bytes
    file.rewrite_file(CHUNKS[:1], held_bytes=20)
    file.thread.close(60)
    assert path.stat().st_size < size
    assert read(path, key)[1] == CHUNKS[:1]
    assert [each.name for each in path.parent.iterdir()] == ["node"]


def test_of_a_file_without_its_end_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "book"
    write(path, CHUNKS[:1], CHUNKS[1:2])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read(path)[1] == CHUNKS[:1]
    write(path, CHUNKS[2:3])
    assert read(path)[1] == [CHUNKS[0], CHUNKS[2]]


@pytest.mark.parametrize("content", [b"", HEAD[:3], b"something else", HEAD + b"\0" * 7])
def test_a_file_that_is_no_book_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "book"
    path.write_bytes(content)
    write(path, CHUNKS[:1])
    assert read(path)[1] == CHUNKS[:1]


def test_another_key_reads_nothing_and_a_place_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "book"
    write(path, CHUNKS, key=KEY)
    assert read(path, TierKey(bytes(KEY_BYTES)))[1] == []
    (tmp_path / "file").write_bytes(b"")
    write(tmp_path / "file" / "book", CHUNKS)
    assert "cannot be used" in caplog.text


def test_storage_that_hangs_takes_no_memory_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hybridkv.daemon.book_file.WAITING_MAX", 0)
    write(tmp_path / "book", CHUNKS[:1], CHUNKS[1:])
    assert caplog.text.count("its storage hangs") == 1
    assert read(tmp_path / "book")[1] == []
