"""Every byte, name, shape, dtype and place of the weights in memory counts, and nothing else."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from vllm import _custom_ops

from hybridkv.vllm import module_tensors, weights_digest
from hybridkv.vllm.module_tensors import Place, ReachedTensor, module_contents
from hybridkv.vllm.weight_sizes import weight_sizes
from hybridkv.vllm.weights_digest import (
    WORKSPACE_BYTES,
    PackedWeights,
    UnreadModule,
    device_content,
    digest_weights,
)
from tests.unit.vllm.small_models import Model, digest, flip

pytestmark = pytest.mark.engine


def swap(model: Model) -> None:
    model.first, model.second = model.second, model.first


def rename(model: Model) -> None:
    model.third = model.second
    del model.second


def reorder(model: Model) -> None:
    first = model.first
    del model.first
    model.first = first


def swap_rows(model: Model) -> None:
    weight = model.second.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def reshape(model: Model) -> None:
    model.first.weight = torch.nn.Parameter(model.first.weight.data.view(24, 16))


CHANGES: dict[str, Callable[[Model], object]] = {
    "lowest bit of a weight": lambda model: flip(model.first.weight),
    "lowest bit of the last weight": lambda model: flip(model.second.bias, 63),
    "a buffer": lambda model: flip(model.second.scale),
    "a layer's name": rename,
    "the layers' places": swap,
    "the layers' order": reorder,
    "two rows": swap_rows,
    "a shape": reshape,
    "a dtype": lambda model: model.second.to(torch.float64),
    "nothing but a smaller dtype": lambda model: model.to(torch.bfloat16),
    "one more buffer": lambda model: model.register_buffer("extra", torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_another_digest(change: Callable[[Model], object]) -> None:
    model = Model()
    before = digest(model)
    assert digest(Model()) == before, "the same weights"
    change(model)
    assert digest(model) != before


def test_a_drafter_counts_and_models_have_their_places() -> None:
    model, drafter = Model(1), Model(2)
    found = [
        digest_weights({"model": model}),
        digest_weights({"model": model, "drafter": drafter}),
        digest_weights({"model": drafter, "drafter": model}),
    ]
    assert len({each.digest for each in found}) == 3
    assert found[1].size_bytes == 2 * found[0].size_bytes


def test_views_are_read_without_a_copy_of_their_meaning() -> None:
    """A transposed weight is read as it lies in memory; its strides are a part of the digest."""
    plain, turned = Model(), Model()
    turned.first.weight = torch.nn.Parameter(turned.first.weight.data.t().contiguous().t())
    assert torch.equal(plain.first.weight, turned.first.weight)
    assert digest(plain) != digest(turned), "other kernels read it"
    flip(turned.first.weight.data.t())
    assert digest(turned) != digest(plain)


def test_a_device_reads_every_byte_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of devices, here on the CPU, across the borders of its pieces."""
    monkeypatch.setattr(weights_digest, "WORDS_MAX", 4)
    source = random.Random(7)
    for length in (0, 1, 7, 8, 9, 31, 32, 33, 40, 100):
        run = torch.tensor([source.randrange(256) for _ in range(length)], dtype=torch.uint8)
        words = {tuple(device_content(run).tolist())}
        for at in range(length):
            flip(run, at, at % 8)
            words.add(tuple(device_content(run).tolist()))
            flip(run, at, at % 8)
        assert len(words) == 1 + length, f"of {length} bytes one does not count"
        assert tuple(device_content(run).tolist()) in words
    run = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([run[8:16], run[:8], run[16:]])
    assert not torch.equal(device_content(run), device_content(swapped))
    monkeypatch.setattr(weights_digest, "WORDS_MAX", 1 << 22)
    assert torch.equal(device_content(run), torch.tensor(device_content(run.clone()).tolist())), (
        "however it is cut"
    )


def packed(model: Model) -> None:
    """As vLLM's CPU kernels leave a layer: the weight is emptied, a function has it."""
    weight = model.first.weight.data.clone()
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model.first.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)


def test_a_packed_weight_is_read_where_it_went() -> None:
    first, same, changed = Model(), Model(), Model()
    flip(changed.first.weight)
    for model in (first, same, changed):
        packed(model)
    assert digest(first) == digest(same)
    assert digest(first) != digest(changed)


def emptied(model: Model) -> Model:
    """The model without its first weight, which nobody has."""
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    return model


def test_a_weight_that_nobody_can_read_is_no_other_engines() -> None:
    model, first, second = emptied(Model()), PackedWeights(), PackedWeights()
    found = [digest_weights({"model": model}, packed) for packed in (first, first, second)]
    assert {each.unread for each in found} == {(UnreadModule("model.first", "Linear"),)}
    assert found[0].digest == found[1].digest, "what was unread before a reset is the same after it"
    assert found[0].digest != found[2].digest, "no other engine's"
    first.renew()
    assert digest_weights({"model": model}, first).digest != found[0].digest, "it may be another"


class Fp4Method:
    """A quantization method of vLLM that says how many bits a weight has."""

    weight_dtype = "mxfp4"


class QuantizedLinear(torch.nn.Module):
    """A quantized layer as vLLM's kernels leave it: the weight is no parameter of it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size_per_partition, self.output_size_per_partition = 64, 32
        self.quant_method = Fp4Method()
        self.weight_scale = torch.nn.Parameter(torch.ones(32, 2))


def fp4_weight(seed: int = 0) -> torch.Tensor:
    """As many bytes as the layer above needs."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(256, (32, 32), generator=source, dtype=torch.uint8)


@dataclass
class Storage:
    """The object of triton_kernels that keeps a tensor."""

    data: torch.Tensor


class Slotted:
    """An object with slots, and without a dictionary."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def get(self) -> torch.Tensor:
        return self.weight


def set_weight(layer: Any, holder: object) -> None:
    layer.weight = holder


HOLDERS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "an attribute": set_weight,
    "triton_kernels": lambda layer, weight: set_weight(
        layer, SimpleNamespace(storage=Storage(weight))
    ),
    "the method": lambda layer, weight: set_weight(layer.quant_method, weight),
    "a list": lambda layer, weight: set_weight(layer, [0, weight]),
    "a dictionary": lambda layer, weight: set_weight(layer, {"packed": {"weight": weight}}),
    "slots": lambda layer, weight: set_weight(layer, Slotted(weight)),
    "a bound method": lambda layer, weight: set_weight(layer, Slotted(weight).get),
    "partial arguments": lambda layer, weight: set_weight(layer, partial(torch.add, weight)),
    "a function's scope": lambda layer, weight: set_weight(layer, [lambda: weight]),
    "a function's defaults": lambda layer, weight: set_weight(layer, lambda kept=weight: kept),
}


def reached_tensors(layer: torch.nn.Module) -> list[ReachedTensor]:
    contents = module_contents({"model": layer}, lambda _: False)
    return [reached for content in contents for reached in content.tensors]


def is_kept(reached: ReachedTensor) -> bool:
    return all(map(Place.is_kept, reached.places))


@pytest.mark.parametrize("keep", HOLDERS.values(), ids=HOLDERS)
def test_a_weight_is_found_where_a_kernel_keeps_it(keep: Callable[[Any, Any], None]) -> None:
    layers = [QuantizedLinear() for _ in range(3)]
    for layer, seed in zip(layers, (0, 0, 1), strict=True):
        keep(layer, fp4_weight(seed))
    first, same, changed = map(digest, layers)
    assert first == same
    assert first != changed
    reached = reached_tensors(layers[0])
    assert [tensor.tensor.numel() for tensor in reached] == [64, 1024]
    assert all(is_kept(tensor) for tensor in reached)


class ModularMethod(torch.nn.Module):
    """What vLLM puts around a method for adapters: a module, unlike the methods themselves."""

    def __init__(self, old_quant_method: Fp4Method) -> None:
        super().__init__()
        self.old_quant_method = old_quant_method


def test_a_method_for_adapters_hides_nothing() -> None:
    layers = [QuantizedLinear() for _ in range(2)]
    for seed, layer in enumerate(layers):
        set_weight(layer.quant_method, fp4_weight(seed))
        layer.quant_method = ModularMethod(layer.quant_method)
    assert digest(layers[0]) != digest(layers[1])


def test_a_tensor_that_is_replaced_is_not_kept() -> None:
    for keep, replaced in (
        (HOLDERS["an attribute"], lambda layer: set_weight(layer, fp4_weight())),
        (HOLDERS["triton_kernels"], lambda layer: set_weight(layer, None)),
        (HOLDERS["a list"], lambda layer: layer.weight.pop()),
        (HOLDERS["slots"], lambda layer: delattr(layer.weight, "weight")),
    ):
        layer = QuantizedLinear()
        keep(layer, fp4_weight())
        reached = reached_tensors(layer)
        replaced(layer)
        assert [is_kept(tensor) for tensor in reached] == [True, False]


def test_what_changes_in_every_step_is_no_weight() -> None:
    """A kernel's workspaces lie beside the weights that it keeps; one of them known by its tensor,
    the others by their names."""
    layer = QuantizedLinear()
    cache, counters = torch.zeros(64), torch.zeros(32)
    set_weight(layer, {"weight": fp4_weight(), "workspace": counters, "other": cache})
    layer.kv_cache = [counters]
    layer.routing_sink = SimpleNamespace(ids=counters)
    layer._lora_context = {"a": counters}
    found = []
    for _ in range(2):
        found.append(digest_weights({"model": layer}, is_left_out=lambda kept: kept is cache))
        cache.add_(1)
        counters.add_(1)
    assert found[0].digest == found[1].digest
    plain = QuantizedLinear()
    plain.weight_packed = torch.nn.Parameter(fp4_weight(), requires_grad=False)
    before = digest(plain)
    plain.locations = counters
    assert digest(plain) == before, "nothing is searched that has its weights"


def test_the_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantizedLinear()
    set_weight(layer, [layer, [[fp4_weight()]]])
    layer.self_reference = layer.weight
    digest(layer)
    monkeypatch.setattr(module_tensors, "OBJECTS_MAX", 3)
    assert [module.name for module in digest_weights({"model": layer}).unread] == ["model."]


def test_nothing_that_a_module_does_is_an_error() -> None:
    class Broken(torch.nn.Module):
        @property
        def quant_method(self) -> None:
            raise OSError

    model = Model()
    model.third = Broken()
    model.second.weight = torch.nn.Parameter(torch.eye(16).to_sparse())
    found = digest_weights({"model": model})
    assert [module.name for module in found.unread] == ["model.second", "model.third"]
    before = found.size_bytes
    assert before == 4 * (24 * 16 + 16 + 16 + 3), "the rest is read"


def experts(**tensors: torch.Tensor) -> torch.nn.Module:
    """vLLM's module for four experts, of which each has 64 inputs and 32 units."""
    module = torch.nn.Module()
    module.quant_method = Fp4Method()
    module.moe_config = SimpleNamespace(is_act_and_mul=True)
    module.local_num_experts, module.hidden_size = 4, 64
    module.intermediate_size_per_partition = 32
    for name, tensor in tensors.items():
        setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


class UnquantizedMethod:
    """A method of vLLM for weights as they are."""


def test_each_of_the_experts_matrices_must_be_there() -> None:
    up, down = torch.ones(4, 64, 32, dtype=torch.uint8), torch.ones(4, 64, 16, dtype=torch.uint8)
    scales, bias = torch.ones(4, 64, 16), torch.ones(4, 64)
    assert digest(experts(w13_weight=up, w2_weight=down))
    for incomplete in (
        experts(w13_weight=up, w13_scale=scales, w2_bias=bias),
        experts(w2_weight=down, w2_bias=bias, w13_bias=bias),
        experts(packed=up),
        experts(w13_weight=up, w2_weight=down[:3]),
    ):
        assert [module.kind for module in digest_weights({"model": incomplete}).unread] == [
            "Fp4Method"
        ]
    plain = experts(w13_weight=torch.ones(4, 64, 64), w2_weight=torch.ones(4, 64, 32))
    plain.quant_method = UnquantizedMethod()
    assert digest(plain)
    plain.w2_weight = torch.nn.Parameter(torch.empty(0))
    assert [module.kind for module in digest_weights({"model": plain}).unread] == [
        "UnquantizedMethod"
    ]


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        (SimpleNamespace(quant_config=SimpleNamespace(weight_bits=8)), 8),
        (SimpleNamespace(scheme=SimpleNamespace(num_bits=3), num_bits=8), 3),
        (SimpleNamespace(scheme=SimpleNamespace(layer_config=SimpleNamespace(bits=4))), 4),
        (SimpleNamespace(quant_type=SimpleNamespace(size_bits=4)), 4),
        (SimpleNamespace(quant_config=SimpleNamespace(get_name=lambda: "fbgemm_fp8")), 8),
        (SimpleNamespace(old_quant_method=Fp4Method()), 4),
        (SimpleNamespace(quant_config=SimpleNamespace(get_name=lambda: "quark")), 2),
    ],
)
def test_the_nearest_word_on_bits_counts(method: Any, bits: int) -> None:
    layer = QuantizedLinear()
    layer.quant_method = method
    assert [size.bits for size in weight_sizes(layer, [])] == [bits]


def test_unread_modules_are_named_by_kind_and_number() -> None:
    model = torch.nn.Sequential(emptied(Model()), emptied(Model()), QuantizedLinear())
    found = digest_weights({"model": model})
    assert found.unread_text() == "3 modules (2 Linear, 1 Fp4Method; first model.0.first)"
    found = digest_weights({"model": model[0]})
    assert found.unread_text() == "1 module (1 Linear; first model.first)"
    assert digest_weights({"model": Model()}).unread_text() == ""
    assert digest_weights({}).unread == (UnreadModule("no model", ""),)


def test_an_empty_parameter_by_itself_is_nothing() -> None:
    """Marlin gives each symmetric layer an empty zero point."""
    nothing = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model = Model()
    model.first.w_zp = nothing
    model.norm = torch.nn.LayerNorm(16)
    model.norm.w_zp = nothing
    assert digest(model) == digest(model)
    model.norm.weight = model.norm.bias = nothing
    assert digest_weights({"model": model}).unread == (UnreadModule("model.norm", "LayerNorm"),)


class Adapted(torch.nn.Module):
    """vLLM's wrapper for adapters around a layer: it has the layer's shape and no weight."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.quant_method, self.input_size, self.output_size = Fp4Method(), 24, 16
        self.lora_a_stacked = (torch.zeros(2, 1, 8, 24), torch.zeros(2, 1, 8, 24))


def test_most_of_the_memory_that_the_model_occupies_was_read() -> None:
    """The room for adapters is a part of it that no digest reads, and so are workspaces."""
    model = torch.nn.Sequential(Model(), Adapted(Model()))
    size_bytes, room_bytes = digest_weights({"model": model}).size_bytes, 2 * 4 * 2 * 8 * 24
    most = size_bytes * 4 // 3 + room_bytes + WORKSPACE_BYTES
    assert not digest_weights({"model": model}, occupied_bytes=most).unread
    unread = digest_weights({"model": model}, occupied_bytes=most + 4).unread
    assert unread == (UnreadModule("model", "most of its memory"),)


def test_tensors_that_share_memory_count_once() -> None:
    model = Model()
    size_bytes = digest_weights({"model": model}).size_bytes
    model.tied = torch.nn.Linear(24, 16, bias=False)
    model.tied.weight = model.first.weight
    assert digest_weights({"model": model}).size_bytes == size_bytes


class PackedHandler(_custom_ops.CPUDNNLGEMMHandler):
    """vLLM's object for a matrix of oneDNN, without oneDNN: only products with it are known."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.handler_tensor = None
        self.n, self.k = weight.shape


def kept(model: Model) -> None:
    """As vLLM leaves a layer whose weights oneDNN keeps."""
    memory: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
    handler = PackedHandler(model.first.weight)
    memory[handler] = model.first.weight.data.clone()
    model.first.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, memory[handler], bias)

    model.first.cpu_linear = linear


def test_what_a_library_keeps_is_read_by_asking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, same, changed = Model(), Model(), Model()
    flip(changed.first.weight)
    for engine_model in (model, same, changed):
        kept(engine_model)
    assert digest(model) == digest(same)
    assert digest(model) != digest(changed)
    monkeypatch.setattr(weights_digest, "PROBE_SECONDS_MAX", 0.0)
    packed = PackedWeights()
    first, again = (digest_weights({"model": model}, packed) for _ in range(2))
    assert first.unread == again.unread == (UnreadModule("model.first", "Linear"),)
    assert first.digest == again.digest, "this engine's own weights are the same"
    assert first.digest != digest_weights({"model": same}).digest, "no other engine's are"


class Clock:
    """Seconds that pass when a product is computed: each next one of `costs`, then none."""

    def __init__(self, *costs: float) -> None:
        self.seconds, self.products = 0.0, 0
        self._costs = iter(costs)

    def __call__(self) -> float:
        return self.seconds

    def kept(self, model: Model) -> Model:
        """The model with a packed layer whose products take their time."""
        kept(model)
        linear = model.first.cpu_linear
        handler = linear.__closure__[0].cell_contents

        def timed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            assert isinstance(handler, PackedHandler)
            # Two threads that multiply by one matrix of oneDNN end the process, or get it wrong.
            assert threading.current_thread() is threading.main_thread()
            self.products += 1
            self.seconds += next(self._costs, 0.0)
            return linear(x, weight, bias)

        model.first.cpu_linear = timed
        return model


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 4.9])
def test_one_slow_product_says_nothing_of_the_others(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 50: of a processor that is busy as the engine starts."""
    monkeypatch.setattr(weights_digest, "PROBE_ROWS", 1)
    clock = Clock(seconds)
    found = digest_weights({"model": clock.kept(Model())}, PackedWeights(clock))
    assert not found.unread
    assert found.digest == digest_weights({"model": Clock().kept(Model())}).digest
    assert clock.products == 24


def test_what_there_was_no_time_for_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of which all would take 144 seconds are late after five, and none is lost."""
    monkeypatch.setattr(weights_digest, "PROBE_ROWS", 1)
    clock = Clock(6.0, 6.0)
    model, packed = clock.kept(Model()), PackedWeights(clock)
    late = digest_weights({"model": model}, packed)
    assert (late.is_late, clock.products) == (True, 1)
    assert late.unread == (UnreadModule("model.first", "Linear"),)
    (matrix,) = (each for part in module_contents({"model": model}) for each in part.matrices)
    assert not packed.read_matrices([matrix], 0.5), "the product of six seconds, and no more"
    beside = digest_weights({"model": model}, packed, multiplies=False)
    assert (beside.digest, beside.is_late, clock.products) == (late.digest, True, 2)
    assert packed.read_matrices([matrix], 0.5)
    read = digest_weights({"model": model}, packed, multiplies=False)
    assert read.digest == digest_weights({"model": Clock().kept(Model())}).digest
    assert (read.unread, read.is_late, clock.products) == ((), False, 24)


def on_one_buffer(layers: int, buffers: int, seed: int) -> torch.nn.Module:
    """Layers whose parameters are buffers that they share; what a layer has is elsewhere."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(layers)))
    torch.manual_seed(seed)
    memory = torch.rand(buffers, 8, 8)
    for number, layer in enumerate(model):
        layer.weight.data = memory[number % buffers]
    return model


@pytest.mark.parametrize(("layers", "buffers"), [(8, 1), (8, 3), (2, 1)])
def test_layers_on_one_buffer_are_unread(layers: int, buffers: int) -> None:
    found = [digest_weights({"model": on_one_buffer(layers, buffers, 0)}) for _ in range(2)]
    assert [module.name for module in found[0].unread] == [f"model.{at}" for at in range(layers)]
    assert found[0].digest != found[1].digest, "nobody knows what they have"


def test_a_buffer_of_layers_of_several_shapes_is_one_too() -> None:
    memory = torch.rand(100)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    model[0].weight.data, model[1].weight.data = memory[:64].view(8, 8), memory[60:76].view(4, 4)
    assert [module.name for module in digest_weights({"model": model}).unread] == [
        "model.0",
        "model.1",
    ]


@pytest.mark.parametrize("layers", [1, 3])
def test_parts_of_a_layers_weight_beside_the_layer_are_read(layers: int) -> None:
    """MLA has its projection as a module, and keeps both halves of its weight as parameters."""

    def attention() -> torch.nn.Module:
        module = torch.nn.Module()
        module.projection = torch.nn.Linear(8, 8, bias=False)
        upper, lower = module.projection.weight.detach().T.view(8, 2, 4).split(2, dim=-1)
        module.upper = torch.nn.Parameter(upper.transpose(0, 1))
        module.lower = torch.nn.Parameter(lower.permute(1, 2, 0))
        return module

    model = torch.nn.Sequential(*(attention() for _ in range(layers)))
    assert not digest_weights({"model": model}).unread
    if layers > 1:
        model[1].projection.weight.data = model[0].projection.weight.data
        unread = {module.name for module in digest_weights({"model": model}).unread}
        assert {"model.0.projection", "model.1.projection"} <= unread


def test_tied_weights_and_weights_side_by_side_are_read() -> None:
    model = on_one_buffer(4, 4, 0)
    model.append(torch.nn.Linear(8, 8, bias=False))
    model[-1].weight = model[0].weight
    assert not digest_weights({"model": model}).unread


@pytest.mark.parametrize("replicas", [1, 2])
def test_experts_that_replicas_share_are_unread(replicas: int) -> None:
    """Each replica is an engine, and has a part of them."""
    model = Model()
    parallel = SimpleNamespace(dp_size=replicas)
    model.second.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    unread = [module.name for module in digest_weights({"model": model}).unread]
    assert unread == ["model.second"] * (replicas > 1)


def test_a_parameter_without_memory_is_unread() -> None:
    """A class of another project may have its weights elsewhere, and leave a shape."""
    model = Model()
    model.table = torch.nn.Module()
    model.table.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    assert digest_weights({"model": model}).unread == (UnreadModule("model.table", "Module"),)
