"""What the events of a chunk say, and its form in which the daemon's token book keeps it."""

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

    before: bytes  # The hash of the chunk before; empty where the prompt begins here.
    names: list[BlockName]
    parent: BlockName | None  # The block before the first one; None = the prompt begins here.
    tokens: Sequence[int]  # Empty where no more tokens are kept.
    extra_keys: list[Any]  # vLLM's extra keys of each block.
    lora_id: int | None
    lora_name: str | None
    session_id: str | None = None  # Of the engine's own request.


class _Description(msgspec.Struct, frozen=True, array_like=True):
    names: list[bytes | int]
    parent: bytes | int | None
    tokens: bytes
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None


_DECODER = msgspec.msgpack.Decoder(_Description)


def encode_description(blocks: AnnouncedBlocks) -> bytes | None:
    """Return a chunk's blocks for other engines. None where that cannot be written.

    A request may have token ids that are no numbers of 32 bits.
    """
    try:
        tokens = array("I", blocks.tokens).tobytes()
        description = _Description(
            blocks.names, blocks.parent, tokens, blocks.extra_keys, blocks.lora_id, blocks.lora_name
        )
        return msgspec.msgpack.encode(description)
    except (TypeError, ValueError, OverflowError):
        return None


def decode_description(
    content: bytes, before: bytes, chunk_tokens: int, block_tokens: int
) -> AnnouncedBlocks | None:
    """Return the blocks that another engine described. None where it is no such chunk here.

    Engines of another version may write something else, or name blocks in another way.
    """
    try:
        said = _DECODER.decode(content)
        tokens = array("I", said.tokens)
    except (msgspec.MsgspecError, ValueError):
        return None
    kind = _kind_of_names()
    named = [*said.names, *(() if said.parent is None else (said.parent,))]
    is_whole = len(tokens) == chunk_tokens == block_tokens * len(said.names)
    if not is_whole or len(said.extra_keys) != len(said.names):
        return None
    if bool(before) != (said.parent is not None) or any(type(name) is not kind for name in named):
        return None
    return AnnouncedBlocks(
        before=before,
        names=said.names,
        parent=said.parent,
        tokens=tokens,
        extra_keys=said.extra_keys,
        lora_id=said.lora_id,
        lora_name=said.lora_name,
    )


@cache
def _kind_of_names() -> type:
    """Return the type of the names of blocks that this engine publishes, bytes or int."""
    return type(maybe_convert_block_hash(BlockHash(bytes(HASH_BYTES))))
