"""Tiny checkpoints of every kind, loaded into vLLM's own layers by vLLM's own code: another byte in
any tensor is another digest, and the same checkpoint is the same digest.

Kernels that only a GPU has are replaced by a function that moves the same bytes.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.model_executor.kernels.linear.mixed_precision import marlin
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_experts
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_experts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, mxfp4
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16,
)
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from hybridkv.vllm import packed_probes, weights_digest
from hybridkv.vllm.module_tensors import adapter_bytes, module_contents
from hybridkv.vllm.weights_digest import digest_weights

pytestmark = pytest.mark.engine
cpu_library = pytest.mark.skipif(
    not hasattr(torch.ops._C, "create_onednn_mm_handler"),
    reason="vLLM 0.33 stands beside the pinned one without a library for CPUs",
)

Layer = Any  # A module of vLLM, whose attributes no type has.
Change = Callable[[Layer], None]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's layers ask for: a configuration and groups of one process."""
    store: Path = tmp_path_factory.mktemp("store") / "store"
    config, dtype = VllmConfig(), torch.get_default_dtype()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, enforce_eager=True, is_encoder_decoder=False, is_moe=True
    )
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield
    parallel_state.cleanup_dist_env_and_memory()
    torch.set_default_dtype(dtype)


@dataclass
class TritonTensor:
    """As triton_kernels wraps a tensor: `storage.data`."""

    storage: Any


def triton_tensor(tensor: torch.Tensor) -> TritonTensor:
    return TritonTensor(SimpleNamespace(data=tensor.data.mT.contiguous()))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a GPU's build can do, without its arithmetic."""

    def repack(weight: torch.Tensor, size_k: int, **_: Any) -> torch.Tensor:
        return weight.view(size_k // 16, -1).flip(1).contiguous()

    def quantize(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(marlin.ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(w8a8_utils.ops, "scaled_fp8_quant", quantize)
    backend = mxfp4_experts.Mxfp4MoeBackend.TRITON
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda _: (backend, None))
    names = {"PrecisionConfig": SimpleNamespace, "FlexCtx": lambda rhs_data: rhs_data}
    swizzled = {
        "_swizzle_mxfp4": lambda weight, scale: (triton_tensor(weight), None, triton_tensor(scale)),
        "_mx_scale_kwargs": lambda scale: {"weight_scale": scale},
    }
    for name, value in (names | swizzled).items():
        monkeypatch.setattr(mxfp4_experts, name, value, raising=False)
    for module in ("triton_kernels", "triton_kernels.matmul_ogs"):  # vLLM 0.30 asks there.
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    for name in ("gptq_marlin_moe_repack", "awq_marlin_moe_repack"):
        monkeypatch.setattr(int_wna16.ops, name, lambda weight, *_, **__: weight.mT.contiguous())
    marlin_experts = int_wna16.WNA16MoEBackend.MARLIN, object
    for methods in (auto_gptq, auto_awq, compressed_tensors_moe_wna16):
        monkeypatch.setattr(methods, "select_wna16_moe_backend", lambda *_, **__: marlin_experts)
        monkeypatch.setattr(methods, "make_wna16_moe_kernel", lambda **_: None)
    fp8_backend = fp8_experts.Fp8MoeBackend.TRITON
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (fp8_backend, None))
    monkeypatch.setattr(fp8.Fp8MoEMethod, "_init_moe_kernel", lambda *_: None)


def fill(layer: Layer) -> None:
    """Fill a layer with a checkpoint, the same each time."""
    source = torch.Generator().manual_seed(1)
    for tensor in layer.parameters():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            tensor.data.copy_(torch.rand(tensor.shape, generator=source) / 10 + 0.01)
        else:
            size = (tensor.nbytes,)
            raw = torch.randint(100, size, generator=source, dtype=torch.uint8)
            tensor.data.view(-1).view(torch.uint8).copy_(raw)


def loaded(layer: Layer, change: Change) -> Layer:
    """The layer with the checkpoint's weights but for `change`, as the engine computes with it."""
    fill(layer)
    change(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def change_nothing(_: Layer) -> None:
    pass


def change_one(layer: Layer, name: str) -> None:
    """Other bytes: of the largest scale, since the lesser ones may be merged into it, and of
    integers with the same sum, since vLLM keeps sums."""
    tensor = layer.get_parameter(name).data
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor.view(-1)[tensor.view(-1).argmax()] *= 2
    elif tensor.dtype == torch.int8 and tensor.dim() > 1:
        tensor[5] = tensor[5].roll(1)
    else:
        tensor.view(-1).view(torch.uint8)[tensor.nbytes // 2] ^= 1


def change_weight(layer: Layer) -> None:
    """Another byte of the largest tensor, whose name is that of the vLLM."""
    sizes = {name: tensor.nbytes for name, tensor in layer.named_parameters()}
    change_one(layer, max(sizes, key=lambda name: sizes[name]))


def linear(config: Any, prefix: str = "model.layer") -> Layer:
    return ReplicatedLinear(128, 192, bias=True, quant_config=config, prefix=prefix)


def experts(config: Any, has_bias: bool = False) -> Layer:
    """The routed experts of a layer. vLLM wants no two layers of one name at once."""
    get_current_vllm_config().compilation_config.static_forward_context.clear()
    return FusedMoEFactory(
        num_experts=4,
        top_k=2,
        hidden_size=128,
        intermediate_size=128,
        quant_config=config,
        prefix="model.experts",
        has_bias=has_bias,
    ).routed_experts


def compressed(bits: int, symmetric: bool = True, inputs: Any = None) -> Any:
    """A configuration of compressed-tensors: groups of 32, or channels where inputs are INT8."""
    strategy = {"strategy": "channel"} if inputs else {"strategy": "group", "group_size": 32}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights | strategy,
        "input_activations": inputs,
        "output_activations": None,
    }
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if inputs else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": [],
            "config_groups": {"group_0": group},
        }
    )


def int8(dynamic: bool, symmetric: bool) -> Any:
    inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric, "dynamic": dynamic}
    strategy = {"strategy": "token" if dynamic else "tensor", "observer": None}
    return compressed(8, inputs=inputs | strategy)


def marlin_linear(bits: int) -> Layer:
    """A layer for Marlin, which the CPU's build does not choose."""
    with pytest.MonkeyPatch.context() as patched:
        kernel = marlin.MarlinLinearKernel
        patched.setattr(compressed_tensors_wNa16, "choose_mp_linear_kernel", lambda _: kernel)
        return linear(compressed(bits))


GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq"}
AWQ = {"bits": 4, "group_size": 32, "zero_point": True, "quant_method": "awq"}


def fp8_config(inputs: str) -> Any:
    return fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=inputs)


def tied() -> Layer:
    """An embedding whose weight is the head's too; vLLM packs neither on a CPU."""
    embedding = VocabParallelEmbedding(256, 64)
    head = ParallelLMHead(256, 64)
    head.tie_weights(embedding)
    return torch.nn.ModuleList([embedding, head])


KINDS: dict[str, Callable[[], Layer]] = {
    "unquantized": lambda: linear(None),
    "FP8, inputs by scale": lambda: linear(fp8_config("static")),
    "FP8, dynamic inputs": lambda: linear(fp8_config("dynamic")),
    "INT8 W8A8, inputs by scale": lambda: linear(int8(dynamic=False, symmetric=True)),
    "INT8 W8A8, inputs by scale and zero": lambda: linear(int8(dynamic=False, symmetric=False)),
    "INT8 W8A8, dynamic inputs": lambda: linear(int8(dynamic=True, symmetric=True)),
    "INT8 W8A8, dynamic inputs with zero": lambda: linear(int8(dynamic=True, symmetric=False)),
    "GPTQ": lambda: linear(AutoGPTQConfig.from_config(GPTQ)),
    "AWQ": lambda: linear(AutoAWQConfig.from_config(AWQ)),
    "compressed-tensors W4A16": lambda: linear(compressed(4)),
    "compressed-tensors W4A16 with zero": lambda: linear(compressed(4, symmetric=False)),
    "Marlin W4A16": lambda: marlin_linear(4),
    "Marlin W8A16": lambda: marlin_linear(8),
    "experts": lambda: experts(None),
    "FP8 experts": lambda: experts(fp8_config("dynamic")),
    "GPTQ experts": lambda: experts(AutoGPTQConfig.from_config(GPTQ)),
    "AWQ experts": lambda: experts(AutoAWQConfig.from_config(AWQ)),
    "compressed-tensors W4A16 experts": lambda: experts(compressed(4)),
    "MXFP4 experts of triton_kernels": lambda: experts(mxfp4.GptOssMxfp4Config(), has_bias=True),
}
UNUSED = {
    *("weight_shape", "qzeros of GPTQ"),
    *("w13_weight_shape", "w2_weight_shape", "w13_bias of GPTQ experts", "w2_bias of GPTQ experts"),
}
"""What is not computed with: vLLM drops the zero points of a symmetric GPTQ checkpoint, and biases
of experts that no checkpoint gave."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=cpu_library) if "INT8" in kind or kind == "experts" else kind
        for kind in KINDS
    ],
)
def test_each_byte_of_a_checkpoint_is_in_its_digest(kind: str) -> None:
    def found(change: Change) -> weights_digest.WeightsDigest:
        return digest_weights({"model": loaded(KINDS[kind](), change)})

    first = found(change_nothing)
    assert first == found(change_nothing)._replace(seconds=first.seconds)
    assert not first.unread
    same = {
        f"{name} of {kind}"
        for name, _ in KINDS[kind]().named_parameters()
        if name not in UNUSED and found(partial(change_one, name=name)).digest == first.digest
    }
    assert same <= UNUSED


@cpu_library
@pytest.mark.parametrize("dynamic", [True, False])
def test_answers_about_integers_are_exact(dynamic: bool) -> None:
    """Also where neighbours are -128, which oneDNN adds up in 16 bits on a processor without VNNI.

    tests/engine/test_avx2.py runs this without VNNI.
    """
    layer = linear(int8(dynamic, symmetric=False))
    fill(layer)
    integers = layer.weight.data.random_(-128, 128, generator=torch.Generator().manual_seed(1))
    integers[: len(integers) // 2, ::3] = -128
    integers[: len(integers) // 2, 1::3] = -128
    integers = integers.clone()
    layer.quant_method.process_weights_after_loading(layer)
    (content,) = module_contents({"model": layer})
    probe = content.matrices[0].probe
    assert probe is not None
    exact = integers.mT.double()
    if dynamic:
        exact = packed_probes.subset_rows(len(exact)).double() @ exact
    else:
        exact = -exact
    wanted = exact.float() * layer.weight_scale.view(1, -1)
    found = torch.cat([probe.answers(0, 100), probe.answers(100, probe.questions - 100)])
    assert torch.equal(found, wanted if dynamic else wanted.bfloat16())


@cpu_library
def test_what_cannot_be_read_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 on a CPU: two engines share nothing, and one stays what it was until an update."""
    monkeypatch.setattr(weights_digest, "PROBE_SECONDS_MAX", -1.0)
    layer = loaded(KINDS["INT8 W8A8, dynamic inputs"](), change_nothing)
    packed = weights_digest.PackedWeights()
    first, again = (digest_weights({"model": layer}, packed) for _ in range(2))
    assert first.digest == again.digest
    assert first.digest != digest_weights({"model": layer}).digest
    assert first.unread_text() == "1 module (1 CompressedTensorsLinearMethod; first model.)"
    packed.renew()
    assert digest_weights({"model": layer}, packed).digest != first.digest


def test_experts_without_their_weights_are_named() -> None:
    """As with a kernel that keeps MXFP4 where nobody can look."""
    layer = loaded(KINDS["MXFP4 experts of triton_kernels"](), change_nothing)
    layer.w2_weight = object()
    assert digest_weights({"model": layer}).unread_text() == (
        "1 module (1 GptOssMxfp4MoEMethod; first model.)"
    )


def test_tied_weights_are_read_where_both_layers_have_them() -> None:
    layers = tied()
    fill(layers)
    first = digest_weights({"model": layers})
    change_one(layers, "1.weight")
    changed = digest_weights({"model": layers})
    assert first.digest != changed.digest
    assert not first.unread
    assert first.size_bytes == layers[0].weight.nbytes


def test_a_drafters_weights_count() -> None:
    def found(change: Change) -> str:
        drafter = loaded(KINDS["GPTQ"](), change)
        model = loaded(KINDS["unquantized"](), change_nothing)
        return digest_weights({"model": model, "drafter": drafter}).digest

    assert found(change_nothing) == found(change_nothing)
    assert found(change_nothing) != found(change_weight)


@pytest.mark.parametrize(
    "kind",
    [
        *("unquantized", "FP8, dynamic inputs", "GPTQ", "AWQ", "compressed-tensors W4A16"),
        "Marlin W8A16",
    ],
)
def test_the_room_for_adapters_is_no_weight(kind: str) -> None:
    """vLLM itself has no adapters for INT8 on a CPU."""

    def found(change: Change, adapter: float) -> str:
        layer = ReplicatedLinearWithLoRA(loaded(KINDS[kind](), change))
        layer.create_lora_weights(2, LoRAConfig(max_lora_rank=8, lora_dtype=torch.bfloat16))
        layer.lora_a_stacked[0].fill_(adapter)
        assert adapter_bytes(layer) == 2 * 2 * 8 * (128 + 192)
        result = digest_weights({"model": layer})
        assert not result.unread
        return result.digest

    first = found(change_nothing, 0.0)
    assert first == found(change_nothing, 1.0)
    assert first != found(change_weight, 0.0)
