"""The vLLM side. `kv_connector_module_path` is "hybridkv.connector"."""

from hybridkv.connector.hybrid import HybridKVConnector

__all__ = ["HybridKVConnector"]
