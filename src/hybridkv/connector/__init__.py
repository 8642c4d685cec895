"""The engine's side, which knows torch and vLLM: `kv_connector_module_path` "hybridkv.connector".

The connector classes are imported on first use, because the copiers also work without vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.multi.connector import MultiConnector

__all__ = ["HybridKVConnector", "MultiConnector"]


def __getattr__(name: str) -> Any:
    if name == "HybridKVConnector":
        from hybridkv.connector.connector import HybridKVConnector  # noqa: PLC0415  # see above

        return HybridKVConnector
    if name == "MultiConnector":
        from hybridkv.multi.connector import MultiConnector  # noqa: PLC0415  # see above

        return MultiConnector
    raise AttributeError(name)
