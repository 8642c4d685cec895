"""A real engine as a child process: start, ask, end. See hybridkv.cli.runner for the other side."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridkv.core.errors import HybridKVError

START_SECONDS = 900.0
ANSWER_SECONDS = 900.0
PROGRESS_SECONDS = 5.0
STOP_SECONDS = 60.0
_LOG_TAIL_LINES = 15

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""Defaults for a child; what the user has set wins."""


class EngineError(HybridKVError):
    """The engine ended or did not answer; the message ends with the tail of its log."""

    exit_status = 1


class Engine:
    """A context manager around one engine process."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        say: Callable[[str], None],
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        self._say = say
        self._log_path = log_path
        read_fd, write_fd = os.pipe()
        self._log = log_path.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridkv.cli.runner", str(write_fd), *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_fd,),
            env={**ENGINE_ENVIRONMENT, **os.environ, **(extra_environment or {})},
        )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb")
        self._buffer = b""

    def __enter__(self) -> "Engine":
        try:
            self.info: dict[str, Any] = self._answer(START_SECONDS, "starting")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def run(
        self, *prompts: list[int], max_tokens: int, starve: bool = False, adapter: str | None = None
    ) -> list[dict[str, Any]]:
        """Generate for all prompts at once; see hybridkv.cli.runner."""
        command = {"do": "run", "prompts": prompts, "max_tokens": max_tokens, "starve": starve, "adapter": adapter}
        answer: list[dict[str, Any]] = self.ask(command)
        return answer

    def reset(self, connector: bool = False) -> None:
        """Forget the engine's own prefix cache; with `connector` the connector's too, as after a weight update."""
        if not self.ask({"do": "reset", "connector": connector}):
            raise EngineError("the engine could not reset its prefix cache")

    def begin(self, command: Mapping[str, object]) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"the engine ended with status {self._process.wait()}{self._tail()}") from error

    def end(self) -> Any:
        """The answer to the oldest command begun."""
        return self._answer(ANSWER_SECONDS, "working")

    def ask(self, command: Mapping[str, object]) -> Any:
        """Send a command and wait for its answer."""
        self.begin(command)
        return self.end()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _answer(self, limit_seconds: float, doing: str) -> Any:
        started = time.monotonic()
        while b"\n" not in self._buffer:
            waited = time.monotonic() - started
            if waited > limit_seconds:
                raise EngineError(f"the engine is silent since {waited:.0f} s{self._tail()}")
            ready, _, _ = select.select([self._answers], [], [], PROGRESS_SECONDS)
            if not ready:
                self._say(f"  engine {self.pid} {doing}, {time.monotonic() - started:.0f} s")
                continue
            received = os.read(self._answers.fileno(), 1 << 20)
            if not received:
                raise EngineError(f"the engine ended with status {self._process.wait()}{self._tail()}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line and "hybridkv" in line] or lines[-_LOG_TAIL_LINES:]
        return f"; its log is {self._log_path}:\n" + "\n".join(said)
