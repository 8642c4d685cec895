"""What the events of a chunk say, and its form in which it is kept, here and by the daemon.

A description is bytes, so that a hundred thousand of them are nothing to Python's garbage
collector.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from hybridkv.core.keys import HASH_BYTES

BlockName = bytes | int  # A block's hash as vLLM publishes it.


class AnnouncedBlocks(NamedTuple):
    """The engine's blocks in an announced chunk, with the fields of their event."""

    names: list[BlockName]
    parent: BlockName | None  # The block before the first one; None = the prompt begins here.
    tokens: Sequence[int]  # Empty where they are not kept.
    extra_keys: list[Any]  # vLLM's extra keys of each block.
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None  # Of the engine's own request.


class _Description(msgspec.Struct, frozen=True, array_like=True):
    names: list[bytes | int]
    parent: bytes | int | None
    tokens: bytes
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None = None


_DECODER = msgspec.msgpack.Decoder(_Description)


def encode_blocks(blocks: AnnouncedBlocks) -> bytes | None:
    """Return the description of a chunk's blocks. None where that cannot be written.

    A request may have token ids that are no numbers of 32 bits.
    """
    try:
        tokens = array("I", blocks.tokens).tobytes()
        return msgspec.msgpack.encode(_Description(**{**blocks._asdict(), "tokens": tokens}))
    except (TypeError, ValueError, OverflowError):
        return None


def decode_blocks(content: bytes) -> AnnouncedBlocks:
    """Return the blocks of a description. Raises ValueError."""
    try:
        said = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no description: {error}") from error
    return AnnouncedBlocks(
        names=said.names,
        parent=said.parent,
        tokens=array("I", said.tokens),
        extra_keys=said.extra_keys,
        lora_id=said.lora_id,
        lora_name=said.lora_name,
        session_id=said.session_id,
    )


def is_description(content: bytes, is_first: bool, chunk_tokens: int, block_tokens: int) -> bool:
    """Return True if another engine's description is one of a chunk of this engine.

    `is_first` is true for the first chunk of a prompt. Engines of another version may write
    something else, or name blocks in another way.
    """
    try:
        blocks = decode_blocks(content)
    except ValueError:
        return False
    kind = _kind_of_names()
    named = blocks.names if blocks.parent is None else [*blocks.names, blocks.parent]
    return (
        len(blocks.tokens) == chunk_tokens == block_tokens * len(blocks.names)
        and len(blocks.extra_keys) == len(blocks.names)
        and is_first == (blocks.parent is None)
        and all(type(name) is kind for name in named)
    )


@cache
def _kind_of_names() -> type:
    """Return the type of the names of blocks that this engine publishes, bytes or int."""
    return type(maybe_convert_block_hash(BlockHash(bytes(HASH_BYTES))))
