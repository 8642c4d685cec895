"""What vLLM's configuration gets from this package: one word is enough."""

import sys
from types import ModuleType

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.connector.connector import HybridKVConnector
from hybridkv.core.settings import TRANSFER
from hybridkv.vllm import plugin


def test_the_name_alone_is_enough() -> None:
    """vLLM may call the plugin several times in a process."""
    plugin.register()
    plugin.register()
    assert plugin.is_registered("HybridKVConnector")
    assert not plugin.is_registered("HybridConnector")
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig(**TRANSFER))
    assert connector is HybridKVConnector


def test_a_connector_has_failed_loads_computed() -> None:
    transfer = KVTransferConfig(**TRANSFER)
    assert transfer.kv_load_failure_policy == "fail", "vLLM's default has changed"
    plugin.recompute_failed_loads(transfer)
    assert transfer.kv_load_failure_policy == "recompute"


def test_dynamos_worker_knows_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table maps names to classes. A name that it has already stays as it is."""

    class ThroughACache:
        """As Dynamo's own class for LMCache: no parameters pass between the engines."""

    worker, protocols = (
        ModuleType(plugin.DYNAMO),
        ModuleType(f"{plugin.DYNAMO}.kv_connector_protocols"),
    )
    table: dict[str, type] = {}
    vars(protocols).update(KV_CONNECTOR_PROTOCOLS=table, LMCacheMPConnectorProtocol=ThroughACache)
    plugin.register()
    assert not table, "this process is no worker of Dynamo"
    monkeypatch.setitem(sys.modules, plugin.DYNAMO, worker)
    monkeypatch.setitem(sys.modules, protocols.__name__, protocols)
    plugin.register()
    assert table == {"HybridKVConnector": ThroughACache}


def test_a_dynamo_without_the_table_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, plugin.DYNAMO, ModuleType(plugin.DYNAMO))
    plugin.register()
    assert "Dynamo may refuse HybridKVConnector" in caplog.text
