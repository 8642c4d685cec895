"""The proof of `hybridkv verify`: real engines are given the same prompts along every path."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.lab import judging
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import CONNECTOR, EngineProcess, NotServedError
from hybridkv.lab.judging import Measured, ReferenceAnswers, VerifyArm
from hybridkv.lab.models import WIDEN_SEED, bundled_arguments, bundled_environment, bundled_models
from hybridkv.wire.messages import describe_groups

CHUNKS = 5
"""Whole chunks of a prompt."""
LOCAL_CHUNKS = 2
"""Chunks of the prompt that the engine's own cache holds in the mixed arm."""
MAX_TOKENS = 16
KILLED_TOKENS = 64
"""Tokens of the arm in which the daemon is killed, so that it dies while the engine computes."""
PREEMPTED_PROMPTS = 3
PREEMPTED_AFTER = 4
"""Tokens after which the requests of the preempted arm need another block."""
DAEMON_SECONDS = 10.0
SETTLE_SECONDS = 5.0
SETTLED_COUNTERS = (
    *("tokens_loaded", "bytes_loaded", "loads_failed", "objects_stored", "bytes_stored"),
)


class Verification:
    """Runs the arms in order; each uses what the one before left behind."""

    checksum = "paranoid"

    def __init__(
        self,
        model: str,
        vllm_arguments: Sequence[str],
        ram: str,
        directory: Path,
        log_path: Path,
        say: Callable[[str], None],
    ) -> None:
        """What is proven: a model and vLLM's arguments, with a daemon of `ram` (a size)."""
        self._log_path, self._say = log_path, say
        self._socket_path = str(directory / "daemon.sock")
        self._environment: Mapping[str, str] = {}
        bundled = bundled_models().get(model)
        self._arguments = [f"--model={bundled or model}"]
        if bundled is not None:
            self._arguments += bundled_arguments(model)
            self._environment = bundled_environment(model)
        elif not Path(model).is_dir() and ("/" not in model or model.startswith((".", "/"))):
            missing = f"there is no directory {model}"
            named = missing if "/" in model else f"{model!r} is not bundled"
            raise ConfigError(f"--model: {named}", f"{', '.join(bundled_models())} work")
        self._arguments += vllm_arguments
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            what = "VLLM_ENABLE_V1_MULTIPROCESSING=1 hides the block pool, which one arm must empty"
            raise ConfigError(what, "VLLM_ENABLE_V1_MULTIPROCESSING=0 works")
        self._daemon = DaemonProcess(self._socket_path, ram)
        self.chunk_tokens = 0
        self.groups = ""
        self.distinct_tokens = 0
        """Of the first answer; one that repeats itself proves little."""
        self.seconds = 0.0

    def run(self) -> list[VerifyArm]:
        """Every arm; or the first alone, where vLLM lets no engine serve it."""
        started = time.monotonic()
        try:
            with self._daemon:
                measured = [*self._first_engine(), *self._second_engine()]
                reference = self._reference()
        except NotServedError:
            return [VerifyArm("cold", not_served=NotServedError.REASON)]
        finally:
            self.seconds = time.monotonic() - started
        self.distinct_tokens = len(set(reference.computed["tokens"]))
        if self.distinct_tokens == 1:
            self._say(
                "warning: this model repeats one token, so equal tokens prove little; "
                "log-probabilities still do"
            )
        expected = CHUNKS * self.chunk_tokens
        arms = [judging.judge_reference(len(self._prompt), expected, reference)]
        for one in measured:
            # The preempted arm alone has several prompts.
            judge = judging.judge if len(one.results) == 1 else judging.judge_preempted
            arms.append(judge(one, reference))
        return arms

    def _first_engine(self) -> Iterator[Measured]:
        with self._engine("first engine with hybridkv") as engine:
            with ControlClient(self._socket_path) as control:
                geometry = control.engines()[0].geometry
            self.chunk_tokens, self.groups = geometry.chunk_tokens, describe_groups(geometry.groups)
            self._make_prompts(engine.info)
            self._warm_up(engine)
            yield self._measure(engine, "cold", [self._prompt])
            self._forget(engine)
            yield self._measure(engine, "warm", [self._prompt], CHUNKS)
            self._compute_split(engine)
            engine.reset()
            engine.run(self._first_part, max_tokens=1)
            chunks = CHUNKS - LOCAL_CHUNKS, LOCAL_CHUNKS
            yield self._measure(engine, "mixed local and external", [self._split], *chunks)

    def _second_engine(self) -> Iterator[Measured]:
        with self._engine("second engine, started later") as engine:
            self._warm_up(engine)
            yield self._measure(engine, "engine restarted", [self._prompt], CHUNKS)
            engine.reset()
            yield self._measure_killed(engine, "daemon killed midway")
            # A new daemon runs, and the engine is connected to it.
            self._daemon.start()
            engine.reset()
            deadline = time.monotonic() + DAEMON_SECONDS
            while self._stats()["sessions"] < 1 and time.monotonic() < deadline:
                engine.run(self._prompt[: self.chunk_tokens // 2], max_tokens=1)
            yield self._measure(engine, "daemon restarted", [self._prompt], CHUNKS)
            # Several requests in a pool that runs out of blocks a few tokens after their prompts.
            yield self._measure(engine, "preempted", self._crowd, 1, starve=True)

    def _reference(self) -> ReferenceAnswers:
        with self._engine("engine without a connector", connector=False) as engine:
            self._warm_up(engine)
            computed, local_hit = (self._generate(engine, self._prompt) for _ in range(2))
            self._compute_split(engine)
            split_hit = self._generate(engine, self._split)
            alone = [self._generate(engine, prompt) for prompt in self._crowd]
            engine.reset()
            preempted = engine.run(*self._crowd, max_tokens=MAX_TOKENS, starve=True)
            noise = judging.deviation(preempted, alone)
            return ReferenceAnswers(computed, local_hit, split_hit, alone, noise)

    def _forget(self, engine: EngineProcess) -> None:
        """Empty the engine's own prefix cache before the warm arm."""
        engine.reset()

    def _measure(
        self,
        engine: EngineProcess,
        arm: str,
        prompts: Sequence[list[int]],
        external_chunks: int = 0,
        local_chunks: int = 0,
        starve: bool = False,
    ) -> Measured:
        """An arm, of which so many chunks must come from the connector and the own cache."""
        self._say(f"arm: {arm}")
        before = self._stats()
        if starve:
            results = engine.run(*prompts, max_tokens=MAX_TOKENS, starve=True)
        else:
            results = [self._generate(engine, prompt) for prompt in prompts]
        delta = {key: int(count - before.get(key, 0)) for key, count in self._settled().items()}
        expected, local = external_chunks * self.chunk_tokens, local_chunks * self.chunk_tokens
        return Measured(arm, sum(map(len, prompts)), results, delta, expected, local)

    def _measure_killed(self, engine: EngineProcess, arm: str) -> Measured:
        """The daemon gets a kill -9 as soon as it has answered the request's lookup."""
        self._say(f"arm: {arm}")
        lookups = self._stats().get("lookups", 0)
        engine.begin("run", prompts=[self._prompt], max_tokens=KILLED_TOKENS)
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._stats().get("lookups", 0) == lookups and time.monotonic() < deadline:
            pass
        self._daemon.kill()
        (result,) = engine.end()
        for key in ("tokens", "logprobs"):
            result[key] = result[key][:MAX_TOKENS]
        # Whether the load came first is chance; the engine's own count says what it computed from.
        loaded = {"tokens_loaded": result["cached_tokens"]}
        return Measured(arm, len(self._prompt), [result], loaded, None)

    def _generate(self, engine: EngineProcess, prompt: list[int]) -> dict[str, Any]:
        (result,) = engine.run(prompt, max_tokens=MAX_TOKENS)
        if (count := len(result.get("tokens", ()))) != MAX_TOKENS:
            raise HybridKVError(f"the engine gave {count} tokens instead of {MAX_TOKENS}")
        return result

    def _settled(self) -> dict[str, float]:
        """The daemon's counters once they stand still: some messages have no answer."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last = self._stats()
        while time.monotonic() < deadline:
            now = self._stats()
            still = all(now.get(key) == last.get(key) for key in SETTLED_COUNTERS)
            if now["leases"] == 0 and still:
                break
            last = now
        return last

    def _compute_split(self, engine: EngineProcess) -> None:
        """Compute a prompt in two parts: the blocks of the first are then the same in every engine.

        A kernel may give other last bits for the same tokens in a prompt of another length.
        """
        engine.reset()
        engine.run(self._first_part, max_tokens=1)
        engine.run(self._split, max_tokens=1)
        self._settled()

    def _warm_up(self, engine: EngineProcess) -> None:
        """Another prompt lets the engine compile what it compiles on first use, for TTFT's sake."""
        self._say("warming up")
        for length in (len(self._other), len(self._other) % self.chunk_tokens):
            engine.run(self._other[:length], max_tokens=2)

    def _make_prompts(self, info: Mapping[str, Any]) -> None:
        length = CHUNKS * self.chunk_tokens + max(3, self.chunk_tokens // 3)
        if length + MAX_TOKENS > info["max_model_len"]:
            raise ConfigError(
                f"max_model_len={info['max_model_len']} is too short for {CHUNKS} chunks of "
                f"{self.chunk_tokens} tokens",
                f"-- --max-model-len {length + MAX_TOKENS} works",
            )
        tokens = range(2, info["vocab_size"])
        self._prompt, self._other, self._split, *crowd = (
            random.Random(WIDEN_SEED + number).choices(tokens, k=length)
            for number in range(3 + PREEMPTED_PROMPTS)
        )
        self._first_part = self._split[: LOCAL_CHUNKS * self.chunk_tokens + 5]
        self._crowd = [text[: 2 * self.chunk_tokens - PREEMPTED_AFTER] for text in crowd]

    def _engine(self, what: str, connector: bool = True) -> EngineProcess:
        self._say(f"starting: {what}")
        arguments = list(self._arguments)
        if connector:
            extra = {"server": f"unix://{self._socket_path}", "checksum": self.checksum}
            transfer = {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": "hybridkv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**extra, "lookup_timeout_ms": 2000},
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        return EngineProcess(arguments, self._log_path, self._say, self._environment)

    def _stats(self) -> dict[str, float]:
        with ControlClient(self._socket_path) as control:
            return control.stats().values
