"""`python -m tests.gpu.imports`: all that an engine on a GPU imports, also after CUDA has started.

Each library of vLLM is loaded with all its symbols, so one that needs another PyTorch is found too.
"""

import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    *("hybridkv", "vllm.v1.worker.gpu", "vllm.v1.sample", "vllm.v1.spec_decode", "vllm.v1.engine"),
    *("vllm.v1.core", "vllm.v1.structured_output", "vllm.model_executor.layers.mamba"),
)
"""With all their modules."""
MODULES = (
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.entrypoints.llm", "vllm.engine.arg_utils"),
    *("vllm.device_allocator.cumem", "vllm.distributed.parallel_state"),
    *("vllm.compilation.cuda_graph", "vllm.compilation.backends"),
    *("vllm.model_executor.model_loader.dummy_loader", "vllm.model_executor.kernels.linear"),
    *("vllm.model_executor.layers.fused_moe.layer", "vllm.model_executor.warmup.kernel_warmup"),
)
BACKENDS = (
    *("flash_attn", "triton_attn", "flex_attention", "gdn_attn", "linear_attn", "short_conv_attn"),
    *("mamba1_attn", "mamba2_attn", "mla.triton_mla", "mla.flashattn_mla", "mla.flashmla"),
)

OPTIONAL = {"opentelemetry", "mooncake", "obstore", "lmformatenforcer", "cutlass"}
"""Packages that no stage uses: of tiers, of tracing, of structured output, of Blackwell."""


def names() -> Iterator[str]:
    """Yield the names of all modules, in the order of their import."""
    import vllm

    root = Path(vllm.__path__[0])
    for path in sorted(root.rglob("*.so")):
        yield ".".join(("vllm", *path.parent.relative_to(root).parts, path.name.split(".")[0]))
    for package in PACKAGES:
        yield package
        paths = importlib.import_module(package).__path__
        modules = (module.name for module in pkgutil.walk_packages(paths, f"{package}."))
        yield from (name for name in modules if not name.endswith(".__main__"))
    yield from MODULES
    yield from (f"vllm.v1.attention.backends.{name}" for name in BACKENDS)
    from vllm.model_executor.models.registry import _VLLM_MODELS

    for path in sorted(Path("src/hybridkv/models").glob("**/config.json")):
        for architecture in json.loads(path.read_text()).get("architectures", ()):
            if architecture in _VLLM_MODELS:
                module = _VLLM_MODELS[architecture][0]
                yield module if "." in module else f"vllm.model_executor.models.{module}"


def main() -> int:
    """Import all modules. Returns 1 if one of them cannot be imported."""
    count, failed = 0, []
    for name in dict.fromkeys(names()):
        count += 1
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may fail with anything.
            if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in OPTIONAL:
                continue
            traceback.print_exc()
            failed.append(f"ERROR {name} - {type(error).__name__}: {error}")
    print(*failed, f"{count} modules, {len(failed)} cannot be imported", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
