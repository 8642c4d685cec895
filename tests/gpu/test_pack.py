"""Of a library for many GPUs, the code that a Hopper GPU loads is kept."""

import struct

from tests.gpu.pack import for_hopper

PTX, CUBIN = 1, 2
HEADER_BYTES = 64


def entry(kind: int, architecture: int, content: bytes) -> bytes:
    head = struct.pack(
        "<HHIQIIHHI", kind, 257, HEADER_BYTES, len(content), 0, 0, 0, 0, architecture
    )
    return head.ljust(HEADER_BYTES, b"\x07") + content


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_code_of_other_gpus_is_zeros_and_nothing_moves() -> None:
    before, after = b"text\x50\xed\x55\xba before", b"rodata"
    own = fat_binary(entry(CUBIN, 80, b"a" * 40), entry(CUBIN, 90, b"b" * 24))
    compiled_there = fat_binary(
        entry(PTX, 75, b"c" * 16), entry(PTX, 80, b"d" * 16), entry(CUBIN, 120, b"e" * 16)
    )
    library = before + own + compiled_there + after
    kept_own = fat_binary(entry(CUBIN, 80, bytes(40)), entry(CUBIN, 90, b"b" * 24))
    kept_ptx = fat_binary(
        entry(PTX, 75, bytes(16)), entry(PTX, 80, b"d" * 16), entry(CUBIN, 120, bytes(16))
    )
    assert for_hopper(library) == before + kept_own + kept_ptx + after
