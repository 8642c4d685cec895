"""The engine's side, which knows torch and vLLM: `kv_connector_module_path` "hybridkv.connector".

The connector classes are imported on first use, because the copiers also work without vLLM.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.multi.connector import MultiConnector

__all__ = ["HybridKVConnector", "MultiConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    room = "multi" if name == "MultiConnector" else "connector"
    return getattr(importlib.import_module(f"hybridkv.{room}.connector"), name)
