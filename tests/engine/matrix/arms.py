"""Every architecture on a real engine: computed, the engine's own hit, and hits from outside.

`python -m tests.engine.matrix [CASE...]` runs all cases, or those that are named, with one import
of vLLM, and prints a report of each as a line of JSON. It ends with 1 where something is wrong.
With HYBRIDKV_TEST_CPU=avx2 vLLM runs as on a machine without AVX-512.

A case is one engine with `checksum: paranoid`, in a fork of this process. Its prompt is computed,
hit in the engine's own prefix cache, and, after resets of that cache, hit from outside: as it was
stored, with a wrong byte that is signed in the last object of each group, and with one that no
signature has.
"""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import vllm

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import LOADS_FAILED, TOKENS_LOADED
from hybridkv.core.metrics import Metric
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import NotServedError
from hybridkv.lab.models import SPECULATION, bundled_environment
from hybridkv.lab.runner import EngineRunner, make_engine
from hybridkv.shm.arena import arena_seen, attach_arena
from hybridkv.shm.slots import (
    SlotHeader,
    committed_slots,
    part_digests,
    payload_offset,
    short_hash,
    sign,
    slot_bytes,
)
from tests.engine.matrix.cases import CASES, Case
from tests.engine.matrix.report import CaseReport, Compared, Served, Turn
from tests.engine.ready import await_write_slots
from tests.engine.support import LOOKUP_TIMEOUT_MS, arguments_of, is_served, prompt, stats
from tests.waiting import DEADLINE_SECONDS, until

RAM = "128MiB"
CHUNKS, MORE_TOKENS = 3, 20  # A prompt has so many whole chunks, and tokens after them.
MAX_TOKENS = 6
TURN_TOKENS = 100  # New in a second turn.
WRONG_BITS = 0x41
Answer = Mapping[str, Any]
"""The answer of hybridkv.lab.runner to a request."""


@dataclass(frozen=True)
class Place:
    """The place of an object in the arena."""

    offset: int
    header: SlotHeader


class Arms:
    """The requests of one case, on one engine."""

    def __init__(self, case: Case, socket_path: str) -> None:
        self._socket_path = socket_path
        extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
        extra["lookup_timeout_ms"] = LOOKUP_TIMEOUT_MS
        engine = make_engine(arguments_of(case.model, socket_path, *case.arguments, extra=extra))
        await_write_slots(engine)
        self._runner = EngineRunner(engine)
        self._connector: Any = engine.engine_core.engine_core.scheduler.connector

    def run(self, case: Case) -> Served:
        """Run all arms, one after the other."""
        with self._control() as control:
            (engine,) = control.engines()
        chunk = engine.geometry.chunk_tokens
        text = prompt(1, CHUNKS * chunk + MORE_TOKENS)
        computed = self._answer(text)
        own = self._answer(text)
        hit = self._compared(text, own)
        objects = self._objects(engine.namespace, own["cached_tokens"] // chunk)
        blind = {}
        for gid, place in sorted(objects.items()):
            with self._wrong_byte(place, is_signed=True):
                blind[gid] = self._compared(text, own)
        with self._wrong_byte(min(objects.items())[1], is_signed=False):
            detected = self._compared(text, computed)
        turn = self._second_turn(chunk) if case.has_turn else None
        return Served(
            chunk_tokens=chunk,
            groups=len(engine.geometry.groups),
            own_tokens=own["cached_tokens"],
            drafted_tokens=sum(map(len, own["drafts"])) if case.model in SPECULATION else None,
            hit=hit,
            blind=blind,
            detected=detected,
            turn=turn,
            is_shared=not stats(self._socket_path)["engines_unread"],
        )

    def _second_turn(self, chunk: int) -> Turn:
        """A hit beyond the last whole block of the first turn, which ends inside a block."""
        first = prompt(2, CHUNKS * chunk + chunk // 2)
        second = [*first, *prompt(3, TURN_TOKENS)]
        self._answer(first)
        own = self._answer(second)
        # Nothing is left of the second turn.
        with self._control() as control:
            control.clear_objects()
        self._forget()
        self._answer(first)
        return Turn(own["cached_tokens"], self._compared(second, own))

    def _control(self) -> ControlClient:
        return ControlClient(self._socket_path, DEADLINE_SECONDS)

    def _answer(self, text: list[int]) -> Answer:
        (answer,) = self._runner.generate([text], MAX_TOKENS)
        return answer

    def _compared(self, text: list[int], expected: Answer) -> Compared:
        """The answer once the engine's own cache is empty, next to what it must be."""
        self._forget()
        loaded, failed = self._counted(TOKENS_LOADED), self._counted(LOADS_FAILED)
        answer = self._answer(text)
        return Compared(
            cached_tokens=answer["cached_tokens"],
            loaded_tokens=self._counted(TOKENS_LOADED) - loaded,
            failed_loads=self._counted(LOADS_FAILED) - failed,
            same_tokens=answer["tokens"] == expected["tokens"],
            same_logprobs=answer["logprobs"] == expected["logprobs"],
            same_drafts=all(answer[key] == expected[key] for key in ("drafts", "step_tokens")),
        )

    def _counted(self, metric: Metric) -> int:
        return int(self._connector.counters.get(metric, 0))

    def _forget(self) -> None:
        """Empty the engine's own cache, and wait until its weights were read again."""
        assert self._runner.reset_caches(connector=False)

        def is_read() -> bool:
            self._runner.generate([prompt(9, 10)], 1)
            return bool(self._connector.scheduler_role.weights.is_current)

        until(is_read, "the weights are read")

    def _objects(self, namespace: bytes, chunks: int) -> dict[int, Place]:
        """The object of the last of a prompt's first chunks in each group, by gid."""
        with self._memory() as memory:
            stored = [
                Place(offset, header)
                for offset, header in committed_slots(memory)
                if header.namespace == namespace
            ]
        after = {place.header.parent_short: short_hash(place.header.chunk_hash) for place in stored}
        name = 0  # The name before the first chunk.
        for _ in range(chunks):
            name = after[name]
        last = [place for place in stored if short_hash(place.header.chunk_hash) == name]
        return {place.header.gid: place for place in last}

    @contextlib.contextmanager
    def _memory(self) -> Iterator[memoryview]:
        """The arena, as far as it has memory."""
        with self._control() as control:
            welcome = control.welcome
            reserved = int(control.stats().values["bytes_reserved"])
        arena = attach_arena(arena_seen(welcome.arena_path), welcome.arena_bytes)
        try:
            yield arena.memory[:reserved]
        finally:
            arena.close()

    @contextlib.contextmanager
    def _wrong_byte(self, place: Place, is_signed: bool) -> Iterator[None]:
        """An object has a wrong byte, and maybe a signature that says it is right."""
        with self._memory() as memory:
            _flip(memory, place, is_signed)
        yield
        if is_signed:
            with self._memory() as memory:
                _flip(memory, place, is_signed)


def _flip(memory: memoryview, place: Place, is_signed: bool) -> None:
    """Change the last byte of an object's first half. A second call changes it back.

    It is the high byte of a float32 and of a bfloat16 alike. It belongs to the last token of a head
    in a layer, because a window does not reach the first token of its first block.
    """
    header = place.header
    parts, part_bytes = header.parts, header.part_bytes
    slot = memory[place.offset : place.offset + slot_bytes(part_bytes, parts)]
    slot[payload_offset(parts) + part_bytes // 16 * 8 - 1] ^= WRONG_BITS
    if is_signed:
        sign(slot, part_digests(slot, part_bytes, parts), header.generation)


def _report(name: str, socket_path: str) -> CaseReport:
    """Run a case. Returns its report, with the error that ended it."""
    case, started = CASES[name], time.monotonic()
    served, skipped, error = None, "", ""
    if case.only_since_032 and int(vllm.__version__.split(".")[1]) < 32:
        skipped = f"vLLM {vllm.__version__}: {case.only_since_032}"
        return CaseReport(case=name, seconds=0.0, skipped=skipped)
    os.environ.update(bundled_environment(case.model))
    try:
        served = Arms(case, socket_path).run(case)
    except NotServedError as refusal:
        skipped = "" if is_served(case.model) else refusal.TEXT
        error = "" if skipped else traceback.format_exc()
    except Exception:  # noqa: BLE001  # whatever it is, it failed this case
        error = traceback.format_exc()
    seconds = round(time.monotonic() - started, 1)
    return CaseReport(case=name, seconds=seconds, served=served, skipped=skipped, error=error)


def _fork(name: str, socket_path: str, connection: Connection) -> None:
    """Run a case in a fork, send its report, and end at once: nobody needs the engine any more."""
    connection.send_bytes(msgspec.json.encode(_report(name, socket_path)))
    os._exit(0)


def _forked(name: str, daemon: DaemonProcess) -> CaseReport:
    """A case in a fork of this process."""

    def is_free() -> bool:
        """The daemon learns of the end of an engine a moment later."""
        with ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control:
            control.clear_objects()
            return not control.engines()

    until(is_free, "the engine before has ended")
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_fork, args=(name, daemon.socket_path, theirs))
    process.start()
    theirs.close()
    with ours:
        try:
            report = msgspec.json.decode(ours.recv_bytes(), type=CaseReport)
        except EOFError:
            process.join()
            error = f"the engine's process ended with {process.exitcode}"
            report = CaseReport(case=name, seconds=0.0, error=error)
    process.join()
    return report


def main() -> int:
    """Run the named cases, or all. Returns 1 where something is wrong."""
    is_right = True
    with (
        tempfile.TemporaryDirectory(prefix="matrix-") as directory,
        DaemonProcess(str(Path(directory) / "daemon.sock"), RAM) as daemon,
    ):
        for name in sys.argv[1:] or CASES:
            report = _forked(name, daemon)
            faults = [*report.faults()]
            is_right = is_right and not faults
            print(msgspec.json.encode(report).decode(), flush=True)
            for fault in faults:
                print(f"{name}: {fault}", file=sys.stderr)
    return int(not is_right)
