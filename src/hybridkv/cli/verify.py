"""`hybridkv verify`: real engines, the same prompt along every path, compared with the engine's own prefix cache.

The oracle is the engine's *own* prefix-cache hit of the same length: a full recompute may differ in the last bits,
because a kernel may take another numeric path when part of the prompt is cached.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridkv.cli.engine import Engine
from hybridkv.cli.plain import plain_console
from hybridkv.client.control import Control
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.sizes import format_size
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.inspect import committed_slots
from hybridkv.shm.slots import SlotHeader, payload_offset
from hybridkv.testing.daemon import DaemonProcess
from hybridkv.testing.models import WIDEN_SEED, bundled_arguments, bundled_environment, bundled_models

CHUNKS = 5
LOCAL_CHUNKS = 2
"""Chunks of the prompt that the engine's own cache holds in the mixed arm."""
MAX_TOKENS = 16
KILLED_TOKENS = 64
"""Tokens of the arm in which the daemon is killed, so that it dies while the engine still computes."""
PREEMPTED_PROMPTS = 3
PREEMPTED_AFTER = 4
"""Tokens after which the requests of the preempted arm need another block."""
NOISE_FACTOR = 4.0
NOISE_MIN = 1e-3
"""The preempted arm may be so many times farther from its oracle than the engine itself is.

A resumed request runs in another batch and from another boundary than a prompt alone, so last bits differ; in a 16-bit
model with experts they decide which expert is taken, and answers differ altogether, with a connector or without.
"""
DAEMON_SECONDS = 10.0
SETTLE_SECONDS = 5.0
RAM = "1GiB"
SETTLED_COUNTERS = ("tokens_loaded", "bytes_loaded", "loads_failed", "objects_stored", "bytes_stored")
_FLIP_BITS = 0x41


@dataclass
class Arm:
    """One row of the proof."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    external_tokens: int
    expected_external_tokens: int
    ttft_ms: float
    slowest_decode_step_ms: float
    bytes_stored: int
    bytes_loaded: int
    oracle: str
    same_tokens: bool | None
    same_logprobs: bool | None
    """None where the engine's own answers differ from run to run; in the preempted arm `same` is within a tolerance."""
    same_bytes: bool | None
    """None where nothing was restored."""
    ok: bool
    preemptions: int = 0


@dataclass(frozen=True)
class Reference:
    """What the engine gives without a connector: computed in full, and from its own prefix cache."""

    computed: dict[str, Any]
    local_hit: dict[str, Any]
    split_hit: dict[str, Any]
    """A hit of the same length on a prompt that was computed in two parts, as in the mixed arm."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `verify`."""
    parser.add_argument(
        "--model",
        default="qwen3next",
        metavar="DIR_OR_NAME",
        help=f"a model directory or hub name, or a bundled tiny model: {', '.join(bundled_models())} "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ram", default=RAM, metavar="SIZE", help="memory of the daemon under test (default: 1GiB)")
    parser.add_argument("--flip", choices=("detect", "blind"), help=argparse.SUPPRESS)
    parser.add_argument("vllm_arguments", nargs="*", metavar="-- VLLM ARGS", help="passed to vLLM as they are")


def run(arguments: argparse.Namespace) -> int:
    """Run all arms; 0 = every answer and every byte is right and every expected hit happened."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    with tempfile.TemporaryDirectory(prefix="hybridkv-verify-") as directory:
        keep = Path(tempfile.gettempdir()) / f"hybridkv-verify-{os.getpid()}.log"
        try:
            proof = Proof(arguments, Path(directory), keep, say)
            arms = proof.run()
        except HybridKVError as error:
            if arguments.json:
                print(json.dumps({"ok": False, "model": arguments.model, "error": str(error)}, indent=2))
            raise
    ok = all(arm.ok for arm in arms)
    if ok:
        keep.unlink(missing_ok=True)
    summary = {
        "ok": ok,
        "model": arguments.model,
        "chunk_tokens": proof.chunk_tokens,
        "groups": proof.groups,
        "distinct_tokens": proof.distinct_tokens,
        "seconds": round(proof.seconds, 1),
        "arms": [asdict(arm) for arm in arms],
    }
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        _print_table(arguments.model, arms, proof)
    return 0 if ok else 1


class Proof:
    """Runs the arms in order; each uses what the one before left behind."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, log_path: Path, say: Any) -> None:
        self._directory = directory
        self._log_path = log_path
        self._say = say
        self._flip = arguments.flip
        self._socket_path = str(directory / "daemon.sock")
        self._environment: Mapping[str, str] = {}
        bundled = bundled_models().get(arguments.model)
        self._arguments = [f"--model={bundled or arguments.model}"]
        if bundled is not None:
            self._arguments += bundled_arguments(arguments.model)
            self._environment = bundled_environment(arguments.model)
        elif "/" in arguments.model and arguments.model.startswith((".", "/")) and not Path(arguments.model).is_dir():
            raise ConfigError(f"--model: there is no directory {arguments.model}; {', '.join(bundled_models())} work")
        elif "/" not in arguments.model and not Path(arguments.model).is_dir():
            raise ConfigError(f"--model: {arguments.model!r} is not bundled; {', '.join(bundled_models())} work")
        self._arguments += arguments.vllm_arguments
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            raise ConfigError(
                "VLLM_ENABLE_V1_MULTIPROCESSING=1 hides the block pool, which one arm must empty; "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 works"
            )
        self._daemon = DaemonProcess(self._socket_path, arguments.ram)
        self.chunk_tokens = 0
        self.groups = ""
        self.distinct_tokens = 0
        """Of the first answer; one that repeats itself proves little."""
        self.seconds = 0.0

    def run(self) -> list[Arm]:
        """Every arm."""
        started = time.monotonic()
        try:
            with self._daemon:
                return self._arms()
        finally:
            self.seconds = time.monotonic() - started

    def _arms(self) -> list[Arm]:
        arms: list[Arm] = []
        with self._engine("first engine with hybridkv") as engine:
            self._learn_geometry()
            prompt, other, split, *crowd = (
                self._prompt(engine.info, number) for number in range(3 + PREEMPTED_PROMPTS)
            )
            crowd = [text[: 2 * self.chunk_tokens - PREEMPTED_AFTER] for text in crowd]
            self._warm_up(engine, other)
            others = set(self._slots())
            cold = self._measure("cold", engine, prompt, external_chunks=0)
            if self._flip:
                self._flip_one_byte(others)
            engine.reset()
            warm = self._measure("warm", engine, prompt, external_chunks=CHUNKS)
            self._compute_split(engine, split)
            engine.reset()
            engine.run(self._first_part(split), max_tokens=1)
            mixed = self._measure(
                "mixed local and external",
                engine,
                split,
                external_chunks=CHUNKS - LOCAL_CHUNKS,
                local=LOCAL_CHUNKS,
            )
        with self._engine("second engine, started later") as engine:
            self._warm_up(engine, other)
            restarted = self._measure("engine restarted", engine, prompt, external_chunks=CHUNKS)
            engine.reset()
            killed = self._measure_killed("daemon killed midway", engine, prompt)
            self._daemon.start()
            engine.reset()
            self._until_connected(engine, prompt)
            rewarmed = self._measure("daemon restarted", engine, prompt, external_chunks=CHUNKS)
            preempted = self._measure_preempted("preempted", engine, crowd)
        with self._engine("engine without a connector", connector=False) as engine:
            self._warm_up(engine, other)
            computed, local_hit = self._generate(engine, prompt), self._generate(engine, prompt)
            self._compute_split(engine, split)
            reference = Reference(computed, local_hit, self._generate(engine, split))
            alone = [self._generate(engine, text) for text in crowd]
            engine.reset()
            noise = _deviation(engine.run(*crowd, max_tokens=MAX_TOKENS, starve=True), alone)
        arms.append(self._judge_reference(prompt, reference))
        for measured in (cold, warm, mixed, restarted, killed, rewarmed):
            arms.append(self._judge(measured, reference))
        arms.append(self._judge_preempted(preempted, alone, max(NOISE_MIN, NOISE_FACTOR * noise)))
        return arms

    # One arm

    def _measure(
        self, name: str, engine: Engine, prompt: list[int], external_chunks: int | None, local: int = 0
    ) -> dict[str, Any]:
        self._say(f"arm: {name}")
        before = self._stats()
        result = self._generate(engine, prompt)
        after = self._settled()
        delta = {key: int(after.get(key, 0) - before.get(key, 0)) for key in after}
        return {
            **result,
            "name": name,
            "prompt_tokens": len(prompt),
            "delta": delta,
            "expected": None if external_chunks is None else external_chunks * self.chunk_tokens,
            "local": local * self.chunk_tokens,
        }

    def _measure_killed(self, name: str, engine: Engine, prompt: list[int]) -> dict[str, Any]:
        """kill -9 of the daemon as soon as it has answered the request's lookup, while the engine goes on."""
        self._say(f"arm: {name}")
        lookups = self._stats().get("lookups", 0)
        engine.begin({"do": "run", "prompts": [prompt], "max_tokens": KILLED_TOKENS})
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._stats().get("lookups", 0) == lookups and time.monotonic() < deadline:
            pass
        self._daemon.kill()
        (result,) = engine.end()
        # Whether the load came first is chance; the engine's own count says what the answer was made from.
        loaded = {"tokens_loaded": result["cached_tokens"]}
        result["tokens"], result["logprobs"] = result["tokens"][:MAX_TOKENS], result["logprobs"][:MAX_TOKENS]
        return {**result, "name": name, "prompt_tokens": len(prompt), "delta": loaded, "expected": None, "local": 0}

    def _measure_preempted(self, name: str, engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
        """Several requests at once in a pool that runs out of blocks a few tokens after their prompts."""
        self._say(f"arm: {name}")
        before = self._stats()
        results = engine.run(*prompts, max_tokens=MAX_TOKENS, starve=True)
        after = self._settled()
        delta = {key: int(after.get(key, 0) - before.get(key, 0)) for key in after}
        return {"name": name, "prompt_tokens": sum(map(len, prompts)), "results": results, "delta": delta}

    def _judge_preempted(self, measured: dict[str, Any], alone: list[dict[str, Any]], tolerance: float) -> Arm:
        results, delta = measured["results"], measured["delta"]
        preemptions = results[0]["preemptions"]
        external = delta.get("tokens_loaded", 0)
        same_bytes = delta.get("loads_failed", 0) == 0
        deviation = _deviation(results, alone)
        close = deviation <= tolerance if math.isfinite(tolerance) else None
        oracle = f"computed alone, {deviation:.1g} of {tolerance:.1g}"
        return Arm(
            f"{measured['name']} {preemptions} times",
            measured["prompt_tokens"],
            0,
            external,
            max(external, self.chunk_tokens),
            max(result["ttft_seconds"] for result in results) * 1e3,
            results[0]["slowest_decode_step_seconds"] * 1e3,
            delta.get("bytes_stored", 0),
            delta.get("bytes_loaded", 0),
            "bytes: itself differs" if close is None else oracle,
            close,
            close,
            same_bytes,
            preemptions > 0 and external >= self.chunk_tokens and close is not False and same_bytes,
            preemptions,
        )

    def _judge(self, measured: dict[str, Any], reference: Reference) -> Arm:
        external = measured["delta"].get("tokens_loaded", 0)
        expected = measured["expected"]
        hit = measured["cached_tokens"]
        # A failed load is computed after all, but the engine still reports the tokens it first took as cached.
        right_hit = expected is None or (external == expected and hit == expected + measured["local"])
        mixed = reference.split_hit if measured["local"] else reference.local_hit
        oracle = mixed if external else reference.computed
        failed = measured["delta"].get("loads_failed", 0)
        same_bytes = failed == 0 if external or failed else None
        same_tokens = measured["tokens"] == oracle["tokens"]
        same_logprobs = measured["logprobs"] == oracle["logprobs"]
        return Arm(
            measured["name"],
            measured["prompt_tokens"],
            hit,
            external,
            external if expected is None else expected,
            measured["ttft_seconds"] * 1e3,
            measured["slowest_decode_step_seconds"] * 1e3,
            measured["delta"].get("bytes_stored", 0),
            measured["delta"].get("bytes_loaded", 0),
            "own prefix cache" if external else "computed",
            same_tokens,
            same_logprobs,
            same_bytes,
            right_hit and same_tokens and same_logprobs and same_bytes is not False,
        )

    def _judge_reference(self, prompt: list[int], reference: Reference) -> Arm:
        hit = reference.local_hit["cached_tokens"]
        self.distinct_tokens = len(set(reference.computed["tokens"]))
        if self.distinct_tokens == 1:
            self._say("warning: this model repeats one token, so equal tokens prove little; log-probabilities still do")
        expected = CHUNKS * self.chunk_tokens
        return Arm(
            "no connector",
            len(prompt),
            hit,
            0,
            0,
            reference.computed["ttft_seconds"] * 1e3,
            reference.computed["slowest_decode_step_seconds"] * 1e3,
            0,
            0,
            "itself",
            reference.local_hit["tokens"] == reference.computed["tokens"],
            reference.local_hit["logprobs"] == reference.computed["logprobs"],
            None,
            hit == expected and reference.computed["finish_reason"] == "length",
        )

    def _generate(self, engine: Engine, prompt: list[int]) -> dict[str, Any]:
        (result,) = engine.run(prompt, max_tokens=MAX_TOKENS)
        if len(result.get("tokens", ())) != MAX_TOKENS:
            raise HybridKVError(f"the engine gave {len(result.get('tokens', ()))} tokens instead of {MAX_TOKENS}")
        return result

    def _settled(self) -> dict[str, float]:
        """The daemon's counters once they stand still: releases and commits are one-way messages."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last = self._stats()
        while time.monotonic() < deadline:
            now = self._stats()
            if now["leases"] == 0 and all(now.get(key) == last.get(key) for key in SETTLED_COUNTERS):
                break
            last = now
        return last

    def _compute_split(self, engine: Engine, prompt: list[int]) -> None:
        """Compute a prompt in two parts, so that the blocks of its first part are the same bytes in every engine.

        A kernel may give other last bits for the same tokens in a prompt of another length.
        """
        engine.reset()
        engine.run(self._first_part(prompt), max_tokens=1)
        engine.run(prompt, max_tokens=1)
        self._settled()

    def _first_part(self, prompt: list[int]) -> list[int]:
        return prompt[: LOCAL_CHUNKS * self.chunk_tokens + 5]

    def _warm_up(self, engine: Engine, other: list[int]) -> None:
        """Let the engine compile what it compiles on first use, with another prompt, so that TTFT means something."""
        self._say("warming up")
        for length in (len(other), len(other) % self.chunk_tokens):
            engine.run(other[:length], max_tokens=2)

    def _prompt(self, info: dict[str, Any], number: int) -> list[int]:
        tail = max(3, self.chunk_tokens // 3)
        length = CHUNKS * self.chunk_tokens + tail
        if length + MAX_TOKENS > info["max_model_len"]:
            raise ConfigError(
                f"max_model_len={info['max_model_len']} is too short for {CHUNKS} chunks of {self.chunk_tokens} "
                f"tokens; -- --max-model-len {length + MAX_TOKENS} works"
            )
        return random.Random(WIDEN_SEED + number).choices(range(2, info["vocab_size"]), k=length)

    # Processes

    @contextmanager
    def _engine(self, what: str, connector: bool = True) -> Iterator[Engine]:
        self._say(f"starting: {what}")
        arguments = list(self._arguments)
        if connector:
            extra = {
                "server": f"unix://{self._socket_path}",
                "checksum": "off" if self._flip == "blind" else "paranoid",
                "lookup_timeout_ms": 2000,
            }
            transfer = {
                "kv_connector": "HybridKVConnector",
                "kv_connector_module_path": "hybridkv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        with Engine(arguments, self._log_path, self._say, self._environment) as engine:
            yield engine

    def _stats(self) -> dict[str, float]:
        with Control(self._socket_path) as control:
            return control.stats().values

    def _learn_geometry(self) -> None:
        with Control(self._socket_path) as control:
            info = control.stats().info
        words = info["session_0"].split()
        self.chunk_tokens = int(words[1])
        self.groups = " ".join(words[3 : words.index("engine")])

    def _until_connected(self, engine: Engine, prompt: list[int]) -> None:
        """Let the engine make steps until it has found the new daemon."""
        deadline = time.monotonic() + DAEMON_SECONDS
        while self._stats()["sessions"] < 1 and time.monotonic() < deadline:
            engine.run(prompt[: self.chunk_tokens // 2], max_tokens=1)

    def _slots(self) -> dict[int, SlotHeader]:
        """Header of every committed slot by offset, read from the arena itself."""
        reserved = int(self._stats()["bytes_reserved"])
        with self._arena() as arena:
            return dict(committed_slots(arena.memory[:reserved]))

    def _flip_one_byte(self, others: set[int]) -> None:
        """The test hook behind --flip: one wrong byte in one stored object, as bad memory would make it.

        The object is one of a full attention group, since every hit needs all of those; without such a group, one
        byte in every object is flipped. It stands in the middle, since a payload may begin with what an answer does not
        depend on (an indexer's cache, while every token is selected anyway), and it is the high byte of a float32 and
        of a bfloat16 alike. `others` are the slots of other prompts.
        """
        slots = {offset: header for offset, header in self._slots().items() if offset not in others}
        full = {int(gid) for gid, _, kind in (group.partition(":") for group in self.groups.split()) if "full/" in kind}
        wanted = [offset for offset, header in slots.items() if header.gid in full][:1] or list(slots)
        with self._arena() as arena:
            for offset in wanted:
                at = slots[offset].part_bytes // 16 * 8 + 3
                arena.memory[offset + payload_offset(slots[offset].parts) + at] ^= _FLIP_BITS
        self._say(f"flipped one byte in {len(wanted)} of {len(slots)} stored objects")

    @contextmanager
    def _arena(self) -> Iterator[Arena]:
        with Control(self._socket_path) as control:
            arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        try:
            yield arena
        finally:
            arena.close()


def _deviation(results: list[dict[str, Any]], oracles: list[dict[str, Any]]) -> float:
    """The largest deviation of any result."""
    return max(_one_deviation(result, oracle) for result, oracle in zip(results, oracles, strict=True))


def _one_deviation(result: dict[str, Any], oracle: dict[str, Any]) -> float:
    """The largest difference of a log-probability up to the first token that differs.

    There it is how much likelier the oracle's token is than the result's; what follows answers another text.
    """
    worst: float = 0.0
    for token, mine, other, theirs in zip(
        result["tokens"], result["logprobs"], oracle["tokens"], oracle["logprobs"], strict=True
    ):
        known: dict[int, float] = dict(theirs)
        if token not in known or other not in dict(mine):
            return math.inf
        worst = max(worst, *(abs(value - known[name]) for name, value in mine if name in known))
        if token != other:
            worst = max(worst, known[other] - known[token])
            break
    return worst


def _print_table(model: str, arms: list[Arm], proof: Proof) -> None:
    table = Table(title=f"hybridkv verify {model}: chunk {proof.chunk_tokens} tokens, groups {proof.groups}")
    for column in ("arm", "prompt", "from outside", "expected", "TTFT ms", "slowest step ms", "stored", "loaded"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for column in ("tokens", "log-probs", "bytes", "compared with"):
        table.add_column(column)
    shown = {True: "same", False: "DIFFERENT", None: "-"}
    for arm in arms:
        table.add_row(
            arm.name,
            str(arm.prompt_tokens),
            str(arm.external_tokens),
            str(arm.expected_external_tokens),
            f"{arm.ttft_ms:.0f}",
            f"{arm.slowest_decode_step_ms:.0f}",
            format_size(arm.bytes_stored),
            format_size(arm.bytes_loaded),
            shown[arm.same_tokens],
            shown[arm.same_logprobs],
            shown[arm.same_bytes],
            arm.oracle,
            style=None if arm.ok else "bold red",
        )
    plain_console(160).print(table)
    verdict = "every answer and every byte is right" if all(arm.ok for arm in arms) else "DIFFERENT: see the red rows"
    print(f"{verdict} ({proof.seconds:.0f} s)")
