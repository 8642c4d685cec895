"""Shards of KV heads, so that engines of other tensor parallel sizes share (`Settings.share_tp`).

With `share_tp` an object has a part for each shard, whatever the number of ranks is. A rank writes
and reads the shards of its own heads, which follow each other. With four shards of eight heads::

    heads                     |0 1|2 3|4 5|6 7|
    shards                    | 0 | 1 | 2 | 3 |
    tensor parallel size 1    |    rank 0     |
    tensor parallel size 2    |rank 0 |rank 1 |
    tensor parallel size 4    | 0 | 1 | 2 | 3 |

The part of a shard has the bytes that the rank would store which had only these heads. Groups whose
ranks keep the same bytes (MLA) are not split. docs/decisions/0019 has the reasons.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs

from hybridkv.core.errors import GeometryError
from hybridkv.core.findings import Finding, Verdict, fail, judge, ok
from hybridkv.core.settings import Settings
from hybridkv.vllm.layout import is_replicated, node_count, refuse_scattered
from hybridkv.vllm.proven import SHARED_SIZES
from hybridkv.vllm.versions import minor_version

HEADS_DIM = -3  # Of a layer's view: [block, head, token, content], or with a dim after `block`.
CHECK = "share_tp"
OFF = "leaving share_tp out works"


def shard_views(
    config: KVCacheConfig, views: Mapping[str, torch.Tensor], shards: int
) -> list[dict[str, torch.Tensor]]:
    """Return the views of each of a rank's `shards`, in the order of their heads.

    `views` are `layout.block_views`. Replicated groups are whole in each. Raises GeometryError
    where a layer has no heads that could be split.
    """
    own_views = [dict(views) for _ in range(shards)]
    if shards == 1:
        return own_views
    for gid in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[gid]
        if is_replicated(group.kv_cache_spec):
            continue
        for name in group.layer_names:
            view, spec = views[name], _layer_spec(group.kv_cache_spec, name)
            why = _unsplit_reason(spec, shards)
            heads = view.shape[HEADS_DIM] if view.dim() > abs(HEADS_DIM) else 0
            if not why and heads != spec.num_heads:
                why = f"its shape {tuple(view.shape)} has not {spec.num_heads} heads before tokens"
            if why:
                what = f"layer {name} cannot be split into {shards} shards of heads"
                raise GeometryError(f"{what}: {why}", OFF)
            for shard, own in enumerate(own_views):
                size = heads // shards
                own[name] = view.narrow(HEADS_DIM, shard * size, size)
                refuse_scattered(name, own[name])
    return own_views


def sharing_findings(vllm_config: Any, settings: Settings) -> Iterator[Finding]:
    """Yield why `share_tp` is refused whatever the groups are, or one OK. Nothing where it is off.

    The first reason is the one to mend first.
    """
    shards, parallel = settings.share_tp, vllm_config.parallel_config
    if shards is None:
        return
    ranks = parallel.tensor_parallel_size
    works = ranks * max(1, round(shards / ranks))
    per_rank, device = shards // ranks, current_platform.device_type
    stages, nodes = parallel.pipeline_parallel_size, node_count(parallel, settings)
    if shards % ranks:
        what = f"share_tp={shards} is no multiple of tensor_parallel_size {ranks}"
        yield fail(CHECK, what, f'"share_tp": {works} works')
    elif minor_version() not in SHARED_SIZES:
        yield fail(CHECK, f"share_tp is not supported yet on vllm {vllm.__version__}", OFF)
    elif stages > 1 or nodes > 1:
        what = f"share_tp is not supported yet with {stages} pipeline stages on {nodes} nodes"
        yield fail(CHECK, what, OFF)
    elif vllm_config.speculative_config is not None:
        yield fail(CHECK, "share_tp is not proven with speculation", OFF)
    elif per_rank > 1 and device != "cpu":
        what = f"share_tp={shards} was never tried with {per_rank} shards on each rank of {device}"
        yield fail(CHECK, what, f'"share_tp": {ranks} works')
    else:
        yield ok(CHECK, f"{shards} shards of KV heads, {per_rank} on each of {ranks} ranks")


def shard_findings(kv_cache_config: Any, vllm_config: Any, settings: Settings) -> Iterator[Finding]:
    """Yield, with `share_tp`, whether each cacheable group of a KVCacheConfig can be split."""
    shards, ranks = settings.share_tp, vllm_config.parallel_config.tensor_parallel_size
    if shards is None or shards % ranks:
        return
    for gid in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[gid].kv_cache_spec
        if is_replicated(spec):
            yield ok(f"shards of group {gid}", "one, which all ranks share")
            continue
        layers = list(iter_layer_specs(spec))
        reasons = [_unsplit_reason(layer, shards // ranks) for layer in layers]
        reasons += [_replication(layer, vllm_config) for layer in layers]
        why = next(filter(None, reasons), "")
        what = f"share_tp={shards}: group {gid} cannot be split by heads, because {why}"
        yield judge(f"shards of group {gid}", not why, f"{shards}", what, OFF)


def rank_shards(kv_cache_config: Any, vllm_config: Any, settings: Settings) -> int:
    """Return the number of shards of each rank. It is 1 where `share_tp` is off, or refused."""
    findings = shard_findings(kv_cache_config, vllm_config, settings)
    shards, ranks = settings.share_tp, vllm_config.parallel_config.tensor_parallel_size
    if shards is None or any(finding.verdict is Verdict.FAIL for finding in findings):
        return 1
    return max(1, shards // int(ranks))


def _unsplit_reason(spec: Any, shards: int) -> str:
    """Return why the heads that one rank has of a layer are no `shards` shards. Empty = they are.

    A recurrent state has dims of several kinds, and each backend splits them by rules of its own.
    """
    if isinstance(spec, kv.MambaSpec):
        return "each backend splits a recurrent state among ranks by rules of its own"
    if not isinstance(spec, kv.AttentionSpec):
        return f"{type(spec).__name__} has no heads"
    if spec.num_heads != spec.num_kv_heads or spec.state_content_bytes is not None:
        return "its heads are packed together"
    if spec.num_kv_heads % shards:
        return f"each rank has {spec.num_kv_heads} KV heads for {shards} shards"
    return ""


def _replication(spec: Any, vllm_config: Any) -> str:
    """Return why a rank's heads are not its own. Empty = they are.

    Where there are fewer KV heads than ranks, vLLM gives several ranks the same head.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if getattr(spec, "num_kv_heads", 0) == 1 and heads < ranks:
        return f"{ranks} ranks have copies of {heads} KV heads"
    return ""


def _layer_spec(spec: Any, name: str) -> Any:
    """Return the spec of one layer of a group."""
    return spec.kv_cache_specs[name] if isinstance(spec, kv.UniformTypeKVCacheSpecs) else spec
