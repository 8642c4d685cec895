"""A module of this package as a child process, which answers in lines of JSON.

Its first argument names the descriptor for the answers. Commands come on its standard input.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Self

PROGRESS_SECONDS = 5.0
STOP_SECONDS = 60.0
_LOG_TAIL_LINES = 15


class AnsweringChild:
    """The parent's side; a context manager. What the child prints goes to a log."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: IO[bytes],
        defaults: Mapping[str, str],
        environment: Mapping[str, str] | None,
    ) -> None:
        """Start `module`. The user's variables win over `defaults`, `environment` over both."""
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(write_fd), *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            env={**defaults, **os.environ, **(environment or {})},
        )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb")
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, command: Mapping[str, object]) -> None:
        """Send a command; raises BrokenPipeError where the child has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def receive(
        self, limit_seconds: float, waiting: Callable[[float], None] = lambda seconds: None
    ) -> bytes | None:
        """The next answer, as JSON; None where the child has ended.

        `waiting` is called every PROGRESS_SECONDS. Raises TimeoutError after `limit_seconds`.
        """
        started = time.monotonic()
        while b"\n" not in self._buffer:
            waited = time.monotonic() - started
            if waited > limit_seconds:
                raise TimeoutError(f"silent since {waited:.0f} s")
            if not select.select([self._answers], [], [], PROGRESS_SECONDS)[0]:
                waiting(time.monotonic() - started)
            elif received := os.read(self._answers.fileno(), 1 << 20):
                self._buffer += received
            else:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self, patience_seconds: float = STOP_SECONDS) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()


def log_tail(log: bytes, *wanted: str) -> str:
    """The lines of a child's log that contain all of `wanted`, or the last ones of the log."""
    lines = log.decode(errors="replace").strip().splitlines()
    found = [line for line in lines if wanted and all(word in line for word in wanted)]
    return "\n".join(found or lines[-_LOG_TAIL_LINES:])


@contextlib.contextmanager
def answering() -> Iterator[Callable[[object], None]]:
    """The child's side: a function that sends one answer, which JSON can express."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(value: object) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        yield answer
