"""One real engine in a process of its own, told what to do in JSON lines. Started by `hybridkv verify`.

Commands come on standard input, answers go to the descriptor named by the first argument, vLLM's log to standard
error. Everything after that argument is vLLM's.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

if "HYBRIDKV_SHIMS" in os.environ:
    # Here, because spawned workers of several ranks import this module too, before they import a model.
    importlib.import_module("hybridkv.testing.shims")

LOGPROBS = 5
STEP_SECONDS_MAX = 600.0


def make_engine(arguments: list[str]) -> LLMEngine:
    """An engine from vLLM's own command line arguments."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(arguments)))


class Runner:
    """Drives one engine step by step."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._requests = 0
        self._adapters: dict[str, int] = {}

    def info(self) -> dict[str, Any]:
        """What prompts must know about the model."""
        model = self._engine.vllm_config.model_config
        return {
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
        }

    def run(
        self, prompts: list[list[int]], max_tokens: int, starve: bool = False, adapter: str | None = None
    ) -> list[dict[str, Any]]:
        """Generate for all prompts at once; tokens, exact log-probabilities, cached tokens, times in seconds.

        `adapter` is the directory of a LoRA adapter.

        With `starve` the block pool is empty from the first tokens on, until nothing runs any more: a request that
        needs a block is preempted, and comes back to a pool in which its own old blocks are gone.
        """
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=max_tokens, logprobs=LOGPROBS
        )
        lora = None
        if adapter is not None:
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            lora = LoRARequest(Path(adapter).name, number, adapter)
        results: dict[str, dict[str, Any]] = {}
        started = time.perf_counter()
        for prompt in prompts:
            self._requests += 1
            request_id = f"verify-{self._requests}"
            results[request_id] = {"ttft_seconds": None}
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)
        slowest_decode = 0.0
        pool = _Pool(self._engine) if starve else None
        while self._engine.has_unfinished_requests():
            if pool is not None and all(result["ttft_seconds"] is not None for result in results.values()):
                pool.starve()
            step_started = time.perf_counter()
            outputs = self._engine.step()
            now = time.perf_counter()
            if all(result["ttft_seconds"] is not None for result in results.values()):
                slowest_decode = max(slowest_decode, now - step_started)
            for output in outputs:
                result = results[output.request_id]
                completion = output.outputs[0]
                if result["ttft_seconds"] is None and completion.token_ids:
                    result["ttft_seconds"] = now - started
                result["tokens"] = list(completion.token_ids)
                result["finish_reason"] = completion.finish_reason
                result["cached_tokens"] = output.num_cached_tokens
                result["logprobs"] = [
                    sorted((token, entry.logprob) for token, entry in position.items())
                    for position in completion.logprobs or []
                ]
            if now - started > STEP_SECONDS_MAX:
                raise TimeoutError(f"requests unfinished after {STEP_SECONDS_MAX:g} s")
        if pool is not None:
            pool.release()
        common = {"slowest_decode_step_seconds": slowest_decode, "preemptions": 0 if pool is None else pool.preemptions}
        return [{**result, **common} for result in results.values()]

    def reset(self, connector: bool) -> bool:
        """Forget the engine's own prefix cache, and the connector's where `connector` says so."""
        return bool(self._engine.reset_prefix_cache(reset_connector=connector))


class _Pool:
    """The block pool of an engine whose core is in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self._held: list[Any] = []
        self._over = False
        self._counts: dict[str, int] = {}

    @property
    def preemptions(self) -> int:
        """How often requests were preempted."""
        return sum(self._counts.values())

    def starve(self) -> None:
        """Before a step: leave no free block; from the step on in which no request runs, leave all."""
        self._counts |= {name: request.num_preemptions for name, request in self._scheduler.requests.items()}
        if self._over:
            return
        if self._scheduler.running:
            self._held += self._blocks.get_new_blocks(self._blocks.get_num_free_blocks())
        else:
            self.release()

    def release(self) -> None:
        """Give all blocks back."""
        self._over = True
        self._blocks.free_blocks(self._held)
        self._held = []


def main() -> None:
    """Serve commands until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(value: object) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        runner = Runner(make_engine(sys.argv[2:]))
        answer(runner.info())
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "run":
                answer(runner.run(**{key: value for key, value in command.items() if key != "do"}))
            else:
                answer(runner.reset(command["connector"]))


if __name__ == "__main__":
    main()
