"""Real routers, as PyPI has them: vllm-router, xpyd-proxy, and the indexer of Dynamo.

Each is a process on the loopback. scripts/soak installs the last two (requirements/soak.txt).
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest
import zmq

from tests.programs.tiers.servers import free_port
from tests.waiting import DEADLINE_SECONDS, until

PACKAGES_VARIABLE = "HYBRIDKV_TEST_ROUTERS"
"""The directory of the packages of routers, which only their own processes import."""
needs_vllm_router = pytest.mark.skipif(
    find_spec("vllm_router") is None,
    reason="needs vllm-router: pip install -r requirements/tools.txt",
)


class EventSource:
    """An engine's KV events at ports of the loopback, which are all that vllm-router takes.

    vLLM binds a port on every address or none, so it publishes at Unix sockets. A thread of this
    context manager passes on what comes there, also from the next engine.
    """

    def __init__(self) -> None:
        self.port, self.replay_port = free_port(), free_port()
        # A path of a socket has 107 bytes at most, and a test's own directory is long.
        self._directory = tempfile.TemporaryDirectory(prefix="hybridkv-")
        self._end = Event()
        self._thread = Thread(target=self._pass_on)

    @property
    def endpoint(self) -> str:
        """Where a router subscribes."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Where a router asks for batches that it missed."""
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def places(self) -> tuple[str, str]:
        """Where an engine publishes, and is asked for what was missed."""
        name = f"ipc://{self._directory.name}"
        return f"{name}/events", f"{name}/replay"

    def arguments(self) -> list[str]:
        """Returns vLLM's arguments with which an engine publishes there."""
        events, replay = self.places
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        return [
            "--kv-events-config",
            json.dumps({**config, "endpoint": events, "replay_endpoint": replay}),
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._directory.cleanup()

    def _pass_on(self) -> None:
        events, replay = self.places
        context = zmq.Context()
        published, subscribers = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
        published.connect(events)
        subscribers.bind(self.endpoint)
        askers: Any = context.socket(zmq.ROUTER)
        askers.bind(self.replay_endpoint)
        # vLLM takes a question of a client alone, so each asker has a socket of its own.
        asked: dict[bytes, Any] = {}
        while not self._end.is_set():
            if subscribers.poll(5):
                published.send_multipart(subscribers.recv_multipart())
            while published.poll(0):
                subscribers.send_multipart(published.recv_multipart())
            while askers.poll(0):
                asker, *question = askers.recv_multipart()
                if asker not in asked:
                    asked[asker] = context.socket(zmq.DEALER)
                    asked[asker].connect(replay)
                asked[asker].send_multipart(question)
            for asker, socket in asked.items():
                while socket.poll(0):
                    askers.send_multipart([asker, *socket.recv_multipart()])
        context.destroy(linger=0)


class Worker:
    """A server that a router takes for an engine's: its answers say the name of the worker."""

    def __init__(self, name: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                self._answer({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                choices = [{"index": 0, "text": name, "finish_reason": "length"}]
                self._answer({"object": "text_completion", "model": "tiny", "choices": choices})

            def _answer(self, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def packages_with(package: str) -> str:
    """Returns the directory that has a package of a router. Skips the test where it is missing."""
    directory = os.environ.get(PACKAGES_VARIABLE, "")
    if not Path(directory, package).is_dir():
        pytest.skip(f"needs {package}: scripts/soak installs it, {PACKAGES_VARIABLE} names it")
    return directory


class Router:
    """A program that answers at /health. It is a context manager."""

    def __init__(
        self, words: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._words = [sys.executable, *words, f"--port={self.port}"]
        self._log_path, self._environment = log_path, {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, stdout=log, stderr=log, env=self._environment
            )
        try:
            until(self._is_ready, "the router answers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_SECONDS)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log_path.read_text()[-2000:]
        try:
            self.ask("/health")
        except urllib.error.URLError:
            return False
        return True

    def ask(self, path: str, body: object = None) -> bytes:
        """Returns the answer to a GET, or to a POST of a body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            read: bytes = answer.read()
        return read


class VllmRouter(Router):
    """vllm-router with its policy `kv_aware`, over engines that serve a model as "tiny"."""

    def __init__(
        self, sources: Mapping[str, EventSource], block_tokens: int, log_path: Path
    ) -> None:
        """`sources` has the source of each engine's KV events, by the engine's URL."""
        words = ["-m", "vllm_router.launch_router", "--policy=kv_aware", "--worker-urls", *sources]
        for url, source in sources.items():
            words += [f"--kv-event-source={url}={source.endpoint}"]
            words += [f"--kv-event-replay-source={url}={source.replay_endpoint}"]
        words += [f"--kv-event-block-size={block_tokens}", "--kv-event-model=tiny"]
        words += ["--worker-startup-check-interval=1", "--health-check-interval-secs=1"]
        super().__init__([*words, f"--prometheus-port={free_port()}"], log_path)

    def has_all_workers(self) -> bool:
        """Whether the router finds that every engine answers, which it asks each second."""
        return all(worker["is_healthy"] for worker in json.loads(self.ask("/workers"))["workers"])

    def complete(self, prompt: Sequence[int]) -> Any:
        """Returns the answer of the engine that the router chooses.

        To a request with vLLM's `return_token_ids` the router gives no credit (0.1.17).
        """
        body = {"model": "tiny", "prompt": [*prompt], "max_tokens": 4, "temperature": 0}
        return json.loads(self.ask("/v1/completions", {**body, "ignore_eos": True}))


class DynamoIndexer(Router):
    """The index of blocks that Dynamo's router asks, `python -m dynamo.indexer`."""

    def __init__(self, log_path: Path) -> None:
        words = ["-m", "dynamo.indexer", "--threads=1"]
        super().__init__(words, log_path, {"PYTHONPATH": packages_with("dynamo")})

    def register(self, number: int, source: EventSource, block_tokens: int) -> None:
        """Subscribe to the KV events of engine `number`, which is new."""
        engine = {"instance_id": number, "model_name": "tiny", "block_size": block_tokens}
        where = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        self.ask("/register", {**engine, **where})

    def unregister(self, number: int) -> None:
        """Forget an engine that has ended."""
        self.ask("/unregister", {"instance_id": number, "model_name": "tiny"})

    def known_tokens(self, prompt: Sequence[int]) -> dict[int, int]:
        """Returns how many tokens of a prompt each engine has in some medium, by its number."""
        answer = json.loads(self.ask("/query", {"token_ids": [*prompt], "model_name": "tiny"}))
        return {
            int(number): match["longest_matched"] for number, match in answer["instances"].items()
        }


class PrefillDecodeRouter(Router):
    """vllm-router between servers that compute prompts and servers that answer."""

    def __init__(self, prefill: str, decode: str, log_path: Path) -> None:
        """`prefill` and `decode` are the URLs of the servers, which serve a model as "tiny"."""
        words = ["-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        words += ["--prefill", prefill, "--decode", decode, "--policy=round_robin"]
        words += ["--worker-startup-check-interval=1", f"--prometheus-port={free_port()}"]
        super().__init__(words, log_path)


class XpydProxy(Router):
    """xpyd-proxy between servers that compute prompts and servers that answer."""

    def __init__(self, prefill: str, decode: str, log_path: Path) -> None:
        """`prefill` and `decode` are the URLs of the servers, which serve a model as "tiny"."""
        config = {
            "model": "tiny",
            "host": "127.0.0.1",
            "scheduling": "roundrobin",
            "prefill": [prefill.removeprefix("http://")],
            "decode": [decode.removeprefix("http://")],
        }
        path = log_path.with_suffix(".yaml")
        path.write_text(json.dumps(config))
        words = ["-m", "xpyd.proxy", "proxy", f"--config={path}"]
        super().__init__(words, log_path, {"PYTHONPATH": packages_with("xpyd")})
