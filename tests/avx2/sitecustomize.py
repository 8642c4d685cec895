"""Python imports this module at the start of every process while its directory is on PYTHONPATH.

With HYBRIDKV_TEST_CPU=avx2 it hides from `torch.cpu` every processor feature newer than AVX2.
vLLM asks nothing else when it chooses kernels, backends and the dtype of recurrent states.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType
from typing import Any

_MODULE = "torch.cpu"
NEWER = ("avx512", "avx10", "avx_vnni", "avx_ne_convert", "amx")


def _limit(module: ModuleType) -> None:
    """Make torch.cpu answer as on AVX2: all of its questions read `get_capabilities`."""
    real = module.get_capabilities

    def get_capabilities() -> Mapping[str, Any]:
        return MappingProxyType(
            {name: has for name, has in real().items() if not name.startswith(NEWER)}
        )

    vars(module)["get_capabilities"] = get_capabilities


class _Limited(Loader):
    """Loads torch.cpu as its own loader does, then limits it."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _limit(module)


class _Finder(MetaPathFinder):
    """Finds torch.cpu alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Limited(spec.loader)
        return spec


def install() -> None:
    """Limit torch.cpu in this process, now or when it is imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if _MODULE in sys.modules:
        _limit(sys.modules[_MODULE])


if os.environ.get("HYBRIDKV_TEST_CPU") == "avx2":
    install()
