"""Engines in forks of a process that has imported vLLM: one starts in two seconds, and not in ten.

Only what is read at an import, as by Triton's interpreter, needs an interpreter of its own.
"""

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from hybridkv.lab.engine_process import (
    ENGINE_ENVIRONMENT,
    AnsweringChild,
    ChildEnvironment,
    EngineProcess,
)
from tests.engine.ready import await_write_slots
from tests.seeds import ONE_THREAD

_DEFAULTS = {**ENGINE_ENVIRONMENT, **ONE_THREAD}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.engine.imported"])


class ForkedEngine(EngineProcess):
    """An EngineProcess whose process is a fork of one that has imported vLLM."""

    process: Any

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        say: Callable[[str], None],
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        self._say, self.log_path = say, log_path
        environment = {**_DEFAULTS, **os.environ, **(extra_environment or {})}
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = _Fork(_run_engine, log_path, environment, theirs, [*arguments])


class ForkedChild(AnsweringChild):
    """An AnsweringChild whose process is such a fork."""

    process: Any

    def __init__(
        self, module: str, arguments: Sequence[str], log: IO[bytes], environment: ChildEnvironment
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        log_path = Path(f"/proc/{os.getpid()}/fd/{log.fileno()}")
        with theirs:
            variables = environment.variables()
            self.process = _Fork(_run_child, log_path, variables, theirs, module, [*arguments])


def lines_of(
    module: str, words: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> list[str]:
    """Returns the lines that `python -m MODULE WORDS` prints.

    Raises AssertionError with the end of the output where the module fails.
    """
    fork = _Fork(_run_module, log_path, {**_DEFAULTS, **environment}, module, [*words])
    status, printed = fork.wait(), log_path.read_text()
    assert status == 0, printed[-3000:]
    return printed.splitlines()


class _Fork:
    """A process of the fork server, with what engines use of `subprocess.Popen`."""

    def __init__(
        self,
        target: Callable[..., None],
        log_path: Path,
        environment: Mapping[str, str],
        *arguments: object,
    ) -> None:
        """Run `target`, which prints into a log and has no other variables."""
        given = (target, str(log_path), dict(environment), *arguments)
        self._process = _context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, below 0 for a signal. Raises TimeoutExpired."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return status

    def kill(self) -> None:
        """End the process with -9."""
        self._process.kill()


def _run(
    target: Callable[..., None], log_path: str, environment: dict[str, str], *arguments: object
) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def _run_engine(connection: Connection, arguments: list[str]) -> None:
    with connection:
        descriptor = os.dup(connection.fileno())
    runner = importlib.import_module("hybridkv.lab.runner")
    make = runner.make_engine

    def make_ready(arguments: list[str]) -> Any:
        engine = make(arguments)
        await_write_slots(engine)
        return engine

    vars(runner)["make_engine"] = make_ready
    _run_module(runner.__name__, [str(descriptor), *arguments])


def _run_child(connection: Connection, name: str, arguments: list[str]) -> None:
    with connection:
        descriptor = os.dup(connection.fileno())
    sys.argv = [name, str(descriptor), *arguments]
    runpy.run_module(name, run_name="__main__")


def _run_module(name: str, words: list[str]) -> None:
    sys.argv = [name, *words]
    importlib.import_module(name).main()
