"""The kernels in Triton: one launch copies blocks of all layers of all objects, another one hashes.

With TRITON_INTERPRET=1 they run on the CPU, which is how the tests compare them with torch and with
`xxhash`. Their arguments are addresses, so that each is compiled once.
"""

import struct

import torch
import triton
import triton.language as tl

from hybridkv.connector.copy.device import DeviceError, Kernels
from hybridkv.connector.copy.tables import ENTRY, ROW, KernelLaunch
from hybridkv.shm.slots import PIECE_BYTES

TILE_WORDS = 1024  # What one program copies of each block.
GRID_MAX = 65_535  # CUDA's limit of a grid's second and third number.
STEP_BLOCKS = 8  # Blocks of 1,024 bytes that one program reads at once.
_STRIPE_WORDS, _STRIPES = 8, 16  # XXH3 scrambles its accumulators after this many stripes.
_BLOCK_BYTES = 8 * _STRIPE_WORDS * _STRIPES
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of XXH3."""
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
_AVALANCHE = 0x165667919E3779F9

assert PIECE_BYTES % _BLOCK_BYTES == 0


@triton.jit
def _address(number, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address `number` of words. Triton passes one below 2 GiB as 32 bits."""
    return number.to(tl.int64).to(tl.pointer_type(WORD))


@triton.jit(do_not_specialize=["entries", "table"])
def copy_blocks_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917  # for Triton
    entries,
    table,
    ENTRY: tl.constexpr,
    ROW: tl.constexpr,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Copy a tile of one run, for all blocks of an object. See tables for the arrays.

    Grid (entries, rows, tiles of the longest run).
    """
    numbers, rows = _address(entries, tl.int64), _address(table, tl.int64)
    entry = numbers + tl.program_id(0).to(tl.int64) * ENTRY
    number = tl.program_id(1).to(tl.int64)
    if number < tl.load(entry + 6):
        row = rows + (tl.load(entry + 5) + number) * ROW
        offset = tl.program_id(2).to(tl.int64) * TILE + tl.arange(0, TILE)
        stride, run = tl.load(row + 1), tl.load(row + 2)
        if not GATHER:
            run = tl.where(stride != 0, run, 0)  # Padding is never written (vllm.stages).
        mask = offset < run
        count, first = tl.load(entry + 1), tl.load(entry + 2)
        block_words = tl.load(row + 3)
        before = tl.load(row + 4) * count + tl.load(row + 5) + first * block_words
        engine = tl.load(row).to(tl.pointer_type(WORD)) + offset
        part = tl.load(entry).to(tl.pointer_type(WORD)) + before + offset
        blocks = numbers + tl.load(entry + 4)
        for at in range(tl.load(entry + 3)):
            block = engine + tl.load(blocks + at) * stride
            stored = part + at * block_words
            if GATHER:
                tl.store(stored, tl.load(block, mask=mask), mask=mask)
            else:
                tl.store(block, tl.load(stored, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["entries", "keys", "out"])
def digest_kernel(  # type: ignore[no-untyped-def]
    entries, keys, out, ENTRY: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr
):
    """Write the XXH3-64 with seed 0 of a piece of BLOCKS x 1,024 bytes, one for each program.

    Grid (the most pieces of an entry, entries). The sums of STEP blocks are computed at once, so
    that their loads are on their way together.
    """
    entry = _address(entries, tl.int64) + tl.program_id(1).to(tl.int64) * ENTRY
    number = tl.program_id(0).to(tl.int64)
    if number < tl.load(entry + 7):
        piece = tl.load(entry) + number * (BLOCKS * 1024)
        digest = _piece_digest(piece, keys, BLOCKS, STEP)
        at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + number
        tl.store(_address(out, tl.uint64) + at, digest)


@triton.jit
def _piece_digest(  # type: ignore[no-untyped-def]
    data, keys, BLOCKS: tl.constexpr, STEP: tl.constexpr
):
    """Return the digest of the piece at the address `data`."""
    lane, stripe, step = tl.arange(0, 8), tl.arange(0, 16)[:, None], tl.arange(0, STEP)
    key = _address(keys, tl.uint64)
    block_key = tl.load(key + stripe * 8 + lane[None, :])[None, :, :]
    last_key = tl.load(key + 136 + lane)[None, None, :]
    scramble = tl.load(key + 128 + lane)
    prime, start, avalanche = tl.load(key + 160), tl.load(key + 161), tl.load(key + 162)
    acc = tl.load(key + 152 + lane)
    piece = data.to(tl.pointer_type(tl.uint64))
    inside = step[:, None, None] * 128 + stripe[None, :, :] * 8
    for first in range(0, BLOCKS, STEP):
        # The last stripe of a piece has a key of its own.
        is_last = (first + step == BLOCKS - 1)[:, None, None] & (stripe == 15)[None, :, :]
        value = tl.load(piece + first * 128 + inside + lane[None, None, :])
        swapped = tl.load(piece + first * 128 + inside + (lane ^ 1)[None, None, :])
        mixed = value ^ tl.where(is_last, last_key, block_key)
        sums = tl.sum(swapped + (mixed & 0xFFFFFFFF) * (mixed >> 32), axis=1)
        for at in tl.static_range(STEP):
            acc += tl.sum(tl.where((step == at)[:, None], sums, tl.zeros_like(sums)), axis=0)
            scrambled = (acc ^ (acc >> 47) ^ scramble) * prime
            acc = tl.where(first + at < BLOCKS - 1, scrambled, acc)
    acc = acc ^ tl.load(key + 144 + lane)
    even, odd = tl.split(tl.reshape(acc, (4, 2)))
    digest = start + tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=0)
    digest = (digest ^ (digest >> 37)) * avalanche
    return digest ^ (digest >> 32)


class TritonKernels(Kernels):
    """Kernels of Triton, for words of `word_bytes` bytes."""

    can_digest = True

    def __init__(self, word_bytes: int, device: torch.device) -> None:
        words = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
        self._word = words[word_bytes]
        count = len(DIGEST_KEYS)
        signed = struct.unpack(f"<{count}q", struct.pack(f"<{count}Q", *DIGEST_KEYS))
        self._keys = torch.tensor(signed, dtype=torch.int64, device=device)

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        grid = len(launch.ops), launch.rows_max, -(-launch.run_words_max // TILE_WORDS)
        if max(grid[1:]) > GRID_MAX:
            pieces = launch.rows_max
            raise DeviceError(f"a block has {pieces} pieces in memory, more than {GRID_MAX}")
        copy_blocks_kernel[grid](
            launch.descriptors.data_ptr(),
            launch.rows_address,
            ENTRY=ENTRY,
            ROW=ROW,
            WORD=self._word,
            TILE=TILE_WORDS,
            GATHER=is_gather,
        )

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        digest_kernel[pieces_max, objects](
            entries_address,
            self._keys.data_ptr(),
            digests_address,
            ENTRY=ENTRY,
            BLOCKS=PIECE_BYTES // _BLOCK_BYTES,
            STEP=STEP_BLOCKS,
        )


def _words(start: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", _SECRET, start)


DIGEST_KEYS = (
    *(word for stripe in range(_STRIPES) for word in _words(8 * stripe, _STRIPE_WORDS)),
    *_words(len(_SECRET) - 64, _STRIPE_WORDS),  # For the scramble.
    *_words(len(_SECRET) - 64 - 7, _STRIPE_WORDS),  # Of the last stripe.
    *_words(11, _STRIPE_WORDS),  # For the merge.
    *(_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]),
    *(_PRIMES_32[0], PIECE_BYTES * _PRIMES_64[0] % (1 << 64), _AVALANCHE),
)
"""Words that the hash reads from memory, at the places that `_piece_digest` names."""
