"""`hybridkv verify --disaggregated`: one engine computes prompts, and another one answers.

Both are real engines of one daemon. An arm asks both for one prompt, in every order, and while one
of the three dies.
"""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridkv.cli.proof import (
    MAX_TOKENS,
    RAM,
    SETTLE_SECONDS,
    Proof,
    VerifyRequest,
    check_answers,
    ram_size,
    read_stats,
    settled_stats,
)
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.settings import LONG_TRANSFER
from hybridkv.lab import judging
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess, NotServedError
from hybridkv.lab.judging import Measured, ReferenceAnswers, VerifyArm
from hybridkv.lab.models import is_cpu_build
from hybridkv.lab.prompts import CHUNKS_MIN, names_option, wanted_chunks
from hybridkv.wire.messages import describe_groups

PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
PROMPTS = 11  # Of all arms, three of them to warm up.
STEP_TOKENS = 256
STEPS = 4  # A prompt has more, so that an engine can be ended between two of them.
WAIT_MARGIN_SECONDS = 0.1
"""A first token may come so much later than after a wait as long as computing, and computing."""
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_STEP_OPTION = "--max-num-batched-tokens"


def step_tokens(chunk_tokens: int) -> int:
    """Return the tokens of a step of prefill, which ends where a chunk does. 96 -> 288"""
    return chunk_tokens * math.ceil(STEP_TOKENS / chunk_tokens)


def chunks_min(chunk_tokens: int) -> int:
    """Return the chunks of a prompt of STEPS whole steps, or CHUNKS_MIN. 128 -> 8"""
    return max(CHUNKS_MIN, STEPS * step_tokens(chunk_tokens) // chunk_tokens)


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """The answer of one engine of the pair to the prompt of an arm."""

    arm: str
    prompt: list[int]
    result: Mapping[str, Any]  # The engine's answer, as hybridkv.lab.runner gives it.
    delta: Mapping[str, float]  # The increments of the daemon's counters during the arm.
    expected: int | None = None  # Tokens that must come from outside; None where chance decides.
    own_hit: Mapping[str, Any] | None = None
    """What it is compared with. None = a hit of the same length without a connector."""
    waits: bool = True  # False where nobody has promised any of the prompt.

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return int(self.result["cached_tokens"])


class PairProof(Proof):
    """Runs the arms in order, on a prefiller and a decoder of one daemon."""

    def __init__(
        self, request: VerifyRequest, *, directory: Path, logs: Path, say: Callable[[str], None]
    ) -> None:
        """The daemon has its socket in `directory`. Raises ConfigError, as `Proof` does."""
        super().__init__(request, logs=logs, say=say)
        for option, is_given in (("--nodes", request.nodes > 1), ("--repeat", request.repeat)):
            if is_given:
                what = f"{option} is for one engine, and --disaggregated for two"
                raise ConfigError(what, f"--disaggregated without {option} works")
        if is_cpu_build():
            # Threads of two engines that wait for each other's cores are slow.
            threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
            own = os.environ.get(_THREADS_VARIABLE, threads)
            self._environment = {**self._environment, _THREADS_VARIABLE: own}
        self._socket_path = str(directory / "daemon.sock")
        self._daemon = DaemonProcess(self._socket_path, request.ram or RAM)
        self._texts_left: list[list[int]] = []  # Prompts that no arm has used.
        self._computing_seconds = 0.0  # In which an engine computes a prompt, as the other does.

    def run_arms(self) -> list[VerifyArm]:
        """Run all arms. Returns them, or the first arm alone where vLLM serves no such engine."""
        started = time.monotonic()
        if self._model is None:
            bounds = self._step_arguments(STEP_TOKENS)
        else:
            bounds = self._bounding_arguments()
        self._arguments += [*bounds, *self._given]
        try:
            with self._daemon:
                answers = [*self._pair_answers()]
            return self._judge(answers)
        except NotServedError:
            return [VerifyArm("prefiller first", not_served=NotServedError.REASON)]
        finally:
            self.seconds = time.monotonic() - started

    def _bounding_arguments(self) -> list[str]:
        """Return the context, the memory and the steps of the proof, as arguments of vLLM.

        Raises ConfigError where the engines could not be served.
        """
        preview = self._read_preview(self._transfer(PRODUCER))
        if preview is None or preview.geometry is None:
            return []  # The engine says what is wrong.
        chunk_tokens = preview.geometry.chunk_tokens
        windows = [group.window_tokens for group in preview.groups]
        chunks = max(chunks_min(chunk_tokens), wanted_chunks(chunk_tokens, windows))
        bounds = self._bounds_for(preview, (chunks + 1) * chunk_tokens + MAX_TOKENS, PROMPTS)
        ram = self._request.ram or ram_size(bounds)
        self._daemon = DaemonProcess(self._socket_path, ram)
        self._say(
            f"two engines at a time get {bounds} each, and a daemon {ram} of memory, unless your "
            "arguments say otherwise"
        )
        steps = self._step_arguments(step_tokens(chunk_tokens))
        return [*bounds.arguments(self._given), *steps]

    def _step_arguments(self, tokens: int) -> list[str]:
        """Return steps of so many tokens as an argument of vLLM. [] = as the user serves."""
        if names_option(self._given, _STEP_OPTION):
            return []
        if names_option([*self._arguments, *self._given], "--speculative-config"):
            # Chunks at the ends of steps may have stale KV of a drafter, and are not stored then.
            self.warnings.append("with a drafter a prompt may be one step, which no kill divides")
            return []
        return [f"{_STEP_OPTION}={tokens}"]

    def _transfer(self, role: str) -> str:
        """Return vLLM's --kv-transfer-config of an engine in a role."""
        extra = {"server": f"unix://{self._socket_path}", "checksum": "paranoid"}
        settings = {**extra, "audit": "off", "lookup_timeout_ms": 2000}
        return json.dumps({**LONG_TRANSFER, "kv_role": role, "kv_connector_extra_config": settings})

    def _start(self, role: str) -> EngineProcess:
        return self._start_engine(f"an engine with {role}", self._transfer(role))

    # The arms

    def _pair_answers(self) -> Iterator[PairAnswer]:
        with contextlib.ExitStack() as engines:
            prefill = engines.enter_context(self._start(PRODUCER))
            decode = engines.enter_context(self._start(CONSUMER))
            self._make_prompts(prefill)
            self._connect(prefill, decode)
            self._warm_up(prefill)
            self._warm_up(decode)
            first = self._texts_left.pop()
            yield from self._prefiller_first(prefill, decode, first)
            yield from self._both(prefill, decode)
            yield from self._decoder_first(prefill, decode)
            yield from self._daemon_killed(prefill, decode)
            decode.reset_caches()
            before = self._begin_arm("the daemon is back")
            (result,) = self._generate(decode, first)
            yield self._answered("daemon is back", first, result, before, self._whole_tokens)
            text = self._texts_left.pop()
            yield from self._decoder_killed(prefill, decode, text)
            other = engines.enter_context(self._start(CONSUMER))
            self._warm_up(other)
            before = self._begin_arm("another decoder")
            (result,) = self._generate(other, text)
            yield self._answered("another decoder", text, result, before, self._whole_tokens)
            yield from self._prefiller_killed(prefill, other)
            if leases := settled_stats(self._socket_path)["leases"]:
                raise HybridKVError(f"{leases:.0f} leases are left of engines that were killed")

    def _prefiller_first(
        self, prefill: EngineProcess, decode: EngineProcess, text: list[int]
    ) -> Iterator[PairAnswer]:
        """The decoder is asked as soon as the prefiller has answered."""
        before = self._begin_arm("the prefiller first")
        self._generate(prefill, text)
        (result,) = self._generate(decode, text)
        arm = self._answered("prefiller first", text, result, before, self._whole_tokens)
        yield arm
        (own,) = self._generate(prefill, text)
        yield replace(arm, arm="its hit, the prefiller's own", own_hit=own)

    def _both(self, prefill: EngineProcess, decode: EngineProcess) -> Iterator[PairAnswer]:
        """Both are asked at once, and the decoder just after the prefiller's lookup."""
        for arm, is_after in (("both at once", False), ("decoder just after", True)):
            text = self._texts_left.pop()
            before = self._begin_arm(arm)
            _begin(prefill, text)
            if is_after:
                self._await_counter("lookups", before)
            _begin(decode, text)
            results = [_end(prefill), _end(decode)]
            for name, result in zip(("prefiller", "decoder"), results, strict=True):
                yield self._answered(f"{arm}: {name}", text, result, before)

    def _decoder_first(self, prefill: EngineProcess, decode: EngineProcess) -> Iterator[PairAnswer]:
        """The prefiller is asked after the decoder, and nobody waits for what a decoder computes.

        What the decoder has stored is the prefiller's hit.
        """
        text = self._texts_left.pop()
        before = self._begin_arm("the decoder first")
        _begin(decode, text)
        self._await_counter("lookups", before)
        _begin(prefill, text)
        results = [_end(decode), _end(prefill)]
        for name, result in zip(("decoder", "prefiller"), results, strict=True):
            answer = self._answered(f"decoder first: {name}", text, result, before)
            yield replace(answer, waits=False)
        text = self._texts_left.pop()
        before = self._begin_arm("the prefiller after the decoder")
        self._generate(decode, text)
        (result,) = self._generate(prefill, text)
        whole = self._whole_tokens
        yield self._answered("prefiller after the decoder", text, result, before, whole)

    def _daemon_killed(self, prefill: EngineProcess, decode: EngineProcess) -> Iterator[PairAnswer]:
        """The daemon is killed while the prefiller computes and the decoder waits for that."""
        text = self._texts_left.pop()
        before = self._begin_arm("the daemon is killed")
        self._begin_halfway(prefill, decode, text, before)
        self._daemon.kill()
        os.kill(prefill.process.pid, signal.SIGCONT)
        results = [_end(prefill), _end(decode)]
        for name, result in zip(("prefiller", "decoder"), results, strict=True):
            yield PairAnswer(f"daemon killed: {name}", text, result, {})
        self._daemon.start()
        self._connect(prefill, decode)

    def _decoder_killed(
        self, prefill: EngineProcess, decode: EngineProcess, text: list[int]
    ) -> Iterator[PairAnswer]:
        """The decoder is killed while it waits for the prefiller."""
        before = self._begin_arm("the decoder is killed")
        self._begin_halfway(prefill, decode, text, before)
        _kill(decode)
        os.kill(prefill.process.pid, signal.SIGCONT)
        yield self._answered("decoder killed: prefiller", text, _end(prefill), before)

    def _prefiller_killed(
        self, prefill: EngineProcess, decode: EngineProcess
    ) -> Iterator[PairAnswer]:
        """The prefiller is killed between the first and the last chunk, while the decoder waits."""
        text = self._texts_left.pop()
        before = self._begin_arm("the prefiller is killed")
        self._begin_halfway(prefill, decode, text, before)
        _kill(prefill)
        yield self._answered("prefiller killed: decoder", text, _end(decode), before)

    def _begin_halfway(
        self,
        prefill: EngineProcess,
        decode: EngineProcess,
        text: list[int],
        before: Mapping[str, float],
    ) -> None:
        """Stop the prefiller once its first chunk is stored, and ask the decoder.

        Returns once the daemon has the decoder's lookup.
        """
        _begin(prefill, text)
        self._await_counter("objects_stored", before)
        os.kill(prefill.process.pid, signal.SIGSTOP)
        asked = read_stats(self._socket_path)
        _begin(decode, text)
        self._await_counter("lookups", asked)

    def _begin_arm(self, what: str) -> dict[str, float]:
        """Say what begins. Returns the daemon's values before it."""
        self._say(f"arm: {what}")
        return settled_stats(self._socket_path)

    def _answered(
        self,
        arm: str,
        prompt: list[int],
        result: Mapping[str, Any],
        before: Mapping[str, float],
        expected: int | None = None,
    ) -> PairAnswer:
        now = settled_stats(self._socket_path)
        delta = {key: value - before.get(key, 0) for key, value in now.items()}
        return PairAnswer(arm, prompt, result, delta, expected)

    def _await_counter(self, key: str, before: Mapping[str, float]) -> None:
        """Wait until a counter of the daemon is larger than before. Raises HybridKVError."""
        deadline = time.monotonic() + SETTLE_SECONDS
        with ControlClient(self._socket_path) as control:
            while control.stats().values.get(key, 0) <= before.get(key, 0):
                if time.monotonic() > deadline:
                    raise HybridKVError(f"no {key} within {SETTLE_SECONDS:g} s")

    # What the arms begin with

    @property
    def _whole_tokens(self) -> int:
        """All that is storable of a prompt."""
        return self._chunks * self.chunk_tokens

    def _make_prompts(self, engine: EngineProcess) -> None:
        """Cut or draw the prompts of all arms. Raises ConfigError where they do not fit."""
        with ControlClient(self._socket_path) as control:
            geometry = control.engines()[0].geometry
        self.chunk_tokens, self.groups = geometry.chunk_tokens, describe_groups(geometry.groups)
        if any(group.kind is GroupKind.RECURRENT for group in geometry.groups):
            self._stateless_tokens = engine.info["dropped_tokens"]
        length = self._choose_length(engine, geometry, chunks_min(self.chunk_tokens))
        self._texts_left = [text[:length] for text in self._texts(engine, PROMPTS, length)]

    def _connect(self, *engines: EngineProcess) -> None:
        """Compute a prompt until each engine has its session, which steps make after a restart."""
        deadline = time.monotonic() + SETTLE_SECONDS
        text = [2 + at % 7 for at in range(self.chunk_tokens // 2)]
        while read_stats(self._socket_path)["sessions"] < len(engines):
            if time.monotonic() > deadline:
                raise HybridKVError(f"an engine has no session after {SETTLE_SECONDS:g} s")
            for engine in engines:
                engine.generate(text, max_tokens=4)

    def _warm_up(self, engine: EngineProcess) -> None:
        """Compute two prompts of which no KV is loaded.

        An engine compiles on first use, and waits by the speeds that it has measured.
        """
        self._say("warming up")
        text = self._texts_left.pop()
        self._generate(engine, text[: len(text) // 2])
        self._generate(engine, text[1:])

    # What comes of them

    def _judge(self, answers: list[PairAnswer]) -> list[VerifyArm]:
        """Compare every answer with one engine's own hit of the same length."""
        oracles = self._reference(answers)
        first = answers[0].prompt
        computed, whole = (_key(first, hit) for hit in (0, self._whole_tokens))
        reference = _reference_answers(oracles[computed], oracles[whole])
        arms = [judging.judge_reference(len(first), self._whole_tokens, reference)]
        by_prompt = {tuple(answer.prompt): answer.result for answer in answers}
        _, second, *others = by_prompt.values()
        self.variety = judging.variety_of(replace(reference, split_hit=second, repeated=others))
        if self.variety.warning:
            self.warnings.append(self.variety.warning)
        computing = [answer.result["ttft_seconds"] for answer in answers if not answer.waits]
        self._computing_seconds = max(computing)
        for answer in answers:
            own = answer.own_hit or oracles[_key(answer.prompt, answer.cached_tokens)]
            arms.append(self._judge_answer(answer, own))
        return arms

    def _judge_answer(self, answer: PairAnswer, own: Mapping[str, Any]) -> VerifyArm:
        """Return whether an answer is that of `own`, and came soon enough.

        It may come after a wait as long as computing, and after computing what is missing then.
        """
        delta = {key: int(value) for key, value in answer.delta.items()}
        if answer.expected is None:
            # The other engine may have loaded too; this one's own count says what it began with.
            delta["tokens_loaded"] = answer.cached_tokens
        measured = Measured(answer.arm, len(answer.prompt), [answer.result], delta, answer.expected)
        arm = judging.judge(measured, _reference_answers(own, own))
        arm.ok = arm.ok and own["cached_tokens"] == answer.cached_tokens
        arm.ttft_limit_ms = (2 * self._computing_seconds + WAIT_MARGIN_SECONDS) * 1e3
        is_soon = arm.ttft_ms <= arm.ttft_limit_ms
        if answer.delta:
            waited_seconds = answer.delta["lookup_wait_seconds"]
            arm.waited_ms = waited_seconds * 1e3
            # What is above that is then slow computing. A wait that the engine ended counts as 0.
            is_soon |= 0 < waited_seconds <= self._computing_seconds + WAIT_MARGIN_SECONDS
        arm.ok = arm.ok and is_soon
        return arm

    def _reference(self, answers: list[PairAnswer]) -> dict[tuple[int, ...], dict[str, Any]]:
        """Return the answers of an engine without a connector, by `_key`."""
        wanted = {_key(answer.prompt, answer.cached_tokens): answer for answer in answers}
        for hit in (0, self._whole_tokens):
            first = replace(answers[0], result={"cached_tokens": hit})
            wanted[_key(first.prompt, hit)] = first
        oracles = {}
        with self._start_engine("an engine without a connector", None) as engine:
            self._generate(engine, answers[0].prompt[1:])
            for key, answer in wanted.items():
                text = answer.prompt
                engine.reset_caches()
                if answer.cached_tokens == self._whole_tokens:
                    self._generate(engine, text)
                elif answer.cached_tokens:
                    # Its last state stands where the hit ends.
                    engine.generate(
                        text[: answer.cached_tokens + self._stateless_tokens + 1], max_tokens=1
                    )
                (oracles[key],) = self._generate(engine, text)
        return oracles


def _key(prompt: list[int], hit: int) -> tuple[int, ...]:
    """Return the name of the answer to a prompt from a hit of so many tokens."""
    return (hit, *prompt)


def _reference_answers(computed: Mapping[str, Any], hit: Mapping[str, Any]) -> ReferenceAnswers:
    return ReferenceAnswers(
        computed=computed, local_hit=hit, split_hit=hit, alone=(), noise=0.0, repeated=()
    )


def _begin(engine: EngineProcess, prompt: list[int]) -> None:
    engine.begin_command("generate", prompts=[prompt], max_tokens=MAX_TOKENS)


def _end(engine: EngineProcess) -> dict[str, Any]:
    """Return the answer to the prompt that was begun."""
    results = engine.end_command()
    check_answers(results)
    (result,) = results
    return dict(result)


def _kill(engine: EngineProcess) -> None:
    """Kill an engine with -9, and wait for its end."""
    engine.process.kill()
    engine.process.wait()
