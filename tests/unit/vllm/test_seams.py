"""The installed vLLM has what `hybridkv.vllm.seams` touches, and without it nothing breaks.

`scripts/test --vllm VERSION tests/unit/vllm/test_seams.py` asks another version.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.config import CompilationConfig, ParallelConfig, VllmConfig

from hybridkv.vllm import seams
from hybridkv.vllm.versions import minor_version
from hybridkv_cpu_shims import flat_heads
from tests.unit.vllm.small_adapters import Worker as WorkerWithAdapters
from tests.unit.vllm.small_adapters import adapter

pytestmark = pytest.mark.engine
read_since_032 = pytest.mark.skipif(
    minor_version() in ("0.30", "0.31"), reason="read in vLLM 0.32 and newer alone"
)


LAYERS = "vllm.model_executor.layers"


def of_vllm(path: str) -> Any:
    """Return a class of vLLM by its path. It is imported here, as an old version may lack it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def source(path: str) -> str:
    """Return the code of a module of vLLM, or of a class or a method in it."""
    module, _, member = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, member.split(".")):
        found = getattr(found, name)
    return inspect.getsource(found)


WORKER = "vllm.v1.worker.gpu_worker:Worker"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


class Runner:
    """A model runner, as far as a caller sees it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def initialize_kv_cache(self) -> seams.Callers:
        """As vLLM's registers KV caches."""
        return register_kv_caches()


class Worker:
    """A worker, as far as a caller sees it."""

    def __init__(self, runner: Runner) -> None:
        self.model_runner = runner

    def initialize(self) -> seams.Callers:
        return self.model_runner.initialize_kv_cache()


def register_kv_caches() -> seams.Callers:
    """As a connector is called, in which nothing is named `self`."""
    return seams.runner_and_worker_on_stack()


def test_a_runner_and_a_worker_are_found_among_the_callers() -> None:
    runner = Runner(torch.nn.Linear(2, 2))
    worker = Worker(runner)
    assert worker.initialize() == seams.Callers(runner, worker)
    assert runner.initialize_kv_cache() == seams.Callers(runner, None)
    assert Runner(None).initialize_kv_cache() == seams.Callers(None, None)


@read_since_032
def test_vllms_worker_has_its_runner_register_the_caches() -> None:
    """The V2 model runner does so while it makes an object that has the connector."""
    connector = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.__init__"
    assert "self.model_runner.initialize_kv_cache(" in source(WORKER)
    assert ".register_kv_caches(" in source(f"{V1_RUNNER}.initialize_kv_cache")
    assert "get_kv_connector(" in source(f"{V2_RUNNER}.initialize_kv_cache")
    assert ".register_kv_caches(" in source(connector)
    for runner in (V1_RUNNER, V2_RUNNER):
        assert "self.model = " in source(runner) or "self.model: " in source(runner)


def test_wrappers_of_cuda_graphs_are_taken_off() -> None:
    model = torch.nn.Linear(2, 2)
    wrapper = SimpleNamespace(unwrap=lambda: model)
    assert seams.unwrapped(SimpleNamespace(unwrap=lambda: wrapper)) is model
    assert seams.unwrapped(model) is model
    assert seams.unwrapped(None) is None
    assert seams.unwrapped(object()) is None
    endless = SimpleNamespace()
    endless.unwrap = lambda: endless
    assert seams.unwrapped(endless) is None


def test_vllms_wrappers_can_be_taken_off() -> None:
    assert callable(of_vllm("vllm.compilation.cuda_graph.CUDAGraphWrapper").unwrap)
    assert callable(of_vllm("vllm.v1.worker.gpu_ubatch_wrapper.UBatchWrapper").unwrap)


def test_a_model_runner_is_no_module() -> None:
    """Modules have attributes of this name too."""
    model = torch.nn.Sequential()
    vars(model)["model"] = torch.nn.Linear(2, 2)
    assert seams.runner_model(model) is None
    assert seams.runner_model(object()) is None


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_the_drafter_of_either_runner_is_found(name: str) -> None:
    model, drafting = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    runner: Any = Runner(model)
    assert seams.models_of(runner) == {"model": model}
    setattr(runner, name, SimpleNamespace(model=drafting))
    assert seams.models_of(runner) == {"model": model, "drafter": drafting}
    assert seams.models_of(None) == {}


@read_since_032
def test_vllms_runners_have_a_drafter_and_count_their_memory() -> None:
    assert "self.drafter" in source(V1_RUNNER)
    assert "self.speculator" in source(V2_RUNNER)
    for runner in (V1_RUNNER, V2_RUNNER):
        assert "self.model_memory_usage = " in source(runner)


def test_memory_that_is_not_counted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the V2 runner counts what all processes of the machine took meanwhile."""
    assert seams.occupied_bytes(SimpleNamespace(model_memory_usage=7)) == 0
    device = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(seams, "current_platform", device)
    assert seams.occupied_bytes(SimpleNamespace(model_memory_usage=7)) == 7
    assert seams.occupied_bytes(SimpleNamespace(model_memory_usage=None)) == 0
    assert seams.occupied_bytes(None) == 0


def test_methods_are_followed_on_the_object_alone() -> None:
    class Owner:
        def sleep(self) -> str:
            return "slept"

    calls: list[str] = []

    def follow(name: str, method: seams.Method) -> seams.Method:
        def call() -> Any:
            calls.append(name)
            return method()

        return call

    owner = Owner()
    seams.follow_methods((owner, None), ("sleep", "wake_up"), follow)
    assert owner.sleep() == "slept"
    assert calls == ["sleep"]
    assert Owner().sleep() == "slept"
    assert calls == ["sleep"]
    assert not hasattr(owner, "wake_up")


@read_since_032
def test_vllm_has_each_method_that_is_followed() -> None:
    """A method that is renamed would change the weights unseen, but for the sentinel."""
    model = "vllm.model_executor.models.llama:LlamaForCausalLM"
    base = "vllm.v1.worker.worker_base:WorkerBase"
    owners = (WORKER, base, V1_RUNNER, V2_RUNNER, model)
    names = {name for owner in owners for name in dir(of_vllm(owner.replace(":", ".")))}
    assert {*seams.CHANGING_METHODS} - names == set()


def test_the_methods_of_a_workers_extension_are_found() -> None:
    class Extended(Worker, Runner):
        pass

    name = f"{Runner.__module__}.{Runner.__qualname__}"
    worker: Any = Extended(Runner(None))
    assert [*seams.extension_methods(worker)] == []
    parallel = ParallelConfig(worker_extension_cls=name)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    assert [*seams.extension_methods(worker)] == ["initialize_kv_cache"]
    assert "__bases__" in source("vllm.v1.worker.worker_base"), "as vLLM puts it there"


@pytest.mark.parametrize(
    ("call", "released", "restored"),
    [
        (("sleep", (1,), {}), seams.MEMORY_TAGS, ()),
        (("sleep", (), {"level": 2}), seams.MEMORY_TAGS, ()),
        (("discard", (("kv_cache",),), {}), ("kv_cache",), ()),
        (("discard", ((),), {}), seams.MEMORY_TAGS, ()),
        (("wake_up", (), {}), (), seams.MEMORY_TAGS),
        (("wake_up", (), {"tags": None}), (), seams.MEMORY_TAGS),
        (("wake_up", (), {"tags": ["weights"]}), (), ["weights"]),
        (("wake_up", (["weights"],), {}), (), ["weights"]),
        (("update_weights", ("weights",), {}), (), ()),
    ],
)
def test_the_memory_that_a_call_takes_and_gives_back(
    call: tuple[str, tuple[Any, ...], dict[str, Any]], released: Any, restored: Any
) -> None:
    name, args, kwargs = call
    assert seams.released_memory(name, args, kwargs) == released
    assert seams.restored_memory(name, args, kwargs) == restored


@read_since_032
def test_vllms_worker_names_its_memory_by_tags() -> None:
    worker = of_vllm("vllm.v1.worker.gpu_worker.Worker")
    for method in (worker.wake_up, worker.discard):
        assert [*inspect.signature(method).parameters][1] == "tags"


def test_what_a_function_keeps_is_found() -> None:
    weight = torch.ones(2)

    def kept() -> Any:
        return weight, later

    assert [cell.cell_contents is weight for cell in seams.closure_cells(kept)] == [True]
    later = torch.zeros(2)
    assert {id(cell.cell_contents) for cell in seams.closure_cells(kept)} == {id(weight), id(later)}
    assert seams.closure_cells(torch.nn.functional.linear) == []
    assert seams.closure_cells(object()) == []


def test_vllms_kernels_keep_a_weight_in_a_function() -> None:
    assert "layer.cpu_linear = lambda" in source(f"{LAYERS}.utils")


def test_vllms_object_for_a_packed_matrix_is_known() -> None:
    handler = object.__new__(_custom_ops.CPUDNNLGEMMHandler)
    handler.handler_tensor = None
    assert seams.is_packed_matrix(handler)
    assert not seams.is_packed_matrix(torch.ones(2))
    assert {"k", "n"} <= {*_custom_ops.CPUDNNLGEMMHandler.__init__.__code__.co_names}


def test_without_vllms_class_no_matrix_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = object.__new__(_custom_ops.CPUDNNLGEMMHandler)
    handler.handler_tensor = None
    monkeypatch.delattr(_custom_ops, "CPUDNNLGEMMHandler")
    assert not seams.is_packed_matrix(handler)


def test_vllms_int8_kernel_keeps_its_matrix_and_its_configuration() -> None:
    holder = SimpleNamespace(config="config")
    assert seams.int8_kernel_config(holder, "dnnl_handler") == "config"
    assert seams.int8_kernel_config(holder, "handler") is None
    assert seams.int8_kernel_config(SimpleNamespace(), "dnnl_handler") is None
    kernels = source("vllm.model_executor.kernels.linear.scaled_mm.cpu")
    assert "self.dnnl_handler = " in kernels
    assert "self.config" in kernels


def test_vllms_product_of_integers_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    signature, calls = inspect.signature(_custom_ops.onednn_scaled_mm), []

    def multiply(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(signature.bind(*args, **kwargs).arguments)
        return torch.ones(1)

    monkeypatch.setattr(_custom_ops, "onednn_scaled_mm", multiply)
    inputs, products, scales = torch.ones(1), torch.ones(2), torch.ones(3)
    seams.multiply_int8("matrix", inputs, products, scales, None)
    (arguments,) = calls
    assert [*arguments.values()] == ["matrix", inputs, products, scales, None, None, None]


def test_the_kernel_of_an_attention_layer_is_found() -> None:
    layer = torch.nn.Module()
    assert seams.attention_kernel(layer) is None
    layer.impl = "kernel"
    assert seams.attention_kernel(layer) == "kernel"
    assert "self.impl" in source(f"{LAYERS}.attention.mla_attention:MLAAttention")


def test_the_parts_of_a_shared_parameter_are_found() -> None:
    assert seams.shared_partitions(torch.ones(2)) is None
    parameter: Any = torch.ones(2)
    parameter.partitions = {0: torch.ones(1)}
    assert seams.shared_partitions(parameter) == {0: torch.ones(1)}
    assert "self.partitions" in source("vllm.model_executor.parameter:SharedWeightParameter")


def test_the_method_inside_vllms_wrapper_for_adapters_is_found() -> None:
    module = torch.nn.Module()
    assert seams.quantization_method(module) is None
    vars(module)["quant_method"] = "method"
    assert seams.quantization_method(module) == "method"
    vars(module)["quant_method"] = SimpleNamespace(old_quant_method="inner method")
    assert seams.quantization_method(module) == "inner method"
    wrapper = f"{LAYERS}.fused_moe.fused_moe_modular_method:FusedMoEModularMethod"
    assert "self.old_quant_method = " in source(wrapper)


@pytest.mark.parametrize(
    ("method", "is_quantizing"),
    [
        ("linear.UnquantizedLinearMethod", False),
        ("vocab_parallel_embedding.UnquantizedEmbeddingMethod", False),
        ("fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod", False),
        ("quantization.kv_cache.BaseKVCacheMethod", False),
        ("quantization.fp8.Fp8LinearMethod", True),
    ],
)
def test_vllms_methods_that_quantize_are_known(method: str, is_quantizing: bool) -> None:
    assert seams.is_quantizing(object.__new__(of_vllm(f"{LAYERS}.{method}"))) is is_quantizing
    assert not seams.is_quantizing(None)


def test_vllms_wrappers_for_adapters_are_known() -> None:
    module = torch.nn.Module()
    assert not seams.is_lora_wrapper(module)
    module.base_layer = torch.nn.Linear(2, 2)
    assert seams.is_lora_wrapper(module)
    assert "self.base_layer = base_layer" in source("vllm.lora.layers.base_linear")


def test_the_adapters_of_vllms_manager_are_found() -> None:
    worker = WorkerWithAdapters()
    assert seams.loaded_loras(worker.runner) == {}
    model = adapter(3)
    worker.add(model)
    assert seams.loaded_loras(worker.runner) == {3: model}
    assert seams.loaded_loras(None) == {}
    assert "self._adapter_manager" in source("vllm.lora.worker_manager:WorkerLoRAManager")
    assert "self.lora_manager" in source("vllm.v1.worker.lora_model_runner_mixin")


@pytest.mark.parametrize(
    ("make_module", "is_wrong"),
    [
        (lambda own, ours: None, True),
        (lambda own, ours: SimpleNamespace(), True),
        (lambda own, ours: SimpleNamespace(_spec_forward=own), True),
        (lambda own, ours: SimpleNamespace(_spec_forward=ours), False),
    ],
    ids=["not imported", "without the kernel", "vLLM's kernel", "another kernel"],
)
def test_drafted_states_are_wrong_unless_the_kernel_was_replaced(
    make_module: Callable[[Any, Any], Any], is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own() -> None:
        pass

    def ours() -> None:
        pass

    own.__module__ = seams.DRAFTED_STATES_MODULE
    monkeypatch.setitem(sys.modules, seams.DRAFTED_STATES_MODULE, make_module(own, ours))
    assert seams.has_wrong_drafted_states() is is_wrong


@read_since_032
def test_vllms_kernel_for_drafted_states_is_where_it_is_looked_for() -> None:
    module = importlib.import_module(seams.DRAFTED_STATES_MODULE)
    assert module._spec_forward.__module__ == seams.DRAFTED_STATES_MODULE
    assert seams.has_wrong_drafted_states()


def test_a_request_is_asked_for_a_state_where_the_scheduler_reads_the_wish() -> None:
    """vLLM sets the boundary of its own cache before it asks connectors, and never after."""
    schedule = source("vllm.v1.core.sched.scheduler:Scheduler.schedule")
    split = source("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split")
    kept = source("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks")
    set_at, asked_at = map(
        schedule.index, ("request.shared_prefix_boundary,", "get_num_new_matched_tokens(")
    )
    assert set_at < asked_at
    assert "request.shared_prefix_boundary" in split
    assert "request.shared_prefix_boundary" in kept
    assert seams.can_keep_states()
    request = SimpleNamespace(shared_prefix_boundary=256)
    assert seams.state_wish(request) == 256
    seams.keep_state_at(request, 512)
    assert request.shared_prefix_boundary == 512
    without = SimpleNamespace()
    assert seams.state_wish(without) == 0
    seams.keep_state_at(without, 512)
    assert not vars(without)


def test_the_lora_kernel_is_asked_whether_it_adapts_requests_without_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU kernel of vLLM 0.30 to 0.32 does. A kernel that skips these rows does not."""
    assert seams.adapts_base_rows()
    punica = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
    expand = punica.sgmv_expand_slice

    def skip_base_rows(inputs: torch.Tensor, *others: Any) -> None:
        lengths, indices = others[3], others[4]
        inputs[torch.repeat_interleave(indices, lengths) < 0] = 0
        expand(inputs, *others)

    monkeypatch.setattr(punica, "sgmv_expand_slice", skip_base_rows)
    assert not seams.adapts_base_rows()
    monkeypatch.setattr(punica, "sgmv_expand_slice", lambda *_: None)
    assert seams.adapts_base_rows(), "it was not asked: nothing was adapted"
    monkeypatch.delattr(punica, "PunicaWrapperCPU")
    assert seams.adapts_base_rows()


def test_the_rotary_embedding_is_asked_whether_it_mixes_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU kernel does. The shim of bundled models, and vLLM's own fallback, do not."""
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    assert seams.mixes_heads(config)
    fallback = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    assert not seams.mixes_heads(fallback)
    monkeypatch.setattr(_custom_ops, "rotary_embedding", _custom_ops.rotary_embedding)
    flat_heads()
    assert not seams.mixes_heads(config)
    monkeypatch.setattr(_custom_ops, "rotary_embedding", None)
    assert seams.mixes_heads(config)
