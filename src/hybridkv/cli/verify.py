"""`hybridkv verify`: real engines are given the same prompts along every path."""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridkv.cli.arguments import JSON, command, model, option
from hybridkv.cli.terminal import PlainConsole, new_table, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.sizes import format_size
from hybridkv.lab import judging
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import CONNECTOR, EngineProcess, NotServedError
from hybridkv.lab.judging import Measured, ReferenceAnswers, VerifyArm
from hybridkv.lab.models import WIDEN_SEED, bundled_arguments, bundled_environment, bundled_models
from hybridkv.shm.arena import Arena, arena_seen, attach_arena
from hybridkv.shm.slots import SlotHeader, committed_slots, payload_offset
from hybridkv.wire.messages import WireGeometry, describe_groups

CHUNKS = 5  # Whole chunks of a prompt.
LOCAL_CHUNKS = 2  # Chunks of the prompt that the engine's own cache holds in the mixed arm.
MAX_TOKENS = 16
KILLED_TOKENS = 64  # Of the arm in which the daemon is killed: it dies while the engine computes.
PREEMPTED_PROMPTS = 3
TURNS = (100, 300, 500)  # New tokens of the second turns; a first one has TURN_CHUNKS chunks,
TURN_CHUNKS = 3  # less a few tokens, so that it ends inside a block.
PREEMPTED_AFTER = 4  # Tokens after which the requests of the preempted arm need another block.
DAEMON_SECONDS = 10.0
SETTLE_SECONDS = 5.0
SETTLED_COUNTERS = (
    *("tokens_loaded", "bytes_loaded", "loads_failed", "objects_stored", "bytes_stored"),
)
FLIP_BITS = 0x41
NO_BRANCH = "it takes recurrent layers, and no drafter that shortens the engine's own hits"
LEFT = ("arm", "tokens", "log-probs", "bytes", "drafts", "compared with")
RIGHT = ("prompt", "from outside", "expected", "TTFT ms", "slowest step ms", "stored", "loaded")
_SHOWN = {True: "same", False: "DIFFERENT", None: "-"}


@command(
    *model(bundled_models(), "%(default)s", "a model directory or hub name", "qwen3next"),
    JSON,
    option("--ram SIZE", "memory of the daemon under test (default: %(default)s)", default="1GiB"),
    option(
        "--repeat N",
        "so many prompts more over a restart of the engine, one of the daemon, and on another node "
        "that shares a directory (default: none)",
        type=int,
        default=0,
    ),
    # A test's: a stored byte is made wrong, which is checked for or not.
    option("--flip", argparse.SUPPRESS, choices=("detect", "blind")),
)
def run_verify(arguments: argparse.Namespace) -> int:
    """Run all arms; 0 = every answer and every byte is right and every expected hit happened."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    model: str = arguments.model
    with tempfile.TemporaryDirectory(prefix="hybridkv-verify-") as directory:
        logs = Path(tempfile.mkdtemp(prefix="hybridkv-verify-logs-"))
        try:
            proof = Verification(
                model,
                arguments.vllm_arguments,
                ram=arguments.ram,
                repeat=arguments.repeat,
                flip=arguments.flip,
                directory=Path(directory),
                logs=logs,
                say=say,
            )
            arms = proof.run()
        except HybridKVError as error:
            if not any(logs.iterdir()):
                logs.rmdir()  # No engine has started.
            if arguments.json:
                print_json({"ok": False, "model": model, "error": str(error)})
            raise
    ok = all(arm.ok for arm in arms)
    if ok:
        shutil.rmtree(logs)
    if arguments.json:
        names = "chunk_tokens", "groups", "distinct_tokens"
        told = {"ok": ok, "model": model, **{name: getattr(proof, name) for name in names}}
        print_json({**told, "seconds": round(proof.seconds, 1), "arms": [*map(asdict, arms)]})
    elif arms[0].not_served is not None:
        print(f"NOT PROVEN: {NotServedError.TEXT} ({proof.seconds:.0f} s)")
    else:
        title = f"hybridkv verify {model}: chunk {proof.chunk_tokens} tokens, groups {proof.groups}"
        _print_table(title, arms)
        verdict = "every answer and every byte is right" if ok else "DIFFERENT: see the red rows"
        print(f"{verdict} ({proof.seconds:.0f} s)")
    return int(not ok)


def _without_block_drop(argument: str) -> str:
    """vLLM's argument, or the value of --speculative-config with its own hits at full length."""
    option, text = argument, ""
    if argument.startswith("{"):
        option, text = "", argument
    elif argument.startswith("--speculative-config="):
        option, _, text = argument.partition("=")
    if '"method"' not in text:
        return argument
    text = json.dumps({**json.loads(text), "disable_eagle_block_drop": True})
    return f"{option}={text}" if option else text


def _print_table(title: str, arms: Sequence[VerifyArm]) -> None:
    table = new_table((LEFT[0], *RIGHT, *LEFT[1:]), LEFT, title)
    for arm in arms:
        table.add_row(
            arm.name,
            *map(str, (arm.prompt_tokens, arm.external_tokens, arm.expected_external_tokens)),
            *(f"{value:.0f}" for value in (arm.ttft_ms, arm.slowest_decode_step_ms)),
            *map(format_size, (arm.bytes_stored, arm.bytes_loaded)),
            *map(_SHOWN.get, (arm.same_tokens, arm.same_logprobs, arm.same_bytes, arm.same_drafts)),
            f"skipped: {arm.not_served}" if arm.not_served else arm.oracle,
            style=None if arm.ok else "bold red",
        )
    PlainConsole(160).print(table)


@dataclass(frozen=True, slots=True)
class _SecondTurns:
    """Prompts that end inside a block, and longer ones that begin with them."""

    first: Sequence[list[int]] = ()
    second: Sequence[list[int]] = ()
    hit_tokens: int = 0  # Of all second turns, what the engine's own cache would have.
    skipped: str = ""  # Why there are none.


@dataclass(slots=True)
class _MorePrompts:
    """The prompts of the arms that have several."""

    crowd: Sequence[list[int]] = ()  # They do not fit into the engine's blocks together.
    repeated: Sequence[list[int]] = ()
    turns: _SecondTurns = _SecondTurns()
    branch: list[int] = field(default_factory=list)
    """It leaves the prompt of two parts where the first part's state stands; none without states,
    or where a drafter makes the engine's own hits shorter."""


class Verification:
    """Runs the arms in order; each uses what the one before left behind."""

    def __init__(
        self,
        model: str,
        vllm_arguments: Sequence[str],
        *,
        ram: str,
        repeat: int,
        flip: str | None,
        directory: Path,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        """What is proven: a model and vLLM's arguments, with a daemon of `ram` (a size).

        Each engine has a log below `logs`.
        """
        self._repeat, self._flip, self._logs, self._say = repeat, flip, logs, say
        self._engines_started = 0
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
        shared = ["--tier", f"disk://{directory / 'shared'}"] if repeat else []
        self._daemon, self._other_node = (
            DaemonProcess(str(directory / f"{node}.sock"), ram, options=[*shared, "--node", node])
            for node in ("daemon", "other")
        )
        self._socket_path = self._daemon.socket_path
        self.chunk_tokens = 0
        self.groups = ""
        self.distinct_tokens = 0  # Of the first answer; one that repeats itself proves little.
        self.seconds = 0.0
        self._stateless_tokens = 0
        """By so many tokens the last state of a prompt stands lower: vLLM plans its steps by the
        block that its own hits of a drafter drop."""
        self._more = _MorePrompts()
        self._judges = {
            "preempted": judging.judge_preempted,
            "second turns": judging.judge_turns,
            "divergent": judging.judge_branch,
        }
        """The judge of each arm of several prompts."""

    def run(self) -> list[VerifyArm]:
        """Every arm; or the first alone, where vLLM lets no engine serve it."""
        started = time.monotonic()
        try:
            with self._daemon:
                measured = [*self._first_engine(), *self._second_engine()]
                measured += self._another_node() if self._repeat else []
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
            arms.append(self._judges.get(one.name, judging.judge)(one, reference))
        if self._more.turns.skipped:
            arms.append(VerifyArm("second turns", not_served=self._more.turns.skipped, ok=True))
        if not self._more.branch:
            arms.append(VerifyArm("divergent", not_served=NO_BRANCH, ok=True))
        return arms

    def _first_engine(self) -> Iterator[Measured]:
        with self._engine("first engine with hybridkv") as engine:
            with ControlClient(self._socket_path) as control:
                geometry = control.engines()[0].geometry
            self.chunk_tokens, self.groups = geometry.chunk_tokens, describe_groups(geometry.groups)
            has_states = any(group.kind is GroupKind.RECURRENT for group in geometry.groups)
            if has_states:
                self._stateless_tokens = engine.info["dropped_tokens"]
            self._make_prompts(engine.info, geometry)
            if has_states and not self._stateless_tokens:
                self._more.branch = [*self._first_part, *self._other[: self.chunk_tokens]]
            self._warm_up(engine)
            others = self._stored()[1] if self._flip else ()
            yield self._measure(engine, "cold", [self._prompt])
            if self._flip:
                self._flip_one_byte(others)
            engine.reset()
            yield self._measure(engine, "warm", [self._prompt], CHUNKS)
            self._compute_split(engine)
            engine.reset()
            engine.run(self._first_part, max_tokens=1)
            chunks = CHUNKS - LOCAL_CHUNKS, LOCAL_CHUNKS
            mixed = self._measure(engine, "mixed local and external", [self._split], *chunks)
            if engine.info["dropped_tokens"] and not self._stateless_tokens:
                # vLLM's own hit is shorter than its oracle's, whose blocks came of other steps.
                mixed = replace(mixed, expected=None, tolerance=judging.NOISE_MIN)
            yield mixed
            if self._more.branch:
                # From outside comes the last state alone, and attention blocks from the first on.
                engine.reset()
                self._generate(engine, self._split)
                yield self._measure(engine, "divergent", [self._more.branch], LOCAL_CHUNKS)
            for prompt in (*self._more.repeated, *self._more.turns.first):
                self._generate(engine, prompt)
            self._settled()

    def _stored(self) -> tuple[Arena, dict[int, SlotHeader]]:
        """The arena, and the header of every committed slot in it by offset."""
        with ControlClient(self._socket_path) as control:
            arena = attach_arena(
                arena_seen(control.welcome.arena_path), control.welcome.arena_bytes
            )
            reserved = int(control.stats().values["bytes_reserved"])
            return arena, dict(committed_slots(arena.memory[:reserved]))

    def _flip_one_byte(self, others: Collection[int]) -> None:
        """One wrong byte, as by bad memory, in one stored object that is not at one of `others`.

        The object is one of a full attention group, since every hit needs all of those; without
        such a group, one byte in every object is flipped. It stands in the middle, since a payload
        may begin with what an answer does not depend on (an indexer's cache, while every token is
        selected anyway), and it is the high byte of a float32 and of a bfloat16 alike.
        """
        with ControlClient(self._socket_path) as control:
            groups = [group for engine in control.engines() for group in engine.geometry.groups]
        full = {group.gid for group in groups if group.kind is GroupKind.FULL}
        arena, stored = self._stored()
        slots = {offset: slot for offset, slot in sorted(stored.items()) if offset not in others}
        wanted = [offset for offset, slot in slots.items() if slot.gid in full][:1] or [*slots]
        for offset in wanted:
            at = payload_offset(slots[offset].parts) + slots[offset].part_bytes // 16 * 8 + 3
            arena.memory[offset + at] ^= FLIP_BITS
        self._say(f"flipped one byte in {len(wanted)} of {len(slots)} stored objects")

    def _second_engine(self) -> Iterator[Measured]:
        with self._engine("second engine, started later") as engine:
            self._warm_up(engine)
            yield self._measure(engine, "engine restarted", [self._prompt], CHUNKS)
            yield from self._measure_repeated(engine, "after the engine's restart")
            if not self._more.turns.skipped:
                prompts, hit = self._more.turns.second, self._more.turns.hit_tokens
                turns = self._measure(engine, "second turns", prompts, together=False)
                yield replace(turns, expected=hit)
            engine.reset()
            yield self._measure_killed(engine, "daemon killed midway")
            # A new daemon runs, and the engine is connected to it.
            self._daemon.start()
            engine.reset()
            deadline = time.monotonic() + DAEMON_SECONDS
            while self._stats()["sessions"] < 1 and time.monotonic() < deadline:
                engine.run(self._other[: self.chunk_tokens // 2], max_tokens=1)
            yield self._measure(engine, "daemon restarted", [self._prompt], CHUNKS)
            yield from self._measure_repeated(engine, "after the daemon's restart")
            yield self._measure(engine, "preempted", self._more.crowd, 1)

    def _another_node(self) -> Iterator[Measured]:
        """An engine whose daemon shares a directory with the one under test, and no memory."""
        first, self._socket_path = self._socket_path, self._other_node.socket_path
        with self._other_node, self._engine("engine on another node") as engine:
            self._warm_up(engine)
            yield from self._measure_repeated(engine, "on another node")
        self._socket_path = first

    def _reference(self) -> ReferenceAnswers:
        with self._engine("engine without a connector", connector=False) as engine:
            self._warm_up(engine)
            computed, local_hit = (self._generate(engine, self._prompt)[0] for _ in range(2))
            self._compute_split(engine)
            split_hit = self._generate(engine, self._split)[0]
            branch = [self._generate(engine, self._more.branch)[0]] if self._more.branch else []
            alone = [self._generate(engine, prompt)[0] for prompt in self._more.crowd]
            engine.reset()
            noise = judging.deviation(self._generate(engine, *self._more.crowd), alone)
            for prompt in (*self._more.repeated, *self._more.turns.first):
                self._generate(engine, prompt)
            repeated, turns = (
                [self._generate(engine, prompt)[0] for prompt in prompts]
                for prompts in (self._more.repeated, self._more.turns.second)
            )
            hits = repeated, turns, branch
            return ReferenceAnswers(computed, local_hit, split_hit, alone, noise, *hits)

    def _measure_repeated(self, engine: EngineProcess, arm: str) -> Iterator[Measured]:
        """The prompts of `--repeat`, one after the other."""
        if self._more.repeated:
            self._judges[arm] = judging.judge_repeated
            chunks = CHUNKS * len(self._more.repeated)
            yield self._measure(engine, arm, self._more.repeated, chunks, together=False)

    def _measure(
        self,
        engine: EngineProcess,
        arm: str,
        prompts: Sequence[list[int]],
        *chunks: int,
        together: bool = True,
    ) -> Measured:
        """An arm; so many chunks must come from the connector, and from the engine's own cache."""
        self._say(f"arm: {arm}")
        before = self._stats()
        if together:
            results = self._generate(engine, *prompts)
        else:
            results = [self._generate(engine, prompt)[0] for prompt in prompts]
        delta = {key: int(count - before.get(key, 0)) for key, count in self._settled().items()}
        tokens = (count * self.chunk_tokens for count in chunks)
        return Measured(arm, sum(map(len, prompts)), results, delta, *tokens)

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
        result["drafts"] = []  # It made more of them than its oracle.
        # Whether the load came first is chance; the engine's own count says what it computed from.
        loaded = {"tokens_loaded": result["cached_tokens"]}
        return Measured(arm, len(self._prompt), [result], loaded, None)

    def _generate(self, engine: EngineProcess, *prompts: list[int]) -> list[dict[str, Any]]:
        """Answers of MAX_TOKENS; several prompts share a pool that runs out of blocks meanwhile."""
        results = engine.run(*prompts, max_tokens=MAX_TOKENS, starve=len(prompts) > 1)
        for result in results:
            if (count := len(result.get("tokens", ()))) != MAX_TOKENS:
                raise HybridKVError(f"the engine gave {count} tokens instead of {MAX_TOKENS}")
        return results

    def _settled(self) -> dict[str, float]:
        """The daemon's counters once they stand still: some messages have no answer."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last = self._stats()
        while time.monotonic() < deadline:
            now = self._stats()
            still = all(now.get(key) == last.get(key) for key in SETTLED_COUNTERS)
            if now["leases"] == 0 and still and not now.get("writes_waiting"):
                break
            last = now
        return last

    @property
    def _first_part(self) -> list[int]:
        """The beginning of the prompt that is computed in two parts."""
        return self._split[: LOCAL_CHUNKS * self.chunk_tokens + self._stateless_tokens + 5]

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

    def _make_prompts(self, info: Mapping[str, Any], geometry: WireGeometry) -> None:
        unit = geometry.alignment_tokens  # The engine's own hits end at its multiples.
        more_tokens = self._stateless_tokens + min(unit, max(3, self.chunk_tokens // 3))
        length = CHUNKS * self.chunk_tokens + more_tokens
        if length + MAX_TOKENS > info["max_model_len"]:
            raise ConfigError(
                f"max_model_len={info['max_model_len']} is too short for {CHUNKS} chunks of "
                f"{self.chunk_tokens} tokens",
                f"-- --max-model-len {length + MAX_TOKENS} works",
            )
        tokens = range(2, info["vocab_size"])
        self._prompt, self._other, self._split, *more = (
            random.Random(WIDEN_SEED + number).choices(tokens, k=length)
            for number in range(3 + PREEMPTED_PROMPTS + self._repeat)
        )
        crowd, self._more.repeated = more[:PREEMPTED_PROMPTS], more[PREEMPTED_PROMPTS:]
        # Its last state stands at the end of a chunk, however small the blocks are.
        block = max(group.tokens_per_block for group in geometry.groups)
        crowded = self.chunk_tokens + block + self._stateless_tokens - PREEMPTED_AFTER
        self._more.crowd = [text[:crowded] for text in crowd]
        if why := info["no_tails"]:
            self._more.turns = _SecondTurns(skipped=why)
            return
        first = TURN_CHUNKS * self.chunk_tokens - 2 * unit + 3
        room, texts = info["max_model_len"] - MAX_TOKENS - first, random.Random(WIDEN_SEED - 1)
        second = [texts.choices(tokens, k=first + min(new, room)) for new in TURNS]
        hit = (first - 1) // unit * unit * len(second)
        self._more.turns = _SecondTurns([text[:first] for text in second], second, hit)

    def _engine(self, what: str, connector: bool = True) -> EngineProcess:
        self._say(f"starting: {what}")
        arguments = list(self._arguments)
        if not connector and not self._stateless_tokens:
            # The oracle is a hit of the same length, of the same prompt: nothing in it is stale.
            arguments = [*map(_without_block_drop, arguments)]
        elif connector:
            checksum = "off" if self._flip == "blind" else "paranoid"
            # A hit is right or wrong; whether computing would have been faster is not asked here.
            extra = {"server": f"unix://{self._socket_path}", "checksum": checksum}
            extra |= {"load_policy": LoadPolicy.ALWAYS.value, "audit": "off"}
            transfer = {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": "hybridkv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**extra, "lookup_timeout_ms": 2000},
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        self._engines_started += 1
        log_path = self._logs / f"engine-{self._engines_started}.log"
        return EngineProcess(arguments, log_path, self._say, self._environment)

    def _stats(self) -> dict[str, float]:
        with ControlClient(self._socket_path) as control:
            return control.stats().values
