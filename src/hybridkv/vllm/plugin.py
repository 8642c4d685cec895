"""What vLLM's configuration gets from this package: the connector's name, and its failure policy.

vLLM loads the entry point `vllm.general_plugins` in each of its processes, so that a user names the
connector by one word and needs no `kv_connector_module_path`.
"""

import contextlib
import importlib
import logging
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.core.settings import LONG_TRANSFER

logger = logging.getLogger("vllm.hybridkv")

NAME = LONG_TRANSFER["kv_connector"]
DYNAMO = "dynamo.vllm"
"""The package of Dynamo's worker. It serves only connectors that a table of it has (1.6.1)."""


def register() -> None:
    """Register the connector with vLLM, and with Dynamo where this process is Dynamo's worker.

    vLLM calls it, perhaps several times in a process.
    """
    path = LONG_TRANSFER["kv_connector_module_path"]
    with contextlib.suppress(ValueError):  # It is registered already.
        KVConnectorFactory.register_connector(NAME, path, NAME)
    if DYNAMO in sys.modules:
        _register_with_dynamo()


def is_registered(name: str) -> bool:
    """Return True if vLLM knows a connector by this name alone."""
    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError:
        return False
    return True


def _register_with_dynamo() -> None:
    """Add the connector to Dynamo's table, as one whose KV goes through a cache.

    So no parameters pass between prefill and decode. A Dynamo that has no such table goes on
    refusing the name, and the log says so.
    """
    try:
        protocols = importlib.import_module(f"{DYNAMO}.kv_connector_protocols")
        table = protocols.KV_CONNECTOR_PROTOCOLS
        table.setdefault(NAME, protocols.LMCacheMPConnectorProtocol)
    except (ImportError, AttributeError) as error:
        logger.warning(
            "hybridkv: Dynamo's table of connectors was not found (%s); Dynamo may refuse %s as a "
            "connector for prefill and decode apart",
            error,
            NAME,
        )
    else:
        logger.info("hybridkv: %s is in Dynamo's table of connectors", NAME)


def recompute_failed_loads(transfer: Any) -> None:
    """Have the engine compute what a failed load did not give (requirements D5).

    With vLLM's default, "fail", the request would end with an error. The scheduler reads the policy
    after it has made its connector. A cache may lose anything, so nobody needs to choose.
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info("hybridkv: what a failed load does not give is computed")
