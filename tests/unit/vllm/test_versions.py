"""Everything that is taken from vLLM is there, and every hook of its connectors is decided on.

`scripts/test --vllm VERSION tests/unit/vllm/test_versions.py` asks another version.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from hybridkv.connector.connector import HybridKVConnector
from hybridkv.multi.connector import MultiConnector
from hybridkv.vllm.proven import PROVEN

SOURCE = Path(__file__).parents[3] / "src" / "hybridkv"
LEFT = {
    "bind_gpu_block_pool": "bind_kv_cache_manager gives more",
    "bind_connector_metadata": "the base class keeps it",
    "clear_connector_metadata": "the base class keeps it",
    "has_connector_metadata": "the base class keeps it",
    "role": "the base class keeps it",
    "finish_forward": "nothing is saved layer by layer",
    "reset_capture_state": "nothing is saved layer by layer",
    "requires_piecewise_for_cudagraph": "False: nothing is saved layer by layer",
    "get_block_ids_with_load_errors": "get_transfer_results tells which requests failed",
    "get_finished": "get_transfer_results tells which requests ended",
    "get_finished_count": "None: every rank reports",
    "get_kv_connector_kv_cache_events": "take_events of the scheduler role has them",
    "get_mem_pool_context": "None: any memory can be copied",
    "get_required_kvcache_layout": "None: any layout can be copied",
    "get_loaded_kv_cache_group_ids": "the cacheable groups are what is loaded",
    "has_pending_block_frees": "no block is held after its request",
    "register_finished_partial_tail": "no object ends inside a block",
    "set_host_xfer_buffer_ops": "no buffer of vLLM's is used",
    "supports_sleep_mode": "True: unregister_kv_caches does what is needed",
    "supports_divergent_local_hybrid_hits": "False: the engine's hit is the shortest of its groups",
}
"""Hooks that this package leaves to vLLM's base class, and why."""
FORWARDED = {"bind_kv_cache_manager", "register_kv_caches", "requires_kv_delivery"}
"""Hooks that vLLM's MultiConnector hands to the connectors inside, as this package's does."""
MODULES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of all that a source imports from vLLM, but where it has a way without."""
    tree = ast.parse(path.read_text())
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom)
    }
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node not in optional
        for alias in node.names
        if node.module and node.module.split(".")[0] == "vllm"
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_is_imported_from_vllm_is_there(path: Path) -> None:
    for module, name in imported(path):
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


def hooks() -> list[str]:
    bases = KVConnectorBase_V1, SupportsHMA
    return sorted({name for base in bases for name in dir(base) if not name.startswith("_")})


@pytest.mark.parametrize("connector", [HybridKVConnector, MultiConnector])
def test_every_hook_is_ours_or_left_for_a_reason(connector: type) -> None:
    """A new hook of a new vLLM fails here until somebody has said what it means."""
    ours = {
        name
        for base in connector.__mro__
        if base.__module__.startswith("hybridkv")
        for name in base.__dict__
    }
    left = {*LEFT} | (FORWARDED if connector is MultiConnector else set())
    assert set(hooks()) - ours - left == set()


@pytest.mark.parametrize("connector", [HybridKVConnector, MultiConnector])
def test_hooks_take_what_vllm_calls_them_with(connector: type) -> None:
    for name in hooks():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        ours = getattr(connector, name)
        if callable(theirs) and ours is not theirs:
            parameters = inspect.signature(theirs).parameters.values()
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            arguments = {
                parameter.name: None for parameter in parameters if parameter.kind not in variadic
            }
            signature = inspect.signature(ours)
            signature.bind(*arguments)
            kinds = {parameter.kind for parameter in signature.parameters.values()}
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                signature.bind(**arguments)


def test_versions_are_named_in_the_documents() -> None:
    root = SOURCE.parents[1]
    for page in ("README.md", "docs/supported.md"):
        text = (root / page).read_text()
        assert all(version in text for version in (min(PROVEN), max(PROVEN))), page
