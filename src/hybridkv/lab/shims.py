"""What vLLM's CPU build lacks for some bundled models; no other process gets it.

`HYBRIDKV_SHIMS` names the model: a bundled model's environment sets it (`hybridkv.lab.models`), the
import of this module acts on it. The engine's process imports it before the engine is made, a
worker for `--worker-extension-cls`. On any other build of vLLM nothing of it is put in place, but
for wider weights, which `HYBRIDKV_WIDEN` ("seed:width") asks for.
"""

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from vllm.platforms import current_platform

SHIMS_ENV, WIDEN_ENV = "HYBRIDKV_SHIMS", "HYBRIDKV_WIDEN"


class BundledWorker:
    """The (empty) worker extension of bundled models; the import is what counts."""


def _mamba2() -> None:
    """The CPU kernel returns only the last state of a forward pass, and none within it."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: PLC0415
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2  # noqa: PLC0415

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _mla() -> None:
    """MLA kernels that read a cached prefix run on AVX-512 BF16 too, and are right there.

    vLLM offers them where there are AMX tiles, and turns prefix caching off elsewhere. Only the
    platform is told that there are tiles: kernels that do need them ask torch themselves.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    for name in ("check_and_update_config", "get_attn_backend_cls"):
        tiles = patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)
        setattr(CpuPlatform, name, classmethod(tiles(getattr(CpuPlatform, name).__func__)))


class _Anything(ModuleType):
    """A module that has every name; no text prompt calls one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _torchvision() -> None:
    """Image processing, which the text model's module imports."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = sys.modules[name] = _Anything(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
    functional = _Anything("torchvision.transforms.v2.functional")
    sys.modules[functional.__name__] = vars(module)["functional"] = functional

    from vllm.model_executor.models import registry  # noqa: PLC0415

    registry._run_in_subprocess = lambda inspect: inspect()


def _interpreted_triton() -> None:
    """Triton's interpreter runs vLLM's own kernels; a CPU build takes Triton's CPU backend only.

    The model's environment sets TRITON_INTERPRET, which Triton reads when it is imported: before
    this module. Modules that vLLM imports before this one hold no kernel.
    """
    import triton  # noqa: PLC0415
    import vllm.triton_utils as used  # noqa: PLC0415

    used.triton, used.tl = triton, triton.language


def _tile_schedules() -> None:
    """Keys that the CPU's builder leaves out of a dictionary that its caller reads."""
    from vllm.models.deepseek_v4.cpu import cpu_mla  # noqa: PLC0415

    builder, empty = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder, {"c1a": None, "c2a": None}
    build = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, tokens: {**empty, **build(self, tokens)}


def _wide_weights(seed: int, width: float) -> None:
    """Wider random weights for `load_format="dummy"`.

    vLLM's dummy weights are so small that greedy tokens do not depend on the KV cache: a corrupt
    restore would pass. These replace them before the model loads, in every worker process.
    """
    from vllm.model_executor.model_loader import dummy_loader  # noqa: PLC0415

    loader, numbers = dummy_loader.DummyModelLoader, itertools.count()
    load_weights = loader.load_weights

    def widen(param: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Uniform values with a seed for each parameter: +-width for matrices, else 0.5 to 1.5."""
        if param.device.type == "meta" or not torch.is_floating_point(param):
            return
        generator = torch.Generator(device="cpu").manual_seed(seed + next(numbers))
        low, high = (0.5, 1.5) if param.dim() < 2 else (-width, width)
        values = torch.rand(param.shape, generator=generator, dtype=torch.float32)
        param.data.copy_((values * (high - low) + low).to(param.dtype))

    def load(self: Any, model: torch.nn.Module, model_config: object) -> None:
        """Load, then let Mamba-2 states decay, since one that grows ends in NaN and token 0."""
        load_weights(self, model, model_config)
        for module in model.modules():
            if type(module).__name__ == "MambaMixer2":
                module.A.data.abs_().neg_()

    dummy_loader.initialize_single_dummy_weight = widen
    loader.load_weights = load


SHIMS: dict[str, tuple[Callable[[], None], ...]] = {
    "deepseekv2": (_mla,),
    "deepseekv4": (_interpreted_triton, _mla, _tile_schedules),
    "falconh1": (_mamba2,),
    "granitehybrid": (_mamba2,),
    "qwen35": (_torchvision,),
}

if current_platform.is_cpu():
    for shim in SHIMS.get(os.environ.get(SHIMS_ENV, ""), ()):
        shim()
# Last: it imports the model loader, and with that modules that hold Triton kernels.
if WIDEN_ENV in os.environ:
    first, _, wide = os.environ[WIDEN_ENV].partition(":")
    _wide_weights(int(first), float(wide))
