"""vLLM's request, as far as the connector looks at it, and what a store needs before it."""

from types import SimpleNamespace
from typing import Any

from hybridkv.core.keys import HASH_BYTES


def request(name: str, tokens: int, names: bytes, preemptions: int = 0) -> Any:
    """A prompt of `tokens` tokens, none of them computed; `names` has the hashes of its blocks."""
    return SimpleNamespace(
        request_id=name,
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=preemptions,
        block_hashes=[names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)],
    )


def has_write_slots(side: Any) -> bool:
    """Whether a scheduler role has slots of every shape: a young daemon's first answer has none."""
    return all(pool.offsets for pool in side._stores.credits._pools.values())
