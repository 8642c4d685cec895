"""Engines that differ in one thing each: their identities, and the bytes of their KV caches.

Run as `python -m tests.engine.fields.probe`. Reads cases as lines of JSON, and prints a line for
each. Every engine is a fork of this process, which has imported torch and, for cases without
environment variables, vLLM too: that is most of what an engine's start costs.
"""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_TOKENS, GENERATED_TOKENS = 630, 16  # The last block of a group is filled while decoding.
REQUEST_SECONDS = 120.0


def main() -> None:
    """Run one engine after the other. Those with variables come before vLLM reads any."""
    for name in ("torch", "transformers"):
        importlib.import_module(name)
    cases = [json.loads(line) for line in sys.stdin]
    early = [case for case in cases if case["environment"]]
    for case in early:
        _fork(case)
    if len(early) < len(cases):
        importlib.import_module("hybridkv.lab.runner")
    for case in cases:
        if not case["environment"]:
            _fork(case)


def _fork(case: Mapping[str, Any]) -> None:
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    status = 1
    with contextlib.suppress(BaseException):
        os.environ.update(case["environment"])
        try:
            found = _probed(case["arguments"], case["adapter"])
        except BaseException as error:  # noqa: BLE001  # vLLM's refusals are of any kind
            found = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": case["name"], **found}), flush=True)
        status = 0
    os._exit(status)


def _probed(arguments: Sequence[str], adapter: str) -> dict[str, Any]:
    from vllm import SamplingParams  # the environment is set before
    from vllm.lora.request import LoRARequest

    from hybridkv.core.keys import fingerprint
    from hybridkv.lab.runner import make_engine
    from tests.engine.support import prompt

    engine = make_engine([*arguments])
    core: Any = engine.engine_core.engine_core
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(max_tokens=GENERATED_TOKENS, **greedy)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    tokens = {"prompt_token_ids": prompt(1, PROMPT_TOKENS)}
    engine.add_request("r", tokens, sampling, lora_request=lora)
    deadline, generated = time.monotonic() + REQUEST_SECONDS, 0
    while generated < GENERATED_TOKENS - 1:
        generated = sum(len(output.outputs[0].token_ids) for output in engine.step())
        assert time.monotonic() < deadline, "the request is never answered"
    facts = core.scheduler.connector.scheduler_role.session.facts
    return {"identity": fingerprint(facts).hex(), "facts": facts, "kv": _kv(core.scheduler)}


def _kv(scheduler: Any) -> str:
    """Digest of the only request's blocks that are full, and of its recurrent states."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.kv_cache_interface import MambaSpec

    worker: Any = get_kv_transfer_group()
    groups, digest = worker.worker_role.factory.shards[0].groups, hashlib.blake2b(digest_size=16)
    (request,) = scheduler.requests.values()
    tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    config = scheduler.kv_cache_config
    for gid, layers in zip(config.prefix_cacheable_group_ids, groups, strict=True):
        spec = config.kv_cache_groups[gid].kv_cache_spec
        full = request.num_computed_tokens // spec.block_size + isinstance(spec, MambaSpec)
        for layer in layers:
            for block in filter(None, tables[gid][:full]):
                digest.update(layer[block].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
