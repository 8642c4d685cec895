"""The switch that makes vLLM behave as on a machine whose processor has AVX2 and nothing newer."""

import os
from pathlib import Path

CPU_ENV = "HYBRIDKV_TEST_CPU"
"""`avx2` turns the switch on; unset or empty, every process sees the real processor."""

_LIBRARIES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""How PyTorch, oneDNN and MKL are told not to ask the processor themselves."""


def choose_cpu() -> None:
    """Apply the switch to this process and to every process that it starts.

    It is called before torch is imported, and raises ValueError for an unknown processor.
    """
    chosen = os.environ.get(CPU_ENV, "")
    if chosen not in ("", "avx2"):
        raise ValueError(f"{CPU_ENV}={chosen!r}: avx2 works, and so does leaving it unset")
    if not chosen:
        return
    os.environ.update(_LIBRARIES)
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    from tests.avx2 import sitecustomize

    sitecustomize.install()


def is_avx2() -> bool:
    """Whether this process finds AVX2 and nothing newer, with the switch or without it."""
    import torch

    from tests.avx2.sitecustomize import NEWER

    capabilities = torch.cpu.get_capabilities()
    return not any(has for name, has in capabilities.items() if name.startswith(NEWER))
