"""The table of what enters a chunk's name has all that the installed vLLM reads for a block's hash.

`scripts/test --vllm VERSION tests/unit/vllm/test_names.py` asks another version.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[3] / "docs" / "RELIABILITY.md"
READERS = {
    "_gen_lora_extra_hash_keys",
    "_gen_mm_extra_hash_keys",
    "_gen_prompt_embeds_extra_hash_keys",
    "generate_block_hash_extra_keys",
    "get_request_block_hasher",
}
"""The functions of vLLM that read a request for the hash of a block."""
HASHING = {
    *READERS,
    "BlockHash",
    "generate_lookahead_block_hash_extra_keys",  # Of 0.33, which is off beside a connector.
    "get_mm_features_in_window",
    "hash_block_tokens",
    "tensor_data",
}
"""What these functions call, but for Python's own."""
NAMED = {"all_token_ids", "mm_features", "lora_request", "cache_salt", "prompt_embeds"}
"""What vLLM reads of a request that makes two names differ."""
COUNTED = {"block_hashes", "num_tokens", "_prompt_embeds_per_block_hashes"}
"""What follows from that."""
PARTS = {"identifier", "mm_position", "offset", "length", "lora_name", "lora_path"}
"""What vLLM reads of media and adapters."""
UNRELATED = {
    *("self", "request_id", "client_index", "session_id", "arrival_time", "priority"),
    *("sampling_params", "pooling_params", "reasoning_ended", "reasoning_parser_kwargs"),
    *("trace_headers", "block_hasher", "abort_immediately", "kv_hints"),
}
"""Parts of a request that choose tokens, order and bookkeeping, and change no KV of a token."""
JUDGED = {"prompt_token_ids", "prompt_is_token_ids", "resumable"}
"""The tokens; a mask of prompt embeddings, which have no names; sessions (`vllm.batch_faults`)."""


def functions() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(kv_cache_utils))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_vllm_reads_of_a_request_what_the_table_has() -> None:
    read, called, defined = set(), set(), functions()
    assert {name for name in defined if name.endswith("_extra_hash_keys")} <= READERS
    for name in READERS:
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner not in ("hashlib", "new_block_hashes", "extra_keys"):
                    read.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    assert NAMED <= read <= NAMED | COUNTED | PARTS | {"get", "digest"}
    assert called <= HASHING | {"len", "tuple"}


def test_each_part_of_a_request_was_judged() -> None:
    parameters = set(inspect.signature(Request.__init__).parameters)
    assert parameters <= NAMED | UNRELATED | JUDGED


def test_the_page_has_each_ingredient() -> None:
    section = PAGE.read_text().partition("## What enters a name")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    written = {name.partition(".")[0] for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert written - {"weights_identity"} == NAMED
