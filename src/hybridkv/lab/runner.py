"""The child behind hybridkv.lab.engine_process: one real engine, which runs commands.

The arguments after the descriptor are vLLM's.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from hybridkv.lab.engine_process import CONNECTOR, NotServedError
from hybridkv.lab.judging import answer_of

LOGPROBS = 5
STEP_SECONDS_MAX = 600.0


class _StepTimes(NamedTuple):
    """The duration of a step in seconds."""

    wall: float
    processor: float  # Of all threads of this process.


def make_engine(arguments: list[str]) -> LLMEngine:
    """Return an engine from vLLM's own command line arguments.

    Raises NotServedError where vLLM itself has switched off what `verify` compares with.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    wanted = EngineArgs.from_cli_args(parser.parse_args(arguments))
    config = wanted.create_engine_config(UsageContext.ENGINE_CONTEXT)
    transfer = config.kv_transfer_config
    # `create_engine_config` has put vLLM's default into `wanted` where the user named no value.
    is_switched_off = wanted.enable_prefix_caching and not config.cache_config.enable_prefix_caching
    if is_switched_off and transfer is not None and transfer.kv_connector == CONNECTOR:
        raise NotServedError(NotServedError.TEXT)
    return LLMEngine.from_vllm_config(config, disable_log_stats=wanted.disable_log_stats)


class EngineRunner:
    """Runs requests on one engine, step by step."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._requests = 0
        self._drafts: dict[str, list[list[int]]] = {}  # The drafts of each request, by step.
        self._watch_drafts()

    def generate(
        self, prompts: list[list[int]], max_tokens: int, starve: bool = False
    ) -> list[dict[str, Any]]:
        """Generate for all prompts at once.

        Returns for each request its tokens, the tokens of each step, exact log-probabilities,
        cached tokens, and drafts (where vLLM schedules synchronously). Times are in seconds, on the
        clock and of all processors. They are those of the steps in which every request has a token
        already. With `starve` the block pool is empty from the first tokens on, until no request
        runs any more. A request that needs a block is preempted then, and comes back to a pool in
        which its own old blocks are gone.
        """
        started = time.perf_counter()
        results = self._add(prompts, max_tokens)
        decode: list[_StepTimes] = []
        pool = _BlockPool(self._engine) if starve else None
        while self._engine.has_unfinished_requests():
            if pool is not None and _all_have_tokens(results):
                pool.starve()
            is_decode = _all_have_tokens(results)
            step_started, processor_started = time.perf_counter(), time.process_time()
            outputs = self._engine.step()
            now = time.perf_counter()
            if is_decode:
                processor_seconds = time.process_time() - processor_started
                decode.append(_StepTimes(now - step_started, processor_seconds))
            for output in outputs:
                _add_output(output, results[output.request_id], now - started)
            if now - started > STEP_SECONDS_MAX:
                raise TimeoutError(f"requests unfinished after {STEP_SECONDS_MAX:g} s")
        self._settle()
        preemptions = 0 if pool is None else pool.release()
        for name, result in results.items():
            result["drafts"] = self._take_drafts(name)
        step_seconds = [step.wall for step in decode]
        common = {
            "slowest_decode_step_seconds": max(step_seconds, default=0.0),
            "decode_step_seconds": step_seconds,
            "decode_processor_seconds": [step.processor for step in decode],
            "preemptions": preemptions,
        }
        return [{**result, **common} for result in results.values()]

    def _take_drafts(self, request_id: str) -> list[list[int]]:
        """Return and forget the drafts of a request, whose name vLLM makes longer."""
        names = [n for n in self._drafts if n == request_id or n.startswith(f"{request_id}-")]
        return [draft for name in names for draft in self._drafts.pop(name)]

    def _watch_drafts(self) -> None:
        """Keep the drafts that the drafter proposes, in the order of the steps."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        update = scheduler.update_draft_token_ids

        def watched(proposed: Any) -> None:
            for name, drafts in zip(proposed.req_ids, proposed.draft_token_ids, strict=True):
                self._drafts.setdefault(name, []).append([*drafts])
            update(proposed)

        scheduler.update_draft_token_ids = watched

    def _settle(self) -> None:
        """Step on, as vLLM's own process does, until all stores of connectors have ended."""
        core = self._engine.engine_core.engine_core
        started = time.perf_counter()
        while core.scheduler.has_requests() or core.batch_queue:
            self._engine.step()
            if time.perf_counter() - started > STEP_SECONDS_MAX:
                raise TimeoutError(f"a connector is not done after {STEP_SECONDS_MAX:g} s")

    def _add(self, prompts: list[list[int]], max_tokens: int) -> dict[str, dict[str, Any]]:
        """Add a request for each prompt. Returns their results, still empty, by request."""
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(max_tokens=max_tokens, logprobs=LOGPROBS, **greedy)
        results: dict[str, dict[str, Any]] = {}
        for prompt in prompts:
            self._requests += 1
            request_id = f"verify-{self._requests}"
            results[request_id] = {"ttft_seconds": None}
            tokens = {"prompt_token_ids": prompt}
            self._engine.add_request(request_id, tokens, params)
        return results

    def encode_text(self, text: str) -> dict[str, list[int]]:
        """Return the tokens that every prompt begins with, and those of a text without them.

        Both are empty where the engine has no tokenizer.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return {"beginning": [], "tokens": []}
        beginning = list(tokenizer.encode(""))
        return {"beginning": beginning, "tokens": tokenizer.encode(text)[len(beginning) :]}

    def reset_caches(self, connector: bool) -> bool:
        """Empty the engine's own prefix cache, and with `connector` the connector's."""
        return bool(self._engine.reset_prefix_cache(reset_connector=connector))


def _all_have_tokens(results: dict[str, dict[str, Any]]) -> bool:
    return all(result["ttft_seconds"] is not None for result in results.values())


def _add_output(output: Any, result: dict[str, Any], seconds: float) -> None:
    """Add the output of a step to a request's result, `seconds` after the request came."""
    completion = output.outputs[0]
    step_tokens = len(completion.token_ids) - len(result.get("tokens", ()))
    result.setdefault("step_tokens", []).append(step_tokens)
    if result["ttft_seconds"] is None and completion.token_ids:
        result["ttft_seconds"] = seconds
    result.update(answer_of(output), finish_reason=completion.finish_reason)


class _BlockPool:
    """The block pool of an engine whose core is in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._blocks = self._scheduler.kv_cache_manager.block_pool
        self._held: list[Any] = []
        self._over = False
        self._preemptions: dict[str, int] = {}  # How often each request was preempted.

    def starve(self) -> None:
        """Take every free block before a step, or give all back once no request runs any more."""
        requests = self._scheduler.requests.items()
        self._preemptions |= {name: request.num_preemptions for name, request in requests}
        if self._scheduler.running and not self._over:
            self._held += self._blocks.get_new_blocks(self._blocks.get_num_free_blocks())
        else:
            self.release()

    def release(self) -> int:
        """Give all blocks back. Returns how often requests were preempted."""
        self._over = True
        self._blocks.free_blocks(self._held)
        self._held = []
        return sum(self._preemptions.values())


def main() -> None:
    """Make an engine, and run the commands that come until the connection ends."""
    with Connection(int(sys.argv[1])) as pipe:

        def answer(value: object) -> None:
            pipe.send_bytes(json.dumps(value).encode())

        try:
            engine = make_engine(sys.argv[2:])
        except NotServedError as error:
            answer({"not_served": error.REASON})
            return
        runner, model = EngineRunner(engine), engine.vllm_config.model_config
        scheduler = engine.engine_core.engine_core.scheduler
        drops_blocks = bool(scheduler.kv_cache_manager.coordinator.eagle_group_ids)
        info = {"max_model_len": model.max_model_len, "vocab_size": model.get_vocab_size()}
        tails = getattr(scheduler.connector, "tails", None)
        info["no_tails"] = tails.what if tails is not None and tails.remedy else ""
        answer({**info, "dropped_tokens": scheduler.block_size if drops_blocks else 0})
        commands: dict[str, Callable[..., object]] = {
            "generate": runner.generate,
            "encode_text": runner.encode_text,
            "reset_caches": runner.reset_caches,
        }
        # Until the parent has ended, or closed its side.
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                command = json.loads(pipe.recv_bytes())
                answer(commands[command.pop("do")](**command))


if __name__ == "__main__":
    main()
