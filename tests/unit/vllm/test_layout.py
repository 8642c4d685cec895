"""What is planned for each layout of memory that CUDA has, and what of it is in the identity."""

import dataclasses
from math import prod

import pytest
from vllm.config import LoRAConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybridkv.core.errors import GeometryError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.settings import Settings
from hybridkv.vllm.blocks import block_bytes
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.layout import LayerLayout, Parallelism, build_geometry, worker_layout
from tests.kv_memory import BLOCKS, CACHES, Cache, full, layers, state
from tests.simulation.configs import base_config

pytestmark = pytest.mark.engine


def laid_out(cache: Cache, blocks: int = BLOCKS) -> tuple[LayerLayout, ...]:
    """The layers of the first group."""
    memory = cache.memory(blocks=blocks)
    return worker_layout(memory.config, memory.views).layers[0]


@pytest.mark.parametrize("cache", CACHES)
def test_every_layout_is_planned(cache: str) -> None:
    memory = CACHES[cache].memory()
    layout = worker_layout(memory.config, memory.views)
    geometry = build_geometry(memory.config, {0: layout, 1: layout}, None)
    for group, views in zip(geometry.groups, memory.groups, strict=True):
        assert group.layer_bytes == tuple(map(block_bytes, views))
        spec = memory.config.kv_cache_groups[group.gid].kv_cache_spec
        assert group.tokens_per_block == spec.block_size
        assert not geometry.chunk_tokens % group.tokens_per_block
        names = memory.config.kv_cache_groups[group.gid].layer_names
        of_states = {name.startswith("state.") for name in names}
        assert of_states == {group.kind is GroupKind.RECURRENT}


@pytest.mark.parametrize("name", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"])
def test_the_number_of_blocks_is_no_part_of_the_identity(name: str) -> None:
    """It follows the memory that is free, and some strides follow it."""
    assert laid_out(CACHES[name]) == laid_out(CACHES[name], BLOCKS + 2)


def test_what_orders_the_bytes_of_a_block_is_a_part_of_the_identity() -> None:
    """Heads before tokens or after them; and in blocks of the kernel or in whole ones."""
    tokens_first, heads_first = laid_out(CACHES["LBNHC"]), laid_out(CACHES["LBHNC"])
    assert tokens_first == laid_out(CACHES["BLNHC"])
    assert heads_first == laid_out(CACHES["LHBNC"])
    assert tokens_first != heads_first
    whole = Cache("LBHNC", layers("full", full(2, 544, 16), 2))
    assert laid_out(CACHES["split LBHNC"]) != laid_out(whole)
    for layer in (*tokens_first, *heads_first, *laid_out(CACHES["split LBHNC"])):
        assert prod(layer.shape[dim] for dim in layer.order) == prod(layer.shape)


def test_a_single_head_has_one_order() -> None:
    one_head = layers("full", full(1, 16, 4), 3)
    assert laid_out(Cache("LBNHC", one_head)) == laid_out(Cache("LBHNC", one_head))


def test_how_a_state_is_arranged_is_a_part_of_the_identity() -> None:
    """It is registered as bytes; vLLM has a setting for the order of its dims."""
    config, settings = base_config(), Settings(weights_identity="any")

    def facts(*shape: int) -> dict[str, object]:
        spec = dataclasses.replace(state(128, 4096, 4096), shapes=(shape,))
        memory = Cache("LBNHC", layers("state", spec, 2)).memory()
        layouts = {0: worker_layout(memory.config, memory.views)}
        geometry = build_geometry(memory.config, layouts, None)
        return identity_facts(config, memory.config, geometry, layouts, settings)

    tokens_first, channels_first = facts(3, 1024), facts(1024, 3)
    assert tokens_first["layers"] == channels_first["layers"]
    assert tokens_first != channels_first
    assert facts(3, 1024) == tokens_first


def test_what_older_versions_stored_of_wrong_kernels_is_not_found() -> None:
    """vLLM's CPU kernels for LoRA and for LFM2's attention (`vllm.batch_faults`)."""
    memory = CACHES["LBNHC"].memory()
    layouts = {0: worker_layout(memory.config, memory.views)}
    geometry = build_geometry(memory.config, layouts, None)
    config, settings = base_config(), Settings(weights_identity="any")
    assert "kept_out" not in identity_facts(config, memory.config, geometry, layouts, settings)
    config.lora_config = LoRAConfig()
    facts = identity_facts(config, memory.config, geometry, layouts, settings)
    assert facts["kept_out"] == ["base rows beside adapters"]

    spec = dataclasses.replace(
        state(128, 4096, 4096), mamba_type=MambaAttentionBackendEnum.SHORT_CONV
    )
    config.lora_config, memory = None, Cache("LBNHC", layers("state", spec, 2)).memory()
    layouts = {0: worker_layout(memory.config, memory.views)}
    geometry = build_geometry(memory.config, layouts, None)
    facts = identity_facts(config, memory.config, geometry, layouts, settings)
    assert facts["kept_out"] == ["rotated heads"]


@pytest.mark.parametrize(
    ("came", "ranks", "says"),
    [
        ([], None, "ranks none of 0"),
        ([1], None, "ranks 1 of 1"),
        ([1], 2, "ranks 1 of 2"),
        ([0], 2, "ranks 0 of 2"),
        ([0, 2], None, "ranks 0, 2 of 2"),
    ],
)
def test_ranks_without_a_layout_are_named(came: list[int], ranks: int | None, says: str) -> None:
    """Not all ranks' layouts come where each rank has a scheduler of its own."""
    memory = CACHES["LBNHC"].memory()
    layouts = dict.fromkeys(came, worker_layout(memory.config, memory.views))
    with pytest.raises(GeometryError, match=rf'{says}; distributed_executor_backend="mp" works'):
        build_geometry(memory.config, layouts, None, Parallelism(ranks=ranks))
