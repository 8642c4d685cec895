"""Where the weights are while vLLM offloads them, and what of its source that stands on.

`scripts/test --vllm VERSION tests/unit/vllm/test_offloaders.py` asks another version.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import offload
from vllm.model_executor import offloader
from vllm.model_executor.layers.fused_moe import config
from vllm.model_executor.offloader import prefetch

from hybridkv.vllm.weights import EngineWeights
from hybridkv.vllm.weights_digest import WeightsDigest, digest_weights
from hybridkv.vllm.weights_sentinel import WeightsSentinel

pytestmark = pytest.mark.engine
LAYERS = 8


@pytest.fixture(autouse=True)
def no_offloader() -> Iterator[None]:
    """The offloader is one of the process."""
    yield
    offloader.set_offloader(offloader.NoopOffloader())


def layers(seed: int) -> torch.nn.Sequential:
    """Layers of which the first one is the same for each seed, and one is tied to it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))
    torch.manual_seed(seed)
    for layer in model[1:]:
        layer.weight.data = torch.rand(16, 16)
    return model


def prefetched(model: torch.nn.Sequential, group: int, in_group: int, step: int) -> list[Any]:
    """Offload as `PrefetchOffloader` does with these numbers, but for the copies of a GPU.

    Returns its objects for the layers.
    """
    whole: Any = offloader.PrefetchOffloader.__new__(offloader.PrefetchOffloader)
    whole.module_offloaders = []
    inside = vars(prefetch)
    create = inside["_BaseParamOffloader"].create
    for number, layer in enumerate(model):
        if number % group >= group - in_group:
            kept = inside["_ModuleOffloader"].__new__(inside["_ModuleOffloader"])
            names = [name for name, _ in layer.named_parameters()]
            parameters = {name: create("cpu", module=layer, param_name=name) for name in names}
            vars(kept).update(module=layer, _param_offloaders=parameters)
            whole.module_offloaders.append(kept)
    infos = [info for kept in whole.module_offloaders for info in kept.get_param_infos()]
    pool = prefetch.StaticBufferPool(infos, step, torch.device("cpu"))
    for number, kept in enumerate(whole.module_offloaders):
        kept.sync_cpu_storage()
        kept.assign_buffer_slot(pool, number % step)
    offloader.set_offloader(whole)
    return list(whole.module_offloaders)


def found(model: torch.nn.Module) -> WeightsDigest:
    return digest_weights({"model": model})


@pytest.mark.parametrize(
    ("group", "in_group", "step"), [(8, 7, 1), (2, 1, 1), (4, 2, 3), (1, 1, 2)]
)
def test_prefetched_weights_are_read_where_they_are(group: int, in_group: int, step: int) -> None:
    """Issue 50: the parameters are buffers, which have the same layer in two models."""
    plain = found(layers(1))
    read = []
    for seed in (1, 1, 2):
        model = layers(seed)
        prefetched(model, group, in_group, step)
        read.append(found(model))
    assert [each.unread for each in read] == [(), (), ()]
    assert read[0].digest == read[1].digest == plain.digest, "on one kind of device"
    assert read[0].digest != read[2].digest


def test_the_sentinel_sees_what_is_prefetched() -> None:
    model, sentinel = layers(1), WeightsSentinel()
    *_, last = prefetched(model, 1, 1, 1)
    before = sentinel.look({"model": model}).words_digest()
    model[0].weight.data.fill_(3.0)
    assert sentinel.look({"model": model}).words_digest() == before, "a buffer is no weight"
    kept = vars(vars(last)["_param_offloaders"]["weight"])
    kept["_cpu_storage"].neg_()
    changed = sentinel.look({"model": model}).words_digest()
    assert changed != before
    kept["_cpu_storage"] = kept["_cpu_storage"].neg()
    assert sentinel.look({"model": model}).words_digest() != changed


class Runner:
    """A model runner with a method that writes into parameters, as vLLM's do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def reload_weights(self) -> None:
        """Write nothing."""


def test_after_an_update_nobody_knows_what_the_next_step_computes_with() -> None:
    """It has written into the buffers, and vLLM goes on with what is on the host."""
    model = layers(1)
    prefetched(model, 2, 1, 1)
    runner = Runner(model)
    weights = EngineWeights(runner)
    first = weights.read()
    assert not first.unread
    runner.reload_weights()
    second, again = weights.read(), weights.read()
    assert [module.kind for module in second.unread] == ["PrefetchOffloader"]
    assert second.digest == again.digest != first.digest


def test_an_offloader_that_is_not_known_hides_all_weights() -> None:
    class Other(offloader.NoopOffloader):
        """Of a plugin."""

    offloader.set_offloader(Other())
    model = layers(1)
    assert len(found(model).unread) == 1 + LAYERS
    assert found(model).digest != found(model).digest
    offloader.set_offloader(offloader.UVAOffloader(1 << 30))
    assert not found(model).unread


def classes_of(package: str, base: str) -> set[str]:
    """The names of the classes in vLLM's files below `package` that derive from `base`."""
    assert vllm.__file__ is not None
    trees = (
        ast.parse(path.read_text()) for path in (Path(vllm.__file__).parent / package).rglob("*.py")
    )
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and base in map(ast.unparse, node.bases)
    }


def test_vllm_has_the_offloaders_that_are_known() -> None:
    """A new class is unread before anybody looks; a new setting must be looked at."""
    known = {"NoopOffloader", "UVAOffloader", "PrefetchOffloader"}
    for package in ("model_executor/offloader", "v1/worker", "platforms"):
        assert classes_of(package, "BaseOffloader") <= known
    assert classes_of("model_executor/offloader", "BaseOffloader") == known
    assert classes_of("model_executor/offloader", "_BaseParamOffloader") == {"_CpuParamOffloader"}
    fields = {
        name: {field.name for field in dataclasses.fields(getattr(offload, name))}
        for name in ("OffloadConfig", "UVAOffloadConfig", "PrefetchOffloadConfig")
    }
    assert fields == {
        "OffloadConfig": {"offload_backend", "uva", "prefetch"},
        "UVAOffloadConfig": {"cpu_offload_gb", "cpu_offload_params"},
        "PrefetchOffloadConfig": {
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        },
    }, "`unrelated` says that none of them changes KV"


def test_experts_say_over_how_many_replicas_they_are_split() -> None:
    """Or nobody would know that other engines have a part of them."""
    fields = {
        cls.__name__: {field.name for field in dataclasses.fields(cls)}
        for cls in (config.FusedMoEParallelConfig, config.FusedMoEConfig)
    }
    assert "dp_size" in fields["FusedMoEParallelConfig"]
    assert "moe_parallel_config" in fields["FusedMoEConfig"]
