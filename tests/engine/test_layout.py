"""vLLM's own group specs become groups, or are refused by name."""

from typing import Any

import pytest

from hybridkv.core.errors import ConfigError, GeometryError
from hybridkv.core.geometry import GroupKind
from tests.engine.support import since_vllm

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def spec(name: str, **changes: Any) -> Any:
    """A spec of vLLM's by class name, with small sizes."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    attention = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    own: dict[str, dict[str, Any]] = {
        "SlidingWindowSpec": {"sliding_window": 64},
        "SlidingWindowMLASpec": {"sliding_window": 64},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
        "SinkFullAttentionSpec": {"sink_len": 4},
    }
    if name == "MambaSpec":
        values = {
            "block_size": 32,
            "shapes": ((4, 4),),
            "dtypes": (torch.float32,),
            "mamba_cache_mode": "align",
        }
        return interface.MambaSpec(**{**values, **changes})
    return getattr(interface, name)(**{**attention, **own.get(name, {}), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "kind", "window", "extra"),
    [
        ("FullAttentionSpec", {}, GroupKind.FULL, 0, 0),
        ("MLAAttentionSpec", {"num_kv_heads": 1}, GroupKind.FULL, 0, 0),
        ("SlidingWindowSpec", {}, GroupKind.SLIDING, 64, 0),
        ("SlidingWindowSpec", {"extra_retained_tokens": 3}, GroupKind.SLIDING, 64, 3),
        ("SlidingWindowMLASpec", {"num_kv_heads": 1}, GroupKind.SLIDING, 64, 0),
        ("ChunkedLocalAttentionSpec", {}, GroupKind.CHUNKED_LOCAL, 64, 0),
        ("MambaSpec", {}, GroupKind.RECURRENT, 0, 0),
    ],
)
def test_specs_become_groups(
    name: str, changes: dict[str, Any], kind: GroupKind, window: int, extra: int
) -> None:
    from hybridkv.vllm.layout import group_geometry

    layer_spec = spec(name, **changes)
    group = group_geometry(3, layer_spec, (128,))
    assert (group.gid, group.kind, group.window_tokens, group.extra_retained_tokens) == (
        3,
        kind,
        window,
        extra,
    )
    assert group.tokens_per_block == layer_spec.block_size


@pytest.mark.parametrize(
    "name", ["SinkFullAttentionSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec"]
)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    from hybridkv.vllm.layout import group_geometry

    with pytest.raises(
        GeometryError, match=rf"group 0 \({name}\) is of a kind that hybridkv does not restore yet"
    ):
        group_geometry(0, spec(name), (128,))


def test_a_subclass_is_not_taken_for_its_base() -> None:
    import dataclasses

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from hybridkv.vllm.layout import group_geometry

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NewSpec(FullAttentionSpec):
        pass

    base = spec("FullAttentionSpec")
    layer_spec = NewSpec(
        **{
            field.name: getattr(base, field.name)
            for field in dataclasses.fields(base)
            if field.init
        }
    )
    with pytest.raises(GeometryError, match="NewSpec"):
        group_geometry(0, layer_spec, (128,))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_mamba_modes_that_keep_no_boundary_state(mode: str) -> None:
    from hybridkv.vllm.layout import group_geometry

    with pytest.raises(
        ConfigError, match=f"mamba_cache_mode='{mode}'.*--mamba-cache-mode align works"
    ):
        group_geometry(0, spec("MambaSpec", mamba_cache_mode=mode), (128,))


def test_cache_dtypes_with_scales_of_their_own() -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    from hybridkv.vllm.layout import group_geometry

    layer_spec = spec("FullAttentionSpec", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    with pytest.raises(GeometryError, match=r"INT8_PER_TOKEN_HEAD.*--kv-cache-dtype auto works"):
        group_geometry(0, layer_spec, (128,))


def test_layers_of_one_group_may_differ_in_size_but_not_in_kind() -> None:
    """DeepSeek-V4's main and indexer layers share a group, and a worker has the spec of each."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from hybridkv.vllm.layout import group_geometry

    main, indexer = (
        spec("MLAAttentionSpec", num_kv_heads=1),
        spec("MLAAttentionSpec", num_kv_heads=1, head_size=4),
    )
    group = group_geometry(
        2, UniformTypeKVCacheSpecs(16, {"main": main, "indexer": indexer}), (128, 64)
    )
    assert (group.kind, group.tokens_per_block, group.layer_bytes) == (
        GroupKind.FULL,
        16,
        (128, 64),
    )
    mixed = UniformTypeKVCacheSpecs(
        16, {"main": main, "window": spec("SlidingWindowMLASpec", num_kv_heads=1)}
    )
    with pytest.raises(GeometryError, match="MLAAttentionSpec, SlidingWindowMLASpec"):
        group_geometry(2, mixed, (128, 64))


@since_vllm(31, "it has no groups of that kind")
def test_a_group_that_the_engine_rebuilds_after_every_hit() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from hybridkv.vllm.layout import build_geometry

    rebuilt = spec("SlidingWindowMLASpec", num_kv_heads=1, bounded_replay=True)
    groups = [
        KVCacheGroupSpec(["full"], spec("FullAttentionSpec")),
        KVCacheGroupSpec(["window"], rebuilt),
    ]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigError, match=r"swa_bounded_replay .*; --no-swa-bounded-replay works"):
        build_geometry(config, {}, None)
