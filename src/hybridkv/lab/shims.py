"""What vLLM's CPU build lacks for some bundled models; no other process gets it.

`HYBRIDKV_SHIMS` names the model: a bundled model's environment sets it (`hybridkv.lab.models`), the
import of this module acts on it. The engine's process imports it before the engine is made, a
worker for `--worker-extension-cls`. On any other build of vLLM nothing of it is put in place.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from vllm.platforms import current_platform

SHIMS_ENV = "HYBRIDKV_SHIMS"


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
        setattr(CpuPlatform, name, classmethod(_with_tiles(getattr(CpuPlatform, name).__func__)))


def _with_tiles(function: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        with _tiles():
            return function(*args, **kwargs)

    return told


@contextmanager
def _tiles() -> Iterator[None]:
    real = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: True
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = real


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
        module = _Anything(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    functional = _Anything("torchvision.transforms.v2.functional")
    sys.modules[functional.__name__] = functional
    vars(sys.modules["torchvision.transforms.v2"])["functional"] = functional

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
importlib.import_module("hybridkv.lab.widen")
