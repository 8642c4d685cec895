"""Engines that differ in one thing each, all on one daemon.

Run as `python -m tests.engine.identities SOCKET NAME`; prints the tokens that the engine of that
name loads. An engine that loads has the identity of one that stored before it.
"""

import json
import sys
import time
from typing import Any

from vllm import SamplingParams

from hybridkv.connector.metrics import TOKENS_LOADED
from hybridkv.lab.models import bundled_arguments, bundled_models
from hybridkv.lab.runner import make_engine
from hybridkv.lab.wide_weights import widen_weights
from tests.engine.ready import await_write_slots
from tests.engine.support import LOOKUP_TIMEOUT_MS, prompt

TOKENS = 3 * 256 + 20
REQUEST_SECONDS = 120.0

BASE = "base"
CHANGES: dict[str, dict[str, Any]] = {
    BASE: {},
    "same, asked for twice": {},
    "cache_salt": {"salt": "tenant-7"},
    "a salt that is no UTF-8": {"salt": "u\ud800"},
    "that salt again": {"salt": "u\ud800"},
    "seed, of which the weights are independent": {"arguments": ["--seed=1"]},
    "weights": {"is_widened": True},
    "weights_identity": {"extra": {"weights_identity": "another"}},
    "config (RoPE)": {
        "arguments": [
            '--hf-overrides={"rope_parameters":{"rope_type":"default","rope_theta":5000.0}}'
        ]
    },
    "dtype": {"arguments": ["--dtype=bfloat16"]},
    "KV dtype": {"arguments": ["--kv-cache-dtype=fp8"]},
    "block size": {"arguments": ["--block-size=256"]},
    "chunk": {"extra": {"hybrid_chunk_size": 256}},
    "hash algorithm": {"arguments": ["--prefix-caching-hash-algo=sha256_cbor"]},
    "own hashes": {"arguments": ["--prefix-caching-hash-algo=xxhash"]},
    "own hashes, other salt": {
        "arguments": ["--prefix-caching-hash-algo=xxhash"],
        "salt": "tenant-7",
    },
    "own hashes, again": {"arguments": ["--prefix-caching-hash-algo=xxhash"]},
    "nothing": {},
}


def tokens_loaded(
    socket_path: str,
    arguments: list[str] | None = None,
    extra: dict[str, Any] | None = None,
    salt: str | None = None,
    is_widened: bool = False,
) -> int:
    """Returns how many tokens a new engine loads of the prompt that all engines get.

    With `is_widened` the engine has other weights.
    """
    transfer = {
        "kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": f"unix://{socket_path}",
            "lookup_timeout_ms": LOOKUP_TIMEOUT_MS,
            "audit": "off",
            **(extra or {}),
        },
    }
    if is_widened:
        widen_weights(7, 0.08)
    engine = make_engine(
        [
            f"--model={bundled_models()['qwen3']}",
            *bundled_arguments("qwen3"),
            *(arguments or ()),
            "--kv-transfer-config",
            json.dumps(transfer),
        ]
    )
    await_write_slots(engine)
    core: Any = engine.engine_core.engine_core
    request: dict[str, Any] = {"prompt_token_ids": prompt(1, TOKENS)}
    if salt is not None:
        request["cache_salt"] = salt
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=2)
    engine.add_request("r", request, sampling)
    deadline = time.monotonic() + REQUEST_SECONDS
    while engine.has_unfinished_requests() or core.scheduler.has_requests():
        engine.step()
        assert time.monotonic() < deadline, "the request is never answered"
    return int(core.scheduler.connector.counters.get(TOKENS_LOADED, 0))


def main() -> None:
    """Print the tokens that the engine of one name loads."""
    socket_path, name = sys.argv[1:]
    print(json.dumps({"name": name, "loaded": tokens_loaded(socket_path, **CHANGES[name])}))


if __name__ == "__main__":
    main()
