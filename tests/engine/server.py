"""A real `vllm serve`: its HTTP and its metrics."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from tests.waiting import DEADLINE_SECONDS, until

START_SECONDS = 300.0
STARTED = b"Application startup complete"
API_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer that came token by token. Seconds are those since the request was sent."""

    first_seconds: float
    """Until the first token."""
    seconds: float
    """Until the last one."""
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int


class Server:
    """Runs one API server on loopback, as a context manager. `arguments` are vLLM's.

    `command` starts the server, and may belong to another environment. `port` is that of an earlier
    server.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        command: Sequence[str] = API_SERVER,
        port: int = 0,
    ) -> None:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._process = subprocess.Popen(
            [
                *command,
                *(
                    "--host=127.0.0.1",
                    f"--port={self.port}",
                    "--served-model-name=tiny",
                    *arguments,
                ),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **ENGINE_ENVIRONMENT,
                **os.environ,
                **environment,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_SERVER_DEV_MODE": "1",
            },
        )

    def __enter__(self) -> "Server":
        assert self._process.stdout is not None
        fd, deadline, output = self._process.stdout.fileno(), time.monotonic() + START_SECONDS, b""
        try:
            while STARTED not in output:
                left = deadline - time.monotonic()
                ready = select.select([fd], [], [], max(0.0, left))[0]
                received = os.read(fd, 1 << 16) if ready else b""
                assert received, (
                    f"the server did not start:\n{output[-4000:].decode(errors='replace')}"
                )
                output += received
        except BaseException:
            self.close()
            raise
        finally:
            self.log_path.write_bytes(output)
        # `cat` copies all later output into the log.
        copy = f"cat >> {self.log_path}"
        self._copier = subprocess.Popen(["sh", "-c", copy], stdin=self._process.stdout)
        self._process.stdout.close()
        until(self._listens, "the server listens")
        return self

    def _listens(self) -> bool:
        """Whether the server can be connected to. It prints that it started a moment earlier."""
        try:
            self.metrics()
        except urllib.error.URLError:
            return False
        return True

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._copier.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        """Kill the server, its engine and the engine's workers with -9."""
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It ended with those.
                # Python's tracker removes the shared memory of the killed.
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def close(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server with a signal. Kill all of it where it does not end."""
        self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def post(self, path: str, body: object = None) -> bytes:
        """POST a body as JSON. Returns the answer's bytes."""
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            read: bytes = answer.read()
        return read

    def complete(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        """Returns the tokens of the answer to a prompt of token ids."""
        reply = self.post("/v1/completions", _completion(prompt, max_tokens))
        tokens: list[int] = json.loads(reply)["choices"][0]["token_ids"]
        return tokens

    def stream(self, prompt: list[int], max_tokens: int) -> Streamed:
        """Returns the answer to a prompt of token ids, with the times at which it came."""
        return stream_answer(self.url, prompt, max_tokens)

    def metrics(self) -> list[Sample]:
        """Returns every sample at /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE_SECONDS) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples with this name and these labels, as they are now."""
        return total_of(self.metrics(), name, labels)


def _descendants(pid: int) -> list[int]:
    """Returns the children of a process, and theirs. None are left of one that has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


def stream_answer(url: str, prompt: list[int], max_tokens: int) -> Streamed:
    """Returns a server's or a router's answer to a prompt, with the times at which it came.

    The servers need vLLM's --enable-prompt-tokens-details for the cached tokens.
    """
    body = _completion(prompt, max_tokens) | {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times: list[float] = []
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=START_SECONDS) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line.removeprefix(b"data: "))
            new = [token for choice in part["choices"] for token in choice["token_ids"] or ()]
            if new:
                times.append(time.perf_counter() - started)
                tokens += new
            usage = part.get("usage") or usage
    details = usage["prompt_tokens_details"] or {}
    return Streamed(
        first_seconds=times[0],
        seconds=times[-1],
        tokens=tokens,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def _completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def total_of(samples: Sequence[Sample], name: str, labels: Mapping[str, str]) -> float:
    """Returns the sum of the samples with this name and these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
