"""Names that differ between the versions of vLLM that are served."""

from collections.abc import Callable
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:

    class CacheHitSource(StrEnum):
        """vLLM's names of the places that external hits come from."""

        HOST = "host"
        DISK = "disk"
        P2P = "p2p"
        EXTERNAL_UNSPECIFIED = "external_unspecified"

else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        # vLLM 0.31 and older never ask for it.
        CacheHitSource = StrEnum("CacheHitSource", ["HOST", "DISK", "P2P", "EXTERNAL_UNSPECIFIED"])


def minor_version() -> str:
    """Return the minor version of vLLM: 0.32.1 -> "0.32"."""
    return ".".join(vllm.__version__.split(".")[:2])


def to_event_extra_keys(keys: list[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None] | None:
    """Return a KV event's form of what a block's hash covers beside its tokens."""
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untagged(keys) if untagged else keys or None


def argument_parser() -> Callable[..., Any]:
    """Return vLLM's function that adds the arguments of `vllm serve` to a parser."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    except ImportError:
        # vLLM 0.33.
        from vllm.entrypoints.common.cli_args import make_arg_parser  # noqa: PLC0415
    add_arguments: Callable[..., Any] = make_arg_parser
    return add_arguments


def planning() -> ModuleType:
    """Return vLLM's module that groups the layers of each worker and places them in memory."""
    try:
        from vllm.v1.core import kv_cache_planning  # noqa: PLC0415
    except ImportError:
        # vLLM 0.32 and older.
        return kv_cache_utils  # type: ignore[no-any-return]
    return kv_cache_planning  # type: ignore[no-any-return]


def resolve_hits(config: KVCacheConfig, vllm_config: Any) -> None:
    """Set `hash_block_size` and `cache_hit_alignment_tokens` where the engine has not.

    vLLM 0.32 and newer set them before workers are asked for their layouts.
    """
    if getattr(config, "hash_block_size", None):
        return
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(config, vllm_config)
    resolve = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    config.hash_block_size = hash_tokens
    if resolve is not None:
        alignment_tokens = resolve(config, vllm_config, scheduler_tokens, hash_tokens)
    else:
        is_fine = vllm_config.cache_config.enable_prefix_caching and _are_hits_fine(config)
        alignment_tokens = hash_tokens if is_fine else scheduler_tokens
    config.cache_hit_alignment_tokens = alignment_tokens


def _are_hits_fine(config: KVCacheConfig) -> bool:
    """Return True if vLLM 0.31 and older take hits that end inside a recurrent block."""
    groups, hashing = config.kv_cache_groups, config.hash_block_size
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if not any(spec.mamba_cache_mode == "align" and spec.block_size > hashing for spec in states):
        return False
    for group in groups:
        spec = group.kv_cache_spec
        if spec.prefix_cacheable and spec.block_size != hashing:
            manager = KVCacheSpecRegistry.get_manager_class(spec, group.role)
            if not getattr(manager, "supports_fine_grained_hash_lookup", False):
                return False
    return len(groups) > 1
