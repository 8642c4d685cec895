"""A real engine as a child process: start, ask, end. See hybridkv.lab.runner for the other side."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridkv.core.errors import HybridKVError
from hybridkv.lab.child import AnsweringChild, log_tail

START_SECONDS = 900.0
ANSWER_SECONDS = 900.0

CONNECTOR = "HybridKVConnector"

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


NOT_SERVED = "prefix_caching_off_in_vllm"


class NotServedError(EngineError):
    """The engine was not started, since vLLM, neither the user nor hybridkv, chose so."""

    TEXT = (
        "vLLM itself switches prefix caching off for this model on this machine, and hybridkv "
        "serves no engine without prefix caching"
    )


class EngineProcess(AnsweringChild):
    """One engine process; a context manager."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        say: Callable[[str], None],
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        self._say, self._log_path = say, log_path
        variables = ENGINE_ENVIRONMENT, extra_environment
        with log_path.open("wb") as log:
            super().__init__("hybridkv.lab.runner", arguments, log, *variables)

    def __enter__(self) -> "EngineProcess":
        try:
            self.info: dict[str, Any] = self._answer(START_SECONDS, "starting")
            if "not_served" in self.info:
                raise NotServedError(NotServedError.TEXT)
        except BaseException:
            self.close()
            raise
        return self

    def run(
        self, *prompts: list[int], max_tokens: int, starve: bool = False, adapter: str | None = None
    ) -> list[dict[str, Any]]:
        """Generate for all prompts at once; see hybridkv.lab.runner."""
        work = {"prompts": prompts, "max_tokens": max_tokens, "starve": starve, "adapter": adapter}
        answer: list[dict[str, Any]] = self.ask({"do": "run", **work})
        return answer

    def reset(self, connector: bool = False) -> None:
        """Empty the engine's prefix cache; with `connector` ours too, as after a weight update."""
        if not self.ask({"do": "reset", "connector": connector}):
            raise EngineError("the engine could not reset its prefix cache")

    def begin(self, command: Mapping[str, object]) -> None:
        """Send a command without waiting for its answer."""
        try:
            self.send(command)
        except BrokenPipeError as error:
            raise self._error(f"ended with status {self.process.wait()}") from error

    def end(self) -> Any:
        """The answer to the oldest command begun."""
        return self._answer(ANSWER_SECONDS, "working")

    def ask(self, command: Mapping[str, object]) -> Any:
        """Send a command and wait for its answer."""
        self.begin(command)
        return self.end()

    def _answer(self, limit_seconds: float, doing: str) -> Any:
        def progress(seconds: float) -> None:
            self._say(f"  engine {self.process.pid} {doing}, {seconds:.0f} s")

        try:
            answer = self.receive(limit_seconds, progress)
        except TimeoutError as error:
            raise self._error(f"is {error}") from error
        if answer is None:
            raise self._error(f"ended with status {self.process.wait()}")
        return json.loads(answer)

    def _error(self, what: str) -> EngineError:
        tail = log_tail(self._log_path.read_bytes(), "Error", "hybridkv")
        return EngineError(f"the engine {what}; its log is {self._log_path}:\n{tail}")
