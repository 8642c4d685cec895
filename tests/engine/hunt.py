"""`python -m tests.engine.hunt CASE [--model NAME] [-- VLLM ARGUMENTS]`: unusual requests.

A real engine is given what its users may send and do: every kind of sampling, embeddings, a very
long prompt, sessions whose input arrives in pieces, aborts, resets and pauses while loads run, a
block pool that is too small, tiers that are killed or full. Every answer with a hit from outside
must be that of the engine's own prefix cache. Ends with an error where one is not.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from hybridkv.connector.metrics import LOADS_DONE, LOADS_FAILED, PLAN_FAILED, TOKENS_LOADED
from hybridkv.core.metrics import Metric
from hybridkv.daemon.filesystem import arena_bytes, stale_arenas
from hybridkv.daemon.loop import RESERVE_AHEAD_BYTES, RESERVE_STEP_BYTES
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.judging import NOISE_MIN, answer_deviation, answer_of
from hybridkv.lab.models import bundled_environment, bundled_models
from hybridkv.shm.arena import SHM_DIR
from hybridkv.vllm.hints import READ, WRITE
from hybridkv.vllm.hook_guard import FAULTS, FAULTS_MAX, QUARANTINED, SWITCHED_OFF
from tests.engine.soak import ONE_THREAD
from tests.engine.support import arguments_of, prompt, stats
from tests.waiting import until

SEED = 20261123
STEPS_MAX = 20_000  # An engine that takes more steps for what it was given hangs.
TOKENS = 6
LONG_TOKENS = 100_000
SALTED = FAULTS_MAX + 5
STORM_PROMPTS, STORM_ROUNDS = 8, 6
STORM_SECONDS_MAX = 300.0
"""The storm ends then on any machine. A round takes two seconds where the machine is quiet."""
PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 120.0
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "three sampled answers": {"n": 3, "temperature": 1.0},
    "log-probabilities of the prompt": {"prompt_logprobs": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "a bias": {"logit_bias": {5: 10.0}},
    "stop tokens": {"min_tokens": 3, "stop_token_ids": list(range(2, 400))},
    "no reading of the cache": {"skip_reading_prefix_cache": True},
    "not stored": {"extra_args": {"kv_transfer_params": {WRITE: False}}},
    "not loaded": {"extra_args": {"kv_transfer_params": {READ: False}}},
}


class Hunted:
    """An engine in this process, driven step by step."""

    def __init__(self, arguments: list[str]) -> None:
        from hybridkv.lab.runner import make_engine

        self.engine = make_engine(arguments)
        scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.connector = scheduler.connector
        self.chunk_tokens: int = self.connector.scheduler_role.geometry.chunk_tokens
        self._numbers = 0

    def __enter__(self) -> "Hunted":
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.engine_core.shutdown()

    def add(self, text: list[int], priority: int = 0, salt: str = "", **params: Any) -> str:
        """Give the engine a request, and return the request's name."""
        from vllm import SamplingParams

        self._numbers += 1
        name = f"hunt-{self._numbers}"
        greedy = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": 5, "detokenize": False}
        given: Any = {"prompt_token_ids": list(text), **({"cache_salt": salt} if salt else {})}
        sampling = SamplingParams(**{**greedy, "ignore_eos": True, **params})
        self.engine.add_request(name, given, sampling, priority=priority)
        return name

    def drive(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Step until nothing runs, and return the last output of each request."""
        outputs: dict[str, Any] = {}
        for _ in range(STEPS_MAX):
            if not self.engine.has_unfinished_requests():
                return outputs
            outputs |= {output.request_id: output for output in self.engine.step()}
            meanwhile()
        raise TimeoutError(f"requests are unfinished after {STEPS_MAX} steps")

    def loaded(self) -> int:
        """Returns how many tokens came from outside so far."""
        return int(self.connector.counters.get(TOKENS_LOADED, 0))

    def faults(self) -> dict[Metric, int]:
        """Returns the counters of faults, which must all be missing."""
        counters: Mapping[Metric, int] = self.connector.counters
        bad = {SWITCHED_OFF, QUARANTINED, LOADS_FAILED, PLAN_FAILED}
        bad |= {metric for metric in counters if metric.family in (FAULTS, "daemon_refusals")}
        return {metric: counters[metric] for metric in bad & counters.keys()}


def as_from_outside(
    hunted: Hunted, what: str, ask: Callable[[], Any], answer: Callable[[Any], Any]
) -> None:
    """Check that a hit from outside gives the answer of the engine's own hit of that length."""
    ask()
    own = ask()
    assert hunted.engine.reset_prefix_cache()
    before = hunted.loaded()
    hit = ask()
    loaded = hunted.loaded() - before
    print(f"{what}: {own.num_cached_tokens} own, {hit.num_cached_tokens} from outside", flush=True)
    assert loaded >= hit.num_cached_tokens, what
    if own.num_cached_tokens == hit.num_cached_tokens:
        assert answer(hit) == answer(own), what


def hunt_sampling(socket_path: str, model: str, arguments: list[str]) -> None:
    """Ask for every kind of sampling, with prompts that end at a boundary or beside it."""
    with Hunted(
        arguments_of(model, socket_path, "--max-num-batched-tokens=512", *arguments)
    ) as hunted:
        chunk = hunted.chunk_tokens
        cases = {what: (prompt(SEED, 3 * chunk + 40), given) for what, given in SAMPLING.items()}
        for tokens in (chunk, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1):
            cases[f"{tokens} tokens"] = prompt(SEED + tokens, tokens), {}
        for what, (text, given) in cases.items():

            def ask(text: list[int] = text, given: Any = given, salt: str = what) -> Any:
                name = hunted.add(text, salt=salt, **given)
                return hunted.drive()[name]

            as_from_outside(hunted, what, ask, answer_of if "n" not in given else len_of)
        assert not hunted.faults(), hunted.faults()


def len_of(output: Any) -> int:
    """Returns what two answers without a seed have in common: how many outputs there are."""
    return len(output.outputs)


def hunt_embeddings(socket_path: str, model: str, arguments: list[str]) -> None:
    """Run the model as one of embeddings."""
    from vllm import PoolingParams

    with Hunted(arguments_of(model, socket_path, "--runner=pooling", *arguments)) as hunted:
        text = prompt(SEED, 5 * hunted.chunk_tokens + 40)
        for task in hunted.engine.get_supported_tasks():

            def ask(task: Any = task) -> Any:
                given: Any = {"prompt_token_ids": list(text)}
                hunted.engine.add_request("hunt", given, PoolingParams(task=task))
                (output,) = hunted.drive().values()
                return output

            as_from_outside(hunted, task, ask, lambda output: output.outputs.data.tolist())
        assert not hunted.faults(), hunted.faults()


def hunt_long(socket_path: str, model: str, arguments: list[str]) -> None:
    """Ask for a prompt of more than 64k tokens."""
    settings = (
        "--max-model-len=131072",
        '--hf-overrides={"max_position_embeddings":131072}',
        "--max-num-batched-tokens=8192",
        f"--kv-cache-memory-bytes={1 << 30}",
    )
    with Hunted(arguments_of(model, socket_path, *settings, *arguments)) as hunted:
        text = prompt(SEED, LONG_TOKENS)

        def ask() -> Any:
            name = hunted.add(text)
            return hunted.drive()[name]

        as_from_outside(hunted, f"{LONG_TOKENS} tokens", ask, answer_of)
        assert not hunted.faults(), hunted.faults()


def hunt_salts(socket_path: str, model: str, arguments: list[str]) -> None:
    """Send salts that have no UTF-8 form, more than the faults that switch a role off."""
    with Hunted(arguments_of(model, socket_path, *arguments)) as hunted:
        text = prompt(SEED, 2 * hunted.chunk_tokens + 40)

        def ask(salt: str = "") -> Any:
            name = hunted.add(text, salt=salt)
            return hunted.drive()[name]

        salted = [answer_of(ask("u\ud800"))["tokens"] for _ in range(SALTED)]
        as_from_outside(hunted, f"after {SALTED} salts", ask, answer_of)
        assert salted == SALTED * [answer_of(ask())["tokens"]]
        assert not hunted.faults(), hunted.faults()


def hunt_memory(socket_path: str, model: str, arguments: list[str]) -> None:
    """Fill shared memory while the arena grows, and free it again: the arena goes on growing.

    The machine's shared memory must be this test's own.
    """
    (arena,) = stale_arenas(Path(socket_path))

    def held_bytes() -> int:
        return arena_bytes(arena)[1]

    with Hunted(arguments_of(model, socket_path, *arguments)) as hunted:
        until(lambda: held_bytes() >= RESERVE_AHEAD_BYTES, "what is reserved ahead")
        filler, seeds = SHM_DIR / "other", count(SEED)
        with filler.open("wb") as file, suppress(OSError):
            while True:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), 1 << 20)
        tokens = hunted.engine.model_config.max_model_len - TOKENS

        def ask() -> Any:
            name = hunted.add(prompt(next(seeds), tokens))
            return hunted.drive()[name]

        def has_failed() -> bool:
            return stats(socket_path).get("reserves_failed", 0) > 0

        until(lambda: ask() and has_failed(), "the arena finds no memory")
        grown_bytes = held_bytes() + 2 * RESERVE_STEP_BYTES
        filler.unlink()
        until(lambda: ask() and held_bytes() >= grown_bytes, "the arena grows")
        last = prompt(SEED, 4 * hunted.chunk_tokens)

        def ask_last() -> Any:
            name = hunted.add(last)
            return hunted.drive()[name]

        as_from_outside(hunted, "after the arena grew", ask_last, answer_of)
        assert not hunted.faults(), hunted.faults()


def hunt_storm(socket_path: str, model: str, arguments: list[str]) -> None:
    """Abort requests of all priorities at random, over a block pool that is too small."""
    settings = (
        "--scheduling-policy=priority",
        "--max-model-len=2048",
        "--num-gpu-blocks-override=40",
        "--max-num-batched-tokens=256",
        "--max-num-seqs=6",
    )
    patient: dict[str, object] = {"load_policy": "always", "load_timeout_seconds": 5}
    rng = random.Random(SEED)
    with Hunted(arguments_of(model, socket_path, *settings, *arguments, extra=patient)) as hunted:
        chunk = hunted.chunk_tokens
        texts = [prompt(SEED + at, rng.randrange(chunk, 6 * chunk)) for at in range(STORM_PROMPTS)]
        oracles: list[list[dict[str, Any]]] = []
        for text in texts:
            names = [hunted.add(text, salt="oracle", max_tokens=40)]
            answers = [answer_of(hunted.drive()[names[0]])]
            names = [hunted.add(text, salt="oracle", max_tokens=40)]
            oracles.append([*answers, answer_of(hunted.drive()[names[0]])])
        asked: dict[str, int] = {}
        judged, worst = 0, 0.0

        def ask() -> None:
            at = rng.randrange(STORM_PROMPTS)
            asked[hunted.add(texts[at], rng.randrange(5), max_tokens=40)] = at

        def abort() -> None:
            running = list(hunted.engine.output_processor.external_req_ids)
            if running and rng.random() < 0.03:
                hunted.engine.abort_request([rng.choice(running)])

        rounds, deadline = 0, time.monotonic() + STORM_SECONDS_MAX

        def is_over() -> bool:
            is_enough = rounds >= STORM_ROUNDS and LOADS_DONE in hunted.connector.counters
            return is_enough or time.monotonic() > deadline

        while not is_over():
            rounds += 1
            hunted.engine.reset_prefix_cache()
            asked.clear()
            for _ in range(10):
                ask()
            for name, output in hunted.drive(abort).items():
                if output.finished and output.outputs[0].finish_reason == "length":
                    found = answer_of(output)
                    judged += 1
                    worst = max(
                        worst,
                        min(answer_deviation(found, oracle) for oracle in oracles[asked[name]]),
                    )
        loads = hunted.connector.counters.get(LOADS_DONE, 0)
        print(f"{rounds} rounds, {judged} answers, {loads} loads, {worst=:.2g}", flush=True)
        assert judged
        assert loads, "nothing was loaded"
        assert worst < NOISE_MIN, "an answer is wrong"
        assert not hunted.faults(), hunted.faults()
    values = stats(socket_path)
    assert not values["leases"], "a lease is left"


async def _ask(engine: Any, text: Any, name: str, **params: Any) -> dict[str, Any]:
    """Returns the whole answer to a prompt, or to a session whose input `text` generates."""
    given = {"prompt_token_ids": list(text)} if isinstance(text, list) else text
    found: dict[str, Any] = {"tokens": [], "logprobs": [], "cached_tokens": None, "finish": None}
    async for output in engine.generate(given, _params(**params), name):
        reply = answer_of(output)
        found["tokens"] += reply["tokens"]
        found["logprobs"] += reply["logprobs"]
        if found["cached_tokens"] is None:
            found["cached_tokens"] = reply["cached_tokens"]
        found["finish"] = output.outputs[0].finish_reason
    return found


def _params(**params: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": 5, "detokenize": False}
    kind = RequestOutputKind.DELTA
    return SamplingParams(**{**greedy, "ignore_eos": True, "output_kind": kind, **params})


async def _pieces(texts: list[list[int]], max_tokens: int) -> AsyncGenerator[Any]:
    """Yields the input of a session, piece by piece."""
    from vllm.engine.protocol import StreamingInput

    for text in texts:
        given: Any = {"type": "token", "prompt_token_ids": list(text)}
        yield StreamingInput(given, _params(max_tokens=max_tokens))


async def _live(engine: Any, chunk: int) -> None:
    """Run sessions, aborts, resets and pauses of an engine of processes."""
    rng = random.Random(SEED)
    texts = [prompt(SEED + at, rng.randrange(chunk, 4 * chunk)) for at in range(STORM_PROMPTS)]
    oracles = [
        (await _ask(engine, text, "cold"), await _ask(engine, text, "own")) for text in texts
    ]

    def is_right(found: dict[str, Any], at: int) -> bool:
        return bool(found["tokens"][:TOKENS] == oracles[at][1]["tokens"][: len(found["tokens"])])

    parts = [prompt(SEED + 20 + at, n) for at, n in enumerate((chunk + 30, 2 * chunk, chunk - 7))]
    sessions = []
    for name in ("computed", "own", "outside"):
        sessions.append(await _ask(engine, _pieces(parts, 5), name))
        if name == "own":
            assert await engine.reset_prefix_cache()
    print("session:", [reply["cached_tokens"] for reply in sessions], flush=True)
    assert sessions[0]["tokens"] == sessions[1]["tokens"] == sessions[2]["tokens"]
    assert sessions[2]["cached_tokens"] == chunk

    async def aborted(at: int) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(_ask(engine, texts[at], "same name"), rng.random() * 0.05)

    for _ in range(5):
        assert await engine.reset_prefix_cache()
        storm = [aborted(rng.randrange(STORM_PROMPTS)) for _ in range(15)]
        good = [_ask(engine, text, f"r{at}") for at, text in enumerate(texts)]
        found = (await asyncio.gather(*storm, *good))[len(storm) :]
        assert all(is_right(reply, at) for at, reply in enumerate(found) if reply is not None)
        assert all(reply and reply["cached_tokens"] for reply in found), "nothing was hit"
    print("aborts: right", flush=True)
    for mode in ("reset", "keep", "wait", "abort"):
        running = [
            asyncio.create_task(_ask(engine, text, f"{mode}{at}", max_tokens=40))
            for at, text in enumerate(texts)
        ]
        await asyncio.sleep(0.05)
        # vLLM refuses a reset while a load runs, and goes on.
        with suppress(Exception):
            if mode == "reset":
                await engine.reset_prefix_cache(reset_running_requests=True)
            else:
                await engine.pause_generation(mode=mode, clear_cache=rng.random() < 0.5)
        late = [
            asyncio.create_task(_ask(engine, text, f"late{at}")) for at, text in enumerate(texts)
        ]
        await asyncio.sleep(PAUSE_SECONDS)
        await engine.resume_generation()
        answers = await asyncio.wait_for(asyncio.gather(*running, *late), ANSWER_SECONDS)
        print(f"{mode}:", [reply["finish"] for reply in answers], flush=True)
        for at, reply in enumerate(answers):
            assert is_right(reply, at % STORM_PROMPTS), (mode, at)
            assert reply["finish"] == "length" or (mode == "abort" and at < STORM_PROMPTS)
    assert await engine.reset_prefix_cache()
    await _ask(engine, texts[0], "last")
    assert await engine.reset_prefix_cache()
    last = await _ask(engine, texts[0], "last")
    assert last["cached_tokens"], "the cache is dead afterwards"
    assert is_right(last, 0)


def hunt_live(socket_path: str, model: str, arguments: list[str]) -> None:
    """Run sessions, aborts, resets and pauses in an engine of processes, as in production."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    settings = ("--max-num-batched-tokens=512", "--num-gpu-blocks-override=200")
    asked = parser.parse_args(arguments_of(model, socket_path, *settings, *arguments))

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(asked))
        try:
            await _live(engine, 128)
        finally:
            engine.shutdown()

    asyncio.run(run())


CASES: dict[str, Callable[[str, str, list[str]], None]] = {
    "sampling": hunt_sampling,
    "embeddings": hunt_embeddings,
    "long": hunt_long,
    "salts": hunt_salts,
    "memory": hunt_memory,
    "storm": hunt_storm,
    "live": hunt_live,
}


def main() -> int:
    """Run one of CASES."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.hunt", description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--model", default="gemma3", choices=sorted(bundled_models()))
    parser.add_argument("--ram", default="192MiB", help="the daemon's memory")
    parser.add_argument("arguments", nargs="*", help="vLLM's arguments, after --")
    options = parser.parse_args()
    defaults = {**ENGINE_ENVIRONMENT, **ONE_THREAD}
    os.environ.update({**defaults, **os.environ, **bundled_environment(options.model)})
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-hunt-") as directory,
        DaemonProcess(str(Path(directory) / "daemon.sock"), options.ram) as daemon,
    ):
        CASES[options.case](daemon.socket_path, options.model, options.arguments)
    print(f"{options.case}: nothing was found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
