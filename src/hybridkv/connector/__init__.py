"""The engine's side: what knows torch and vLLM. `kv_connector_module_path` is "hybridkv.connector".

The connector classes are imported on first use, so that the copiers can be used where there is torch but no vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv.connector.hybrid import HybridKVConnector
    from hybridkv.connector.multi import MultiConnector

__all__ = ["HybridKVConnector", "MultiConnector"]


def __getattr__(name: str) -> Any:
    if name == "HybridKVConnector":
        from hybridkv.connector.hybrid import HybridKVConnector  # noqa: PLC0415  # see above

        return HybridKVConnector
    if name == "MultiConnector":
        from hybridkv.connector.multi import MultiConnector  # noqa: PLC0415  # see above

        return MultiConnector
    raise AttributeError(name)
