"""The proof of `hybridkv verify`: real engines are given the same prompts along every path."""

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import CONNECTOR, EngineProcess, NotServedError
from hybridkv.lab.judging import (
    Measured,
    ReferenceAnswers,
    VerifyArm,
    deviation,
    judge,
    judge_preempted,
    judge_reference,
)
from hybridkv.lab.models import WIDEN_SEED, bundled_arguments, bundled_environment, bundled_models
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.slots import SlotHeader, committed_slots, payload_offset
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
_FLIP_BITS = 0x41


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What is proven: a model and vLLM's arguments, with a daemon of `ram` (a size)."""

    model: str
    vllm_arguments: Sequence[str]
    ram: str
    flip: str | None = None
    """A test's: "detect" or "blind", whether a flipped byte is checked for or not."""


class Verification:
    """Runs the arms in order; each uses what the one before left behind."""

    def __init__(
        self, options: VerifyOptions, directory: Path, log_path: Path, say: Callable[[str], None]
    ) -> None:
        self._log_path = log_path
        self._say = say
        self._flip = options.flip
        self._socket_path = str(directory / "daemon.sock")
        self._environment: Mapping[str, str] = {}
        model = options.model
        bundled = bundled_models().get(model)
        self._arguments = [f"--model={bundled or model}"]
        if bundled is not None:
            self._arguments += bundled_arguments(model)
            self._environment = bundled_environment(model)
        elif not Path(model).is_dir() and ("/" not in model or model.startswith((".", "/"))):
            named = (
                f"there is no directory {model}" if "/" in model else f"{model!r} is not bundled"
            )
            raise ConfigError(f"--model: {named}", f"{', '.join(bundled_models())} work")
        self._arguments += options.vllm_arguments
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            what = "VLLM_ENABLE_V1_MULTIPROCESSING=1 hides the block pool, which one arm must empty"
            raise ConfigError(what, "VLLM_ENABLE_V1_MULTIPROCESSING=0 works")
        self._daemon = DaemonProcess(self._socket_path, options.ram)
        self.chunk_tokens = 0
        self.groups = ""
        self.distinct_tokens = 0
        """Of the first answer; one that repeats itself proves little."""
        self.seconds = 0.0
        self._others: set[int] = set()
        """Slots of the prompt that warms up."""

    def run(self) -> list[VerifyArm]:
        """Every arm; or the first alone, where vLLM lets no engine serve it."""
        started = time.monotonic()
        try:
            with self._daemon:
                return self._arms()
        except NotServedError as error:
            return [VerifyArm("cold", not_served=error.reason)]
        finally:
            self.seconds = time.monotonic() - started

    def _arms(self) -> list[VerifyArm]:
        measured = []
        for title, arms in ARMS.items():
            with self._engine(title) as engine:
                if not self.chunk_tokens:
                    self._learn_geometry()
                    self._make_prompts(engine.info)
                self._warm_up(engine)
                self._others = self._others or set(self._slots())
                for arm in arms:
                    arm.prepare(self, engine)
                    self._say(f"arm: {arm.name}")
                    measured.append((arm, arm.measure(self, engine, arm)))
        reference = self._reference()
        self.distinct_tokens = len(set(reference.computed["tokens"]))
        if self.distinct_tokens == 1:
            self._say(
                "warning: this model repeats one token, so equal tokens prove little; "
                "log-probabilities still do"
            )
        expected = CHUNKS * self.chunk_tokens
        return [
            judge_reference(len(self._prompt), expected, reference),
            *(arm.judge(what, reference) for arm, what in measured),
        ]

    def _reference(self) -> ReferenceAnswers:
        with self._engine("engine without a connector", connector=False) as engine:
            self._warm_up(engine)
            computed, local_hit = (self._generate(engine, self._prompt) for _ in range(2))
            self._compute_split(engine)
            split_hit = self._generate(engine, self._split)
            alone = [self._generate(engine, prompt) for prompt in self._crowd]
            engine.reset()
            preempted = engine.run(*self._crowd, max_tokens=MAX_TOKENS, starve=True)
            noise = deviation(preempted, alone)
            return ReferenceAnswers(computed, local_hit, split_hit, alone, noise)

    # Before an arm

    def as_it_is(self, engine: EngineProcess) -> None:
        """Nothing is done before the arm."""

    def forget(self, engine: EngineProcess) -> None:
        """The engine's own prefix cache is emptied."""
        engine.reset()

    def flip_and_forget(self, engine: EngineProcess) -> None:
        """As `forget`; with --flip a stored byte is made wrong before."""
        if self._flip:
            self._flip_one_byte()
        engine.reset()

    def keep_the_beginning(self, engine: EngineProcess) -> None:
        """A prompt is stored, and the engine's own cache has the beginning of it alone."""
        self._compute_split(engine)
        engine.reset()
        engine.run(self._first_part(), max_tokens=1)

    def restart_the_daemon(self, engine: EngineProcess) -> None:
        """A new daemon runs, and the engine is connected to it."""
        self._daemon.start()
        engine.reset()
        deadline = time.monotonic() + DAEMON_SECONDS
        while self._stats()["sessions"] < 1 and time.monotonic() < deadline:
            engine.run(self._prompt[: self.chunk_tokens // 2], max_tokens=1)

    # One arm

    def measure(self, engine: EngineProcess, arm: "ArmSpec") -> Measured:
        """One prompt: of the mixed arm where the engine's own cache has a part of it."""
        prompt = self._split if arm.local_chunks else self._prompt
        before = self._stats()
        result = self._generate(engine, prompt)
        return self._measured(arm, [prompt], [result], before)

    def measure_killed(self, engine: EngineProcess, arm: "ArmSpec") -> Measured:
        """The daemon gets a kill -9 as soon as it has answered the request's lookup."""
        lookups = self._stats().get("lookups", 0)
        engine.begin({"do": "run", "prompts": [self._prompt], "max_tokens": KILLED_TOKENS})
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._stats().get("lookups", 0) == lookups and time.monotonic() < deadline:
            pass
        self._daemon.kill()
        (result,) = engine.end()
        for key in ("tokens", "logprobs"):
            result[key] = result[key][:MAX_TOKENS]
        # Whether the load came first is chance; the engine's own count says what it computed from.
        loaded = {"tokens_loaded": result["cached_tokens"]}
        return Measured(arm.name, len(self._prompt), [result], loaded, None)

    def measure_preempted(self, engine: EngineProcess, arm: "ArmSpec") -> Measured:
        """Several requests in a pool that runs out of blocks a few tokens after their prompts."""
        before = self._stats()
        results = engine.run(*self._crowd, max_tokens=MAX_TOKENS, starve=True)
        return self._measured(arm, self._crowd, results, before)

    def _measured(
        self,
        arm: "ArmSpec",
        prompts: Sequence[list[int]],
        results: Sequence[Mapping[str, Any]],
        before: Mapping[str, float],
    ) -> Measured:
        delta = {key: int(count - before.get(key, 0)) for key, count in self._settled().items()}
        chunks = arm.external_chunks * self.chunk_tokens, arm.local_chunks * self.chunk_tokens
        return Measured(arm.name, sum(map(len, prompts)), results, delta, *chunks)

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
        engine.run(self._first_part(), max_tokens=1)
        engine.run(self._split, max_tokens=1)
        self._settled()

    def _first_part(self) -> list[int]:
        return self._split[: LOCAL_CHUNKS * self.chunk_tokens + 5]

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
        self._crowd = [text[: 2 * self.chunk_tokens - PREEMPTED_AFTER] for text in crowd]

    # Processes

    def _engine(self, what: str, connector: bool = True) -> EngineProcess:
        self._say(f"starting: {what}")
        arguments = list(self._arguments)
        if connector:
            extra = {
                "server": f"unix://{self._socket_path}",
                "checksum": "off" if self._flip == "blind" else "paranoid",
                "lookup_timeout_ms": 2000,
            }
            transfer = {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": "hybridkv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        return EngineProcess(arguments, self._log_path, self._say, self._environment)

    def _stats(self) -> dict[str, float]:
        with ControlClient(self._socket_path) as control:
            return control.stats().values

    def _learn_geometry(self) -> None:
        with ControlClient(self._socket_path) as control:
            geometry = control.engines()[0].geometry
        self.chunk_tokens = geometry.chunk_tokens
        self.groups = describe_groups(geometry.groups)

    def _slots(self) -> dict[int, SlotHeader]:
        """Header of every committed slot by offset, read from the arena itself."""
        reserved = int(self._stats()["bytes_reserved"])
        with self._arena() as arena:
            return dict(committed_slots(arena.memory[:reserved]))

    def _flip_one_byte(self) -> None:
        """The test hook behind --flip: one wrong byte in one stored object, as of bad memory.

        The object is one of a full attention group, since every hit needs all of those; without
        such a group, one byte in every object is flipped. It stands in the middle, since a payload
        may begin with what an answer does not depend on (an indexer's cache, while every token is
        selected anyway), and it is the high byte of a float32 and of a bfloat16 alike.
        """
        slots = self._slots()
        slots = {offset: slots[offset] for offset in slots.keys() - self._others}
        with ControlClient(self._socket_path) as control:
            groups = [group for engine in control.engines() for group in engine.geometry.groups]
        full = {group.gid for group in groups if group.kind is GroupKind.FULL}
        wanted = [offset for offset in sorted(slots) if slots[offset].gid in full][:1] or [*slots]
        with self._arena() as arena:
            for offset in wanted:
                at = slots[offset].part_bytes // 16 * 8 + 3
                arena.memory[offset + payload_offset(slots[offset].parts) + at] ^= _FLIP_BITS
        self._say(f"flipped one byte in {len(wanted)} of {len(slots)} stored objects")

    def _arena(self) -> closing[Arena]:
        with ControlClient(self._socket_path) as control:
            arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        return closing(arena)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm: what is done before it, what is measured, and what is expected of it."""

    name: str
    prepare: Callable[[Verification, EngineProcess], None] = Verification.as_it_is
    external_chunks: int = CHUNKS
    """Chunks that must come from the connector."""
    local_chunks: int = 0
    """Chunks that the engine's own cache has."""
    measure: Callable[[Verification, EngineProcess, "ArmSpec"], Measured] = Verification.measure
    judge: Callable[[Measured, ReferenceAnswers], VerifyArm] = judge


_V = Verification
_MIXED = CHUNKS - LOCAL_CHUNKS, LOCAL_CHUNKS
ARMS: Mapping[str, Sequence[ArmSpec]] = {
    "first engine with hybridkv": (
        ArmSpec("cold", external_chunks=0),
        ArmSpec("warm", _V.flip_and_forget),
        ArmSpec("mixed local and external", _V.keep_the_beginning, *_MIXED),
    ),
    "second engine, started later": (
        ArmSpec("engine restarted"),
        ArmSpec("daemon killed midway", _V.forget, measure=_V.measure_killed),
        ArmSpec("daemon restarted", _V.restart_the_daemon),
        ArmSpec("preempted", _V.as_it_is, 1, 0, _V.measure_preempted, judge_preempted),
    ),
}
"""By engine, in the order in which they run."""
