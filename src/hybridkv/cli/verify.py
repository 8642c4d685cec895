"""`hybridkv verify`: real engines are given the same prompts along every path."""

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from hybridkv.cli.arguments import (
    JSON,
    command,
    ended_by_exception,
    model_arguments,
    option,
    switch,
)
from hybridkv.cli.disaggregated import PairProof
from hybridkv.cli.proof import (
    MAX_TOKENS,
    RAM,
    SETTLE_SECONDS,
    Proof,
    VerifyRequest,
    ram_size,
    read_stats,
    settled_stats,
)
from hybridkv.cli.terminal import PlainConsole, new_table, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.settings import LONG_TRANSFER
from hybridkv.core.sizes import format_size
from hybridkv.lab import judging
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess, NotServedError
from hybridkv.lab.judging import Measured, ReferenceAnswers, VerifyArm
from hybridkv.lab.models import bundled_models
from hybridkv.lab.prompts import wanted_chunks
from hybridkv.shm.arena import Arena, arena_seen, attach_arena
from hybridkv.shm.slots import SlotHeader, committed_slots, payload_offset
from hybridkv.wire.messages import WireGeometry, describe_groups

LOCAL_CHUNKS = 2  # Chunks of the prompt that the engine's own cache holds in the mixed arm.
KILLED_TOKENS = 64  # Of the arm in which the daemon is killed: it dies while the engine computes.
PREEMPTED_PROMPTS = 3
TURNS = (100, 300, 500)  # New tokens of the second turns; a first one has TURN_CHUNKS chunks,
TURN_CHUNKS = 3  # less a few tokens, so that it ends inside a block.
PREEMPTED_AFTER = 10
"""Tokens after which the requests of the preempted arm need another block. With asynchronous
scheduling and two drafts, eight are planned before the first token is out."""
DAEMON_SECONDS = 10.0
FLIP_BITS = 0x41
NO_BRANCH = "it takes recurrent layers, and no drafter that shortens the engine's own hits"
LEFT = ("arm", "tokens", "log-probs", "bytes", "drafts", "compared with")
WAITED = "waited ms"
RIGHT = ("prompt", "from outside", "expected", "TTFT ms", "slowest step ms", "stored", "loaded")


@command(
    *model_arguments(bundled_models(), "%(default)s", "a model directory or hub name", "qwen3next"),
    JSON,
    option("--ram SIZE", "memory of the daemon under test (default: what the prompts take)"),
    option(
        "--repeat N",
        "so many prompts more over a restart of the engine, one of the daemon, and on another node "
        "that shares a directory (default: none)",
        type=int,
        default=0,
    ),
    option(
        "--nodes N",
        "spread the engine's ranks over so many daemons, as over the nodes of one engine; the last "
        "one is killed (default: %(default)s)",
        type=int,
        default=1,
    ),
    switch(
        "--disaggregated",
        "two engines of one daemon, one that computes prompts and one that answers; each of the "
        "three is killed",
    ),
    # A test's: a stored byte is made wrong, which is checked for or not.
    option("--flip", argparse.SUPPRESS, choices=("detect", "blind")),
)
def run_verify(arguments: argparse.Namespace) -> int:
    """Run all arms. Returns 0 if all answers and bytes are right and all expected hits happened."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    model: str = arguments.model
    with ended_by_exception(), tempfile.TemporaryDirectory(prefix="hybridkv-verify-") as directory:
        logs = Path(tempfile.mkdtemp(prefix="hybridkv-verify-logs-"))
        try:
            kind = PairProof if arguments.disaggregated else Verification
            verification = kind(
                VerifyRequest(
                    model=model,
                    vllm_arguments=arguments.vllm_arguments,
                    ram=arguments.ram,
                    repeat=arguments.repeat,
                    flip=arguments.flip,
                    nodes=arguments.nodes,
                ),
                directory=Path(directory),
                logs=logs,
                say=say,
            )
            arms = verification.run_arms()
        except HybridKVError as error:
            if not any(logs.iterdir()):
                logs.rmdir()  # No engine has started.
            if arguments.json:
                print_json({"ok": False, "model": model, "error": str(error)})
            raise
    ok = all(arm.ok for arm in arms)
    variety, warnings = verification.variety, verification.warnings
    if ok:
        shutil.rmtree(logs)
    if arguments.json:
        print_json(
            {
                "ok": ok,
                "model": model,
                "chunk_tokens": verification.chunk_tokens,
                "groups": verification.groups,
                "prompts": verification.prompt_source,
                "answers": variety.answers,
                "distinct_answers": variety.distinct_answers,
                "distinct_tokens": variety.distinct_tokens,
                "warnings": warnings,
                "seconds": round(verification.seconds, 1),
                "arms": [*map(asdict, arms)],
            }
        )
    elif arms[0].not_served is not None:
        print(f"NOT PROVEN: {NotServedError.TEXT} ({verification.seconds:.0f} s)")
    else:
        chunk = f"chunk {verification.chunk_tokens} tokens, groups {verification.groups}"
        print_arms(f"hybridkv verify {model}: {chunk}", arms)
        for warning in warnings:
            print(f"warning: {warning}")
        verdict = "every answer and every byte is right" if ok else "DIFFERENT: see the red rows"
        print(f"{verdict} ({verification.seconds:.0f} s)")
    return int(not ok)


def print_arms(title: str, arms: Sequence[VerifyArm]) -> None:
    """Print a table with a row for each arm. Rows of arms that are not as they must be are red."""
    is_waited = any(arm.waited_ms is not None for arm in arms)
    waits = (WAITED,) if is_waited else ()
    table = new_table((LEFT[0], *RIGHT, *waits, *LEFT[1:]), LEFT, title)
    for arm in arms:
        different = "may differ" if arm.ok else "DIFFERENT"
        waited = "-" if arm.waited_ms is None else f"{arm.waited_ms:.0f}"
        limit = "" if arm.ttft_limit_ms is None else f" of {arm.ttft_limit_ms:.0f}"
        shown = {True: "same", False: different, None: "-"}
        table.add_row(
            arm.name,
            str(arm.prompt_tokens),
            str(arm.external_tokens),
            str(arm.expected_external_tokens),
            f"{arm.ttft_ms:.0f}{limit}",
            f"{arm.slowest_decode_step_ms:.0f}",
            format_size(arm.bytes_stored),
            format_size(arm.bytes_loaded),
            *([waited] if is_waited else ()),
            shown[arm.same_tokens],
            shown[arm.same_logprobs],
            shown[arm.same_bytes],
            shown[arm.same_drafts],
            f"skipped: {arm.not_served}" if arm.not_served else arm.oracle,
            style=None if arm.ok else "bold red",
        )
    PlainConsole(190 if is_waited else 160).print(table)


class _Daemons:
    """The daemons of one engine's nodes. They are a context manager, as a daemon is."""

    def __init__(self, directory: Path, name: str, request: VerifyRequest, ram: str) -> None:
        """The sockets are in `directory`. Each daemon has `ram` of memory."""
        shared = ["--tier", f"disk://{directory / 'shared'}"] if request.repeat else []
        pattern = str(directory / f"{name}{{node}}.sock")
        self.settings: dict[str, object] = {"server": f"unix://{pattern}", "nodes": request.nodes}
        """The settings by which an engine's ranks find their daemons."""
        self._daemons = [
            DaemonProcess(
                pattern.format(node=node), ram, options=[*shared, "--node", f"{name}{node}"]
            )
            for node in range(request.nodes)
        ]
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "_Daemons":
        with contextlib.ExitStack() as started:
            for daemon in self._daemons:
                started.enter_context(daemon)
            self._running = started.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()

    @property
    def socket_path(self) -> str:
        """The socket of the first node's daemon."""
        return self._daemons[0].socket_path

    def are_connected(self) -> bool:
        """Return True if the engine has a session at every daemon."""
        return all(read_stats(daemon.socket_path)["sessions"] for daemon in self._daemons)

    def kill_last(self) -> None:
        """Kill the last node's daemon with -9."""
        self._daemons[-1].kill()

    def start_last(self) -> None:
        """Start the last node's daemon again."""
        self._daemons[-1].start()


@dataclass(frozen=True, slots=True)
class _SecondTurns:
    """Prompts that end inside a block, and longer ones that begin with them."""

    first: Sequence[list[int]] = ()
    second: Sequence[list[int]] = ()
    hit_tokens: int = 0  # Of all second turns, what the engine's own cache would have.
    skipped: str = ""  # Why there are none.


@dataclass(slots=True)
class _ArmPrompts:
    """The prompts that belong to one arm each."""

    crowd: Sequence[list[int]] = ()  # Prompts that do not fit into the engine's blocks together.
    repeated: Sequence[list[int]] = ()  # Prompts of the arms of --repeat.
    turns: _SecondTurns = _SecondTurns()
    branch: list[int] = field(default_factory=list)
    """A prompt that leaves the split prompt where the state of its first part stands. Empty without
    states, or where a drafter makes the engine's own hits shorter."""


class _StoredSlots(NamedTuple):
    """The daemon's arena, and the header of each committed slot by its offset."""

    arena: Arena
    headers: dict[int, SlotHeader]


class Verification(Proof):
    """Runs the arms in order. Each arm finds the caches as the arm before it left them."""

    def __init__(
        self, request: VerifyRequest, *, directory: Path, logs: Path, say: Callable[[str], None]
    ) -> None:
        """Daemons have their sockets in `directory`, and engines their logs in `logs`.

        `say` prints what is done next.
        """
        super().__init__(request, logs=logs, say=say)
        self._directory = directory
        self._repeat, self._flip = request.repeat, request.flip
        if request.nodes < 1:
            raise ConfigError(f"--nodes {request.nodes} is no number of nodes", "--nodes 2 works")
        self._make_daemons(RAM)
        self._prompts = _ArmPrompts()
        self._judges = {
            "preempted": judging.judge_preempted,
            "second turns": judging.judge_turns,
            "divergent": judging.judge_branch,
        }
        """The judge of each arm of several prompts."""

    def _make_daemons(self, ram: str) -> None:
        """Make the daemons under test and those of another node. They start with the arms."""
        ram = self._request.ram or ram
        self._first_daemons = self._daemons = _Daemons(
            self._directory, "daemon", self._request, ram
        )
        self._other_daemons = _Daemons(self._directory, "other", self._request, ram)

    def run_arms(self) -> list[VerifyArm]:
        """Run all arms. Returns them, or the first arm alone where vLLM serves no such engine."""
        started = time.monotonic()
        if self._model is not None:
            self._arguments += self._bounding_arguments()
        self._arguments += self._given
        try:
            with self._daemons:
                measured = [*self._first_engine(), *self._second_engine()]
                measured += self._another_node() if self._repeat else []
                reference = self._reference()
        except NotServedError:
            return [VerifyArm("cold", not_served=NotServedError.REASON)]
        finally:
            self.seconds = time.monotonic() - started
        self.variety = judging.variety_of(reference)
        if self.variety.warning:
            self.warnings.append(self.variety.warning)
        expected = self._chunks * self.chunk_tokens
        arms = [judging.judge_reference(len(self._prompt), expected, reference)]
        for measures in measured:
            arms.append(self._judges.get(measures.name, judging.judge)(measures, reference))
        if self._prompts.turns.skipped:
            arms.append(VerifyArm("second turns", not_served=self._prompts.turns.skipped, ok=True))
        if not self._prompts.branch:
            arms.append(VerifyArm("divergent", not_served=NO_BRANCH, ok=True))
        return arms

    def _first_engine(self) -> Iterator[Measured]:
        with self._engine("first engine with hybridkv") as engine:
            self._connect(engine, [2, 3])
            with ControlClient(self._daemons.socket_path) as control:
                geometry = control.engines()[0].geometry
            self.chunk_tokens, self.groups = geometry.chunk_tokens, describe_groups(geometry.groups)
            has_states = any(group.kind is GroupKind.RECURRENT for group in geometry.groups)
            if has_states:
                self._stateless_tokens = engine.info["dropped_tokens"]
            self._make_prompts(engine, geometry)
            if has_states and not self._stateless_tokens:
                self._prompts.branch = [
                    *self._first_part,
                    *self._warm_up_prompt[: self.chunk_tokens],
                ]
            self._warm_up(engine)
            if self._model is not None:
                self._say_time(engine)
            stored_before = self._stored_slots().headers if self._flip else ()
            yield self._measure(engine, "cold", [self._prompt])
            if self._flip:
                self._flip_one_byte(stored_before)
            engine.reset_caches()
            yield self._measure(engine, "warm", [self._prompt], external_chunks=self._chunks)
            self._compute_split(engine)
            engine.reset_caches()
            engine.generate(self._first_part, max_tokens=1)
            mixed = self._measure(
                engine,
                "mixed local and external",
                [self._split],
                external_chunks=self._chunks - LOCAL_CHUNKS,
                local_chunks=LOCAL_CHUNKS,
            )
            if engine.info["dropped_tokens"] and not self._stateless_tokens:
                # vLLM's own hit is shorter than its oracle's, whose blocks came of other steps.
                mixed = replace(mixed, expected=None, tolerance=judging.NOISE_MIN)
            yield mixed
            if self._prompts.branch:
                # From outside comes the last state alone, and attention blocks from the first on.
                engine.reset_caches()
                self._generate(engine, self._split)
                yield self._measure(
                    engine, "divergent", [self._prompts.branch], external_chunks=LOCAL_CHUNKS
                )
            for prompt in (*self._prompts.repeated, *self._prompts.turns.first):
                self._generate(engine, prompt)
            self._settled()

    def _stored_slots(self) -> _StoredSlots:
        with ControlClient(self._daemons.socket_path) as control:
            arena = attach_arena(
                arena_seen(control.welcome.arena_path), control.welcome.arena_bytes
            )
            reserved = int(control.stats().values["bytes_reserved"])
            return _StoredSlots(arena, dict(committed_slots(arena.memory[:reserved])))

    def _flip_one_byte(self, excluded: Collection[int]) -> None:
        """Make one byte of one stored object wrong, as bad memory would.

        The object's slot is not at one of the `excluded` offsets. It is of a full attention group,
        because every hit needs all of those. Without such a group, a byte of every object is
        flipped. The byte stands in the middle: a payload may begin with what an answer does not
        depend on, such as an indexer's cache while every token is selected. It is the high byte of
        a float32, and of a bfloat16.
        """
        with ControlClient(self._daemons.socket_path) as control:
            groups = [group for engine in control.engines() for group in engine.geometry.groups]
        full = {group.gid for group in groups if group.kind is GroupKind.FULL}
        arena, headers = self._stored_slots()
        slots = {
            offset: header for offset, header in sorted(headers.items()) if offset not in excluded
        }
        wanted = [offset for offset, slot in slots.items() if slot.gid in full][:1] or [*slots]
        for offset in wanted:
            header = slots[offset]
            at = payload_offset(header.parts) + header.part_bytes // 16 * 8 + 3
            arena.memory[offset + at] ^= FLIP_BITS
        self._say(f"flipped one byte in {len(wanted)} of {len(slots)} stored objects")

    def _second_engine(self) -> Iterator[Measured]:
        with self._engine("second engine, started later") as engine:
            self._warm_up(engine)
            yield self._measure(
                engine, "engine restarted", [self._prompt], external_chunks=self._chunks
            )
            yield from self._measure_repeated(engine, "after the engine's restart")
            if not self._prompts.turns.skipped:
                turns = self._prompts.turns
                measures = self._measure(engine, "second turns", turns.second, together=False)
                yield replace(measures, expected=turns.hit_tokens)
            engine.reset_caches()
            yield self._measure_killed(engine, "daemon killed midway")
            # A new daemon runs, and the engine is connected to it.
            self._daemons.start_last()
            engine.reset_caches()
            self._connect(engine, self._warm_up_prompt[: self.chunk_tokens // 2])
            yield self._measure(
                engine, "daemon restarted", [self._prompt], external_chunks=self._chunks
            )
            yield from self._measure_repeated(engine, "after the daemon's restart")
            yield self._measure(engine, "preempted", self._prompts.crowd, external_chunks=1)

    def _connect(self, engine: EngineProcess, prompt: list[int]) -> None:
        """Compute a prompt until the engine has its sessions, which steps make on several nodes.

        Workers map an arena in a step too.
        """
        deadline = time.monotonic() + DAEMON_SECONDS
        while not self._daemons.are_connected() and time.monotonic() < deadline:
            engine.generate(prompt, max_tokens=4)

    def _another_node(self) -> Iterator[Measured]:
        """An engine whose daemon shares a directory with the one under test, and no memory."""
        self._daemons = self._other_daemons
        with self._daemons, self._engine("engine on another node") as engine:
            self._warm_up(engine)
            yield from self._measure_repeated(engine, "on another node")
        self._daemons = self._first_daemons

    def _reference(self) -> ReferenceAnswers:
        with self._engine("engine without a connector", connector=False) as engine:
            self._warm_up(engine)
            computed, local_hit = (self._generate(engine, self._prompt)[0] for _ in range(2))
            self._compute_split(engine)
            split_hit = self._generate(engine, self._split)[0]
            branch = (
                [self._generate(engine, self._prompts.branch)[0]] if self._prompts.branch else []
            )
            alone = [self._generate(engine, prompt)[0] for prompt in self._prompts.crowd]
            engine.reset_caches()
            noise = judging.deviation(self._generate(engine, *self._prompts.crowd), alone)
            for prompt in (*self._prompts.repeated, *self._prompts.turns.first):
                self._generate(engine, prompt)
            repeated, turns = (
                [self._generate(engine, prompt)[0] for prompt in prompts]
                for prompts in (self._prompts.repeated, self._prompts.turns.second)
            )
            return ReferenceAnswers(
                computed=computed,
                local_hit=local_hit,
                split_hit=split_hit,
                alone=alone,
                noise=noise,
                repeated=repeated,
                turns=turns,
                branch=branch,
            )

    def _measure_repeated(self, engine: EngineProcess, arm: str) -> Iterator[Measured]:
        """Run the prompts of `--repeat` as an arm, one after the other."""
        if self._prompts.repeated:
            self._judges[arm] = judging.judge_repeated
            prompts = self._prompts.repeated
            chunks = self._chunks * len(prompts)
            yield self._measure(engine, arm, prompts, external_chunks=chunks, together=False)

    def _measure(
        self,
        engine: EngineProcess,
        arm: str,
        prompts: Sequence[list[int]],
        *,
        external_chunks: int = 0,
        local_chunks: int = 0,
        together: bool = True,
    ) -> Measured:
        """Run an arm's prompts, at once if `together`, and return what was measured.

        `external_chunks` must come from the connector, and `local_chunks` from the engine's cache.
        """
        self._say(f"arm: {arm}")
        before = self._stats()
        if together:
            results = self._generate(engine, *prompts)
        else:
            results = [self._generate(engine, prompt)[0] for prompt in prompts]
        delta = {key: int(count - before.get(key, 0)) for key, count in self._settled().items()}
        return Measured(
            name=arm,
            prompt_tokens=sum(map(len, prompts)),
            results=results,
            delta=delta,
            expected=external_chunks * self.chunk_tokens,
            local=local_chunks * self.chunk_tokens,
        )

    def _measure_killed(self, engine: EngineProcess, arm: str) -> Measured:
        """Run an arm in which the daemon is killed as soon as it has answered the lookup."""
        self._say(f"arm: {arm}")
        lookups = self._stats().get("lookups", 0)
        engine.begin_command("generate", prompts=[self._prompt], max_tokens=KILLED_TOKENS)
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._stats().get("lookups", 0) == lookups and time.monotonic() < deadline:
            pass
        self._daemons.kill_last()
        (result,) = engine.end_command()
        for key in ("tokens", "logprobs"):
            result[key] = result[key][:MAX_TOKENS]
        result["step_tokens"] = []  # It has more of them than its oracle.
        # Whether the load came first is chance; the engine's own count says what it computed from.
        loaded = {"tokens_loaded": result["cached_tokens"]}
        return Measured(arm, len(self._prompt), [result], loaded, None)

    def _settled(self) -> dict[str, float]:
        return settled_stats(self._daemons.socket_path)

    @property
    def _first_part(self) -> list[int]:
        """The first part of the prompt that is computed in two parts."""
        return self._split[: LOCAL_CHUNKS * self.chunk_tokens + self._stateless_tokens + 5]

    def _compute_split(self, engine: EngineProcess) -> None:
        """Compute the split prompt in two parts, so that each engine has the same blocks.

        A kernel may give other last bits for the same tokens in a prompt of another length.
        """
        engine.reset_caches()
        engine.generate(self._first_part, max_tokens=1)
        engine.generate(self._split, max_tokens=1)
        self._settled()

    def _warm_up(self, engine: EngineProcess) -> None:
        """Run another prompt, because an engine compiles on first use, which lengthens TTFT."""
        self._say("warming up")
        for length in (len(self._warm_up_prompt), len(self._warm_up_prompt) % self.chunk_tokens):
            engine.generate(self._warm_up_prompt[:length], max_tokens=2)

    def _say_time(self, engine: EngineProcess) -> None:
        """Say how long all arms take, by the pace of the first engine, which is warm."""
        start_seconds = time.monotonic() - self._engine_began
        prompt = self._warm_up_prompt[self.chunk_tokens :]  # Nothing of it is cached.
        (result,) = engine.generate(prompt, max_tokens=4)
        token_seconds = result["ttft_seconds"] / len(prompt)
        step_seconds = result["slowest_decode_step_seconds"]
        own = self._prompts
        turns = [*own.turns.first, *own.turns.second]
        prompts = [self._prompt, self._split, *own.crowd, *own.repeated, *turns, own.branch]
        # With hybridkv and without it. The split prompt is computed in parts.
        tokens = 2 * sum(map(len, prompts)) + 4 * len(self._split)
        steps = 3 * MAX_TOKENS * len(prompts) + KILLED_TOKENS
        starts = 3 if self._repeat else 2
        seconds = starts * start_seconds + tokens * token_seconds + steps * step_seconds
        self._say(
            f"about {seconds:.0f} s from now: {starts} more engines that start in "
            f"{start_seconds:.0f} s, {tokens:,} tokens at {1 / token_seconds:,.0f} a second, "
            f"{steps} steps of {step_seconds * 1e3:.0f} ms"
        )

    def _bounding_arguments(self) -> list[str]:
        """Return how long a context and how much memory the proof needs, as arguments of vLLM.

        Raises ConfigError where the engine could not be served.
        """
        preview = self._read_preview(self._transfer())
        if preview is None or preview.geometry is None:
            return []  # The engine says what is wrong.
        chunk_tokens = preview.geometry.chunk_tokens
        windows = [group.window_tokens for group in preview.groups]
        whole = (wanted_chunks(chunk_tokens, windows) + 1) * chunk_tokens + KILLED_TOKENS
        turn = TURN_CHUNKS * chunk_tokens + max(TURNS) + KILLED_TOKENS
        prompts = 3 + PREEMPTED_PROMPTS + self._repeat + 2 * len(TURNS)
        bounds = self._bounds_for(preview, max(whole, turn), prompts)
        ram = ram_size(bounds)
        self._make_daemons(ram)
        self._say(
            f"one engine at a time gets {bounds}, and a daemon {self._request.ram or ram} "
            "of memory, unless your arguments say otherwise; the first engine shows how long it "
            "takes"
        )
        return bounds.arguments(self._given)

    def _make_prompts(self, engine: EngineProcess, geometry: WireGeometry) -> None:
        """Cut or draw the prompts of all arms. Raises ConfigError where they do not fit."""
        unit = geometry.alignment_tokens
        length = self._choose_length(engine, geometry)
        first_tokens = TURN_CHUNKS * self.chunk_tokens - 2 * unit + 3
        most = engine.info["max_model_len"] - MAX_TOKENS
        turns = [min(first_tokens + new, most) for new in TURNS]
        texts = self._texts(
            engine, 3 + PREEMPTED_PROMPTS + self._repeat + len(turns), max(length, *turns)
        )
        arm_prompts, second = texts[: -len(turns)], texts[-len(turns) :]
        self._prompt, self._warm_up_prompt, self._split, *arm_prompts = (
            text[:length] for text in arm_prompts
        )
        crowd = arm_prompts[:PREEMPTED_PROMPTS]
        self._prompts.repeated = arm_prompts[PREEMPTED_PROMPTS:]
        # Its last state stands at the end of a chunk, however small the blocks are.
        block = max(group.tokens_per_block for group in geometry.groups)
        crowded = self.chunk_tokens + block + self._stateless_tokens - PREEMPTED_AFTER
        self._prompts.crowd = [text[:crowded] for text in crowd]
        if why := engine.info["no_tails"]:
            self._prompts.turns = _SecondTurns(skipped=why)
            return
        second = [text[:tokens] for text, tokens in zip(second, turns, strict=True)]
        self._prompts.turns = _SecondTurns(
            first=[prompt[:first_tokens] for prompt in second],
            second=second,
            hit_tokens=(first_tokens - 1) // unit * unit * len(second),
        )

    def _engine(self, what: str, connector: bool = True) -> EngineProcess:
        """Start an engine: that of the proof, or without `connector` the oracle."""
        return self._start_engine(what, self._transfer() if connector else None)

    def _transfer(self) -> str:
        """Return vLLM's --kv-transfer-config of the engines with hybridkv."""
        checksum = "off" if self._flip == "blind" else "paranoid"
        # Every hit is to be loaded and judged, even where computing would be faster.
        extra = {**self._daemons.settings, "checksum": checksum}
        extra |= {"load_policy": LoadPolicy.ALWAYS.value, "audit": "off"}
        extra["lookup_timeout_ms"] = 2000
        return json.dumps({**LONG_TRANSFER, "kv_connector_extra_config": extra})

    def _stats(self) -> dict[str, float]:
        return read_stats(self._daemons.socket_path)
