"""Tails: hits that end inside a chunk, where one of the engine's fine hashes ends.

vLLM's *match unit* (`--prefix-match-unit`, Geometry.hash_tokens) divides a block. A tail is named
by the hash at its end. It has one object of each group, of the size of a chunk's: the recurrent
state at the end, and the attention block that the end is in, of which only the tokens before it
count::

    tokens   0              chunk            2*chunk
    objects  |  chunk 0     |  tail, k units |.........
    hit      [##############|################)         ends at chunk + k * unit

Tails are served where one block of every group is one chunk, so that the blocks and slots of a hit
that ends inside chunk m are those of a hit of m + 1 chunks. Nothing here does I/O.
"""

from collections.abc import Callable, Sequence

from hybridkv.core.coverage import Hit, is_tail_hit, needed_starts
from hybridkv.core.geometry import Geometry, GroupKind

TAIL_UNITS_MAX = 512
"""Tails that end in so many match units at the end of a prompt are looked up, which limits the
message. Before them only whole chunks are."""


def units_per_chunk(geometry: Geometry) -> int:
    """Returns the match units in one chunk. A tail ends with each of them but the last."""
    return geometry.chunk_tokens // geometry.hash_tokens


def why_no_tails(geometry: Geometry) -> str:
    """Returns why tails cannot be served with these groups. Empty where they can."""
    chunk = geometry.chunk_tokens
    for group in geometry.groups:
        if group.kind not in (GroupKind.FULL, GroupKind.RECURRENT):
            return f"group {group.gid} is {group.kind}, and tails are of full and recurrent groups"
        if group.tokens_per_block != chunk:
            block = group.tokens_per_block
            return f"group {group.gid} has blocks of {block} tokens and a chunk has {chunk}"
    if geometry.lookahead_tokens:
        return "the drafter's KV depends on the token behind a hit"
    unit = geometry.hash_tokens
    if unit == chunk or geometry.alignment_tokens != unit:
        return f"the engine's own hits end at multiples of {geometry.alignment_tokens} tokens"
    return ""


def first_tail_chunk(geometry: Geometry, prompt_tokens: int) -> int:
    """Returns the first chunk whose tails are looked up for a prompt of `prompt_tokens`."""
    last = max(0, prompt_tokens - 1) // geometry.hash_tokens
    return max(0, -(-(last - TAIL_UNITS_MAX) // units_per_chunk(geometry)))


def tail_names(
    geometry: Geometry, hashes: Sequence[bytes], first_chunk: int, prompt_tokens: int
) -> list[bytes]:
    """Returns the names of the tails from `first_chunk` on that end before the last token.

    `hashes` are the engine's fine hashes of the prompt. Those at chunk ends are left out.
    """
    units, last = units_per_chunk(geometry), (prompt_tokens - 1) // geometry.hash_tokens
    names = [*hashes[first_chunk * units : last]]
    del names[units - 1 :: units]
    return names


def tail_chunk(geometry: Geometry, first_chunk: int, number: int) -> int:
    """Returns the chunk inside which a tail ends. Tail 0 is the first of `first_chunk`."""
    return first_chunk + number // (units_per_chunk(geometry) - 1)


def tail_tokens(geometry: Geometry, first_chunk: int, number: int) -> int:
    """Returns the tokens of a hit that ends with a tail. `number` is as in `tail_chunk`."""
    units = number % (units_per_chunk(geometry) - 1) + 1
    whole = tail_chunk(geometry, first_chunk, number) * geometry.chunk_tokens
    return whole + units * geometry.hash_tokens


def tail_hit(geometry: Geometry, first_chunk: int, tail: int) -> Hit:
    """Returns the hit that ends with a tail. Tail 1 is the first of `first_chunk`."""
    depth = tail_chunk(geometry, first_chunk, tail - 1) + 1
    tokens = tail_tokens(geometry, first_chunk, tail - 1)
    return Hit(depth, tail, tokens, needed_starts(geometry, depth))


def longest_tail(
    geometry: Geometry,
    masks: Sequence[bytes],
    chunks: int,
    first_chunk: int,
    count: int,
    is_whole: Callable[[int], bool],
) -> int:
    """Returns the longest tail that extends a hit of `chunks` chunks, counted from 1. 0 = none.

    There are `count` tails from `first_chunk` on. `is_whole(number)`, counted from 0, tells
    whether all objects of a tail are present.
    """
    for number in reversed(range(count)):
        chunk = tail_chunk(geometry, first_chunk, number)
        if chunk < chunks:
            break
        if is_whole(number) and is_tail_hit(geometry, masks, chunk):
            return number + 1
    return 0
