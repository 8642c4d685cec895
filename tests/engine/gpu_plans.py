"""What `hybridkv plan` sees of real models on an H100, on a machine that has none.

`python -m tests.engine.gpu_plans 'ARCHITECTURE ARGUMENT...'...` prints a line for each one that is
named, and for `registry` one with the hybrid and attention-free architectures of vLLM's registry.

vLLM's own code for CUDA resolves everything: its platform class chooses backends, block sizes and
the layout, and a model is built on torch's meta device. Kernels, streams and packages that only a
GPU has are names without a body here, because building a model asks for them and calls none.
"""

import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

KERNELS = (
    "_C_stable_libtorch",
    "_flashkda_C",
    "_moe_C_stable_libtorch",
    "model_executor.kernels.mhc.tilelang_kernels",
    "models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
NAMESPACES = ("_C", "_flashkda_C", "_moe_C")
TRANSFER = {
    "kv_connector": "HybridKVConnector",
    "kv_connector_module_path": "hybridkv.connector",
    "kv_role": "kv_both",
}
ARGUMENTS = (
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--enable-prefix-caching",
    "--mamba-cache-mode=align",
    f"--kv-transfer-config={json.dumps(TRANSFER)}",
)


class Nameless(ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def pretend() -> None:
    """Make vLLM believe in an H100.

    Call it before anything of vLLM but its platforms is imported.
    """
    import torch
    import torch._ops
    import vllm.platforms

    for name in KERNELS:
        sys.modules[f"vllm.{name}"] = Nameless(f"vllm.{name}")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        device_type = "meta"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def current_device(cls) -> Any:
            return torch.device("meta")

    vllm.platforms._current_platform = H100()
    # Triton is kept although no driver is active, as in a process of Ray's before it has a device.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    vllm.platforms.vllm_version_matches_substr = lambda text: False

    import vllm._custom_ops as ops

    for name in dir(ops):
        if "support" in name:
            setattr(ops, name, lambda *arguments: False)
    known = torch._ops._OpNamespace.__getattr__

    def op(namespace: Any, name: str) -> Any:
        try:
            return known(namespace, name)
        except AttributeError:
            if name.startswith("__") or not namespace.name.startswith(NAMESPACES):
                raise
            return MagicMock()

    vars_of: Any = torch._ops._OpNamespace
    vars_of.__getattr__ = op
    import vllm.utils.import_utils

    vllm.utils.import_utils.has_deep_gemm = lambda: True
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = MagicMock


def complete() -> None:
    """Pretend the rest, in modules that import the platform."""
    # transformers looks for torchvision once, and does without it where it is not there.
    import hybridkv.lab.configuration_child  # noqa: F401
    from hybridkv_cpu_shims import torchvision_stand_in

    torchvision_stand_in()
    import vllm.models.kimi_k3.nvidia.model as kimi
    from transformers import AutoConfig, PretrainedConfig
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    kimi.maybe_init_gemm_rs_ar = lambda *arguments, **named: None

    class BailingHybridConfig(PretrainedConfig):
        """A config class that otherwise comes with its checkpoints."""

        model_type = "bailing_hybrid"

    AutoConfig.register("bailing_hybrid", BailingHybridConfig)


def walk() -> dict[str, list[str]]:
    """Returns the architectures of vLLM's registry whose layers are not all attention."""
    from vllm.model_executor.models import registry

    found: dict[str, list[str]] = {"hybrid": [], "attention_free": [], "unknown": []}
    for name, model in registry.ModelRegistry.models.items():
        try:
            info = registry._ModelInfo.from_model_cls(model.load_model_cls())
        except (ImportError, AttributeError):
            # Packages that this machine lacks: of vision and audio, and DeepGEMM.
            found["unknown"].append(name)
            continue
        for kind in ("hybrid", "attention_free"):
            if getattr(info, f"is_{kind}"):
                found[kind].append(name)
    return found


def plan(asked: str, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns why a model is refused, its layout, its groups, and a block's runs of memory."""
    from hybridkv.core.findings import Verdict
    from hybridkv.lab import configuration_child as child
    from hybridkv.vllm import layout as built
    from hybridkv.vllm.blocks import physical

    architecture, *arguments = asked.split()
    runs: set[int] = set()

    def block_views(config: Any, kv_caches: Any) -> Any:
        views = known(config, kv_caches)
        runs.update(
            physical(view)[0].numel() // physical(view).shape[-1] for view in views.values()
        )
        return views

    known, built.block_views = built.block_views, block_views
    try:
        with tempfile.TemporaryDirectory(prefix="hybridkv-plan-") as directory:
            hf_config = {"architectures": [architecture], "torch_dtype": "bfloat16"}
            hf_config.update(configs[architecture])
            (Path(directory) / "config.json").write_text(json.dumps(hf_config))
            report = child.inspect([directory, *ARGUMENTS, *arguments])
    finally:
        built.block_views = known
    refused = [finding.what for finding in report.findings if finding.verdict is Verdict.FAIL]
    groups = report.preview.groups if report.preview else ()
    return {
        "name": asked,
        "refused": [*refused, *filter(None, [report.unreadable])],
        "layout": json.loads(report.facts.get("layout", "null")),
        "groups": [
            [group.kind, group.tokens_per_block, group.layers, group.block_bytes]
            for group in groups
        ],
        "runs": sorted(runs),
    }


if __name__ == "__main__":
    pretend()
    complete()
    from tests.engine.model_configs import ATTENTION_FREE, HYBRIDS, OTHERS

    configs = {**HYBRIDS, **OTHERS, **ATTENTION_FREE}
    for name in sys.argv[1:]:
        record = {"registry": walk()} if name == "registry" else plan(name, configs)
        print(json.dumps(record), flush=True)
