"""The daemon's pages: /metrics, the status page and its JSON; read only, in threads of their own.

They are served on loopback, and the Host header must name it, so that a page of another site cannot
read them through a browser. The page loads nothing from elsewhere and runs no script but its own.
"""

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib import resources
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.process_collector import ProcessCollector

from hybridkv.observe.metrics import DaemonCollector
from hybridkv.observe.snapshot import Snapshot
from hybridkv.observe.status import StatusReport

logger = logging.getLogger("hybridkv.daemon")

ANSWER_SECONDS = 5.0
"""The loop has so long to make a snapshot."""
REQUEST_SECONDS = 10.0
"""A client has so long, from when it is accepted until its answer is sent."""
REQUESTS_MAX = 16
"""Requests at the same time; more are answered with status 503."""
CONNECTIONS_MAX = 64
"""Clients at the same time, whether they ask or not; more are closed."""
SHORTAGE_SECONDS = 0.2
"""The pause after a client could not be accepted."""
LOOPBACK = re.compile(
    r"(127\.\d{1,3}\.\d{1,3}\.\d{1,3}|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE
)
PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.svg": ("status.svg", "image/svg+xml"),
}
"""The (file, type) of each path."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
    ("Server", "hybridkv"),
)

Start = Callable[..., Any]


class WebPages:
    """The WSGI application."""

    def __init__(self, ask: Callable[[], Future[Snapshot]]) -> None:
        """`ask` has the loop make a snapshot."""
        self._ask = ask
        self._report = StatusReport()
        self._collector = DaemonCollector(self._snapshot)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        self._room = threading.BoundedSemaphore(REQUESTS_MAX)
        folder = resources.files("hybridkv.observe") / "pages"
        self._files = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in PAGES.items()
        }

    def __call__(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        """See PEP 3333."""
        if not LOOPBACK.fullmatch(environ.get("HTTP_HOST", "")):
            return _say(
                start, "403 Forbidden", "ask by http://127.0.0.1:PORT or http://localhost:PORT"
            )
        if environ.get("REQUEST_METHOD") != "GET":
            return _say(start, "405 Method Not Allowed", "only GET works here", ("Allow", "GET"))
        if not self._room.acquire(blocking=False):
            busy = "503 Service Unavailable"
            return _say(start, busy, "too many ask at once", ("Retry-After", "1"))
        try:
            return self._page(environ, start)
        except Exception:  # the supervised boundary: a page that fails ends nothing
            self._collector.count_failed_page()
            logger.exception("a page failed")
            failed = "the page failed; the daemon's log says why"
            return _say(start, "500 Internal Server Error", failed)
        finally:
            self._room.release()

    def _page(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(
                environ, lambda status, headers, *_: start(status, [*headers, *HEADERS])
            )
            return answer
        if path == "/status.json":
            snapshot = self._snapshot()
            if snapshot is None:
                return _say(start, "503 Service Unavailable", "the daemon's loop does not answer")
            return _give(start, "200 OK", self._report.encode(snapshot), "application/json")
        if path in self._files:
            return _give(start, "200 OK", *self._files[path])
        return _say(start, "404 Not Found", "there are / and /status.json and /metrics")

    def _snapshot(self) -> Snapshot | None:
        try:
            return self._ask().result(ANSWER_SECONDS)
        except FutureTimeoutError:
            return None


def serve_web(ask: Callable[[], Future[Snapshot]], port: int) -> str:
    """Serve on 127.0.0.1 in a thread, on a free port if `port` is taken; the URL of /metrics."""
    pages = WebPages(ask)
    try:
        server = make_server("127.0.0.1", port, pages, _HttpServer, _Handler)
    except OSError:
        server = make_server("127.0.0.1", 0, pages, _HttpServer, _Handler)
    threading.Thread(target=server.serve_forever, name="web", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/metrics"


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *words: Any) -> None:
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """When each client is disconnected, in monotonic seconds."""
        super().__init__(*words)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left. Whoever waits stays queued, and would be offered again at once.
            time.sleep(SHORTAGE_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for the client."""
        with self._lock:
            has_room = len(self._until) < CONNECTIONS_MAX
            if has_room:
                self._until[request] = time.monotonic() + REQUEST_SECONDS
        return has_room

    def service_actions(self) -> None:
        """Called several times a second: disconnect clients whose time is over."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, until in self._until.items() if until < now]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        # The descriptor may be another client's as soon as it is closed.
        with self._lock:
            self._until.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing of clients that went away."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing of requests."""


def _say(start: Start, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    return _give(start, status, f"{text}\n".encode(), "text/plain; charset=utf-8", *headers)


def _give(
    start: Start, status: str, body: bytes, kind: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers, *HEADERS])
    return [body]
