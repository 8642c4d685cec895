"""What the proofs of `hybridkv verify` share: their engines, prompts, and the daemon's counters."""

import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.configuration import inspect_model
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.judging import Variety
from hybridkv.lab.models import (
    WIDEN_SEED,
    bundled_arguments,
    bundled_environment,
    bundled_models,
    check_served,
    computes_16_bits,
    is_cpu_build,
)
from hybridkv.lab.prompts import (
    CHUNKS_MIN,
    WINDOWS,
    EngineBounds,
    cut_prompts,
    engine_bounds,
    english,
    names_option,
    read_model_files,
    wanted_chunks,
)
from hybridkv.wire.messages import WireGeometry

MAX_TOKENS = 16
RAM = "1GiB"  # Of a daemon, for a bundled model.
SETTLE_SECONDS = 5.0
SETTLED_COUNTERS = (
    "tokens_loaded",
    "bytes_loaded",
    "loads_failed",
    "objects_stored",
    "bytes_stored",
)
ENGLISH, RANDOM_TOKENS = "English text", "random tokens"


class VerifyRequest(NamedTuple):
    """The engine and the daemons of a proof, and how it is made."""

    model: str  # A model directory, a hub name, or the name of a bundled model.
    vllm_arguments: Sequence[str]
    ram: str | None  # The size of the daemon's memory. None = as the model needs.
    repeat: int = 0  # Further prompts, that are repeated after restarts and on another node.
    flip: str | None = None  # "detect" or "blind": one stored byte is made wrong.
    nodes: int = 1  # Over which the ranks of the engine are spread.


class Proof:
    """The engines of a proof, which have one configuration, and its prompts."""

    def __init__(self, request: VerifyRequest, *, logs: Path, say: Callable[[str], None]) -> None:
        """Engines have their logs in `logs`, and `say` prints what is done next.

        Raises ConfigError where there is no such model, or this machine cannot serve it.
        """
        self._request = request
        self._logs, self._say = logs, say
        self._engines_started = 0
        self._engine_began = 0.0  # When the last engine began to start.
        self._environment: Mapping[str, str] = {}
        model = request.model
        bundled = bundled_models().get(model)
        self._arguments = [f"--model={bundled or model}"]
        if bundled is not None:
            check_served(model, request.vllm_arguments)
            self._arguments += bundled_arguments(model)
            self._environment = bundled_environment(model)
        elif not Path(model).is_dir() and ("/" not in model or model.startswith((".", "/"))):
            missing = f"there is no directory {model}"
            named = missing if "/" in model else f"{model!r} is not bundled"
            raise ConfigError(f"--model: {named}", f"{', '.join(bundled_models())} work")
        self._model = None if bundled else model
        self._given = request.vllm_arguments
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            what = "VLLM_ENABLE_V1_MULTIPROCESSING=1 hides the block pool, which one arm must empty"
            raise ConfigError(what, "VLLM_ENABLE_V1_MULTIPROCESSING=0 works")
        self.chunk_tokens = 0
        self.groups = ""
        self.prompt_source = RANDOM_TOKENS
        self.variety = Variety(0, 0, 0)
        self.warnings: list[str] = []  # Why equal answers prove little.
        self.seconds = 0.0
        self._chunks = CHUNKS_MIN  # Whole chunks of a prompt.
        self._stateless_tokens = 0
        """How many tokens earlier the last state of a prompt stands. vLLM plans its steps by the
        block that its own hits with a drafter drop."""

    def _start_engine(self, what: str, transfer: str | None) -> EngineProcess:
        """Start an engine with vLLM's --kv-transfer-config, or without one, for an oracle."""
        self._say(f"starting: {what}")
        arguments = list(self._arguments)
        if transfer is not None:
            arguments += ["--kv-transfer-config", transfer]
        elif not self._stateless_tokens:
            # The oracle is a hit of the same length, of the same prompt: nothing in it is stale.
            arguments = [*map(_without_block_drop, arguments)]
        self._engines_started += 1
        self._engine_began = time.monotonic()
        log_path = self._logs / f"engine-{self._engines_started}.log"
        return EngineProcess(arguments, log_path, self._say, self._environment)

    def _read_preview(self, transfer: str) -> ConfigPreview | None:
        """Return what such an engine would be. None = the engine itself says what is wrong.

        Raises ConfigError where it could not be served.
        """
        words = [*self._given, "--kv-transfer-config", transfer]
        report = inspect_model(self._model, words, self._say_waiting)
        for finding in report.findings:
            if finding.verdict is Verdict.FAIL:
                raise ConfigError(finding.what, finding.remedy)
        return report.preview

    def _bounds_for(self, preview: ConfigPreview, context: int, prompts: int) -> EngineBounds:
        """Return the bounds of an engine for prompts of `context` tokens, `prompts` at once."""
        # A drafter makes the engine's own hits shorter by a block.
        context += max(group.tokens_per_block for group in preview.groups)
        if names_option(self._given, "--max-model-len"):
            context = max(context, preview.max_model_len)
        files = read_model_files(Path(self._model or ""))
        on_cpu = is_cpu_build()
        keeps_dtype = names_option(self._given, "--dtype") or files.is_quantized
        return engine_bounds(
            preview,
            context,
            prompts,
            on_cpu=on_cpu,
            widen=on_cpu and not keeps_dtype and not computes_16_bits(),
            weights_bytes=files.weights_bytes,
        )

    def _say_waiting(self, seconds: float) -> None:
        self._say(f"  vLLM reads the configuration, since {seconds:.0f} s")

    def _choose_length(
        self, engine: EngineProcess, geometry: WireGeometry, chunks_min: int = CHUNKS_MIN
    ) -> int:
        """Choose how many whole chunks a prompt has. Returns its length in tokens.

        Raises ConfigError where the engine takes no prompt of `chunks_min` chunks.
        """
        max_model_len = engine.info["max_model_len"]
        # The engine's own hits end at multiples of the unit.
        tail_tokens = min(geometry.alignment_tokens, max(3, self.chunk_tokens // 3))
        tail_tokens += self._stateless_tokens
        room = (max_model_len - MAX_TOKENS - tail_tokens) // self.chunk_tokens
        windows = [group.window_tokens for group in geometry.groups]
        wanted = max(chunks_min, wanted_chunks(self.chunk_tokens, windows))
        self._chunks = max(chunks_min, min(wanted, room))
        length = self._chunks * self.chunk_tokens + tail_tokens
        if length + MAX_TOKENS > max_model_len:
            raise ConfigError(
                f"max_model_len={max_model_len} is too short for {chunks_min} chunks of "
                f"{self.chunk_tokens} tokens",
                f"-- --max-model-len {length + MAX_TOKENS} works",
            )
        if self._chunks < wanted:
            self.warnings.append(
                f"prompts of {length} tokens have less than {WINDOWS:g} windows of "
                f"{max(windows)} tokens; a longer --max-model-len proves more"
            )
        return length

    def _texts(self, engine: EngineProcess, count: int, length: int) -> list[list[int]]:
        """Return prompts of one length: English text, or random tokens without a tokenizer."""
        encoded = engine.encode_text(english(count * length))
        beginning, tokens = encoded["beginning"], encoded["tokens"]
        if len(tokens) > count:
            self.prompt_source = ENGLISH
            cut = cut_prompts(tokens, count, length - len(beginning))
            return [[*beginning, *text] for text in cut]
        if self._model is not None:
            self.warnings.append("the engine has no tokenizer, so the prompts are random tokens")
        drawn = range(2, engine.info["vocab_size"])
        return [random.Random(WIDEN_SEED + at).choices(drawn, k=length) for at in range(count)]

    def _generate(self, engine: EngineProcess, *prompts: list[int]) -> list[dict[str, Any]]:
        """Returns answers of MAX_TOKENS. Several prompts share a pool that runs out of blocks."""
        results = engine.generate(*prompts, max_tokens=MAX_TOKENS, starve=len(prompts) > 1)
        check_answers(results)
        return results


def check_answers(results: Sequence[Mapping[str, Any]]) -> None:
    """Raise HybridKVError where an answer has another length than MAX_TOKENS."""
    for result in results:
        if (count := len(result.get("tokens", ()))) != MAX_TOKENS:
            raise HybridKVError(f"the engine gave {count} tokens instead of {MAX_TOKENS}")


def ram_size(bounds: EngineBounds) -> str:
    """Return the memory of a daemon as its option --ram takes it, like "1024MiB"."""
    return f"{math.ceil(bounds.ram_bytes / (1 << 20))}MiB"


def read_stats(socket_path: str) -> dict[str, float]:
    """Return the values of the daemon at a socket."""
    with ControlClient(socket_path) as control:
        return control.stats().values


def settled_stats(socket_path: str) -> dict[str, float]:
    """Return the daemon's values once they stand still: some messages have no answer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    last = read_stats(socket_path)
    while time.monotonic() < deadline:
        now = read_stats(socket_path)
        still = all(now.get(key) == last.get(key) for key in SETTLED_COUNTERS)
        if now["leases"] == 0 and still and not now.get("writes_waiting"):
            break
        last = now
    return last


def _without_block_drop(argument: str) -> str:
    """An argument of vLLM. In --speculative-config, its own hits get their full length.

    '--speculative-config={"method":"mtp"}' -> the same with "disable_eagle_block_drop": true
    """
    option, text = argument, ""
    if argument.startswith("{"):
        option, text = "", argument
    elif argument.startswith("--speculative-config="):
        option, _, text = argument.partition("=")
    if '"method"' not in text:
        return argument
    text = json.dumps({**json.loads(text), "disable_eagle_block_drop": True})
    return f"{option}={text}" if option else text
