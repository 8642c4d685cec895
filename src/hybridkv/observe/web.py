"""The daemon's pages: /metrics, /healthz, the status page and its JSON. All are read only.

They are served in threads, on loopback. The Host header must name a loopback address, so that a
page of another site cannot read them through a browser. With a token, any address may serve them,
and each request must have the token. The status page loads nothing from elsewhere, and runs no
script but its own.
"""

import contextlib
import errno
import hmac
import logging
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client import metrics_core as families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hybridkv import __version__
from hybridkv.core.daemon_settings import METRICS_PORT, check_metrics
from hybridkv.core.errors import ConfigError
from hybridkv.core.metrics import MetricFamily, Values, counter, gauge
from hybridkv.observe.history import HistogramBucket, Snapshot
from hybridkv.observe.status import StatusReport, health
from hybridkv.wire.status import SessionStatus

logger = logging.getLogger("hybridkv.daemon")

PREFIX = "hybridkv_daemon_"  # Stands before the names of all families.
PORT_SECONDS = 0.5
"""A daemon that ends has so long to leave the port to the next one."""
PORT_AGAIN_SECONDS = 0.05
ANSWER_SECONDS = 5.0  # The loop has so long to make a snapshot.
REQUEST_SECONDS = 10.0  # A client has so long, from when it is accepted until its answer is sent.
TOKEN_CHARACTERS_MIN = 16
REQUESTS_MAX = 16  # Requests at the same time; more are answered with status 503.
CONNECTIONS_MAX = 64  # Clients at the same time, whether they ask or not; more are closed.
SHORTAGE_SECONDS = 0.2  # The pause after a client could not be accepted.
LOOPBACK = re.compile(
    r"(127\.\d{1,3}\.\d{1,3}\.\d{1,3}|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE
)
LOOPBACK_ADDRESS = "127.0.0.1"


class PageFile(NamedTuple):
    """A file of the status page, and its media type."""

    name: str
    media_type: str


PAGES: Mapping[str, PageFile] = {
    "/": PageFile("status.html", "text/html; charset=utf-8"),
    "/status.css": PageFile("status.css", "text/css; charset=utf-8"),
    "/status.js": PageFile("status.js", "text/javascript; charset=utf-8"),
    "/status.svg": PageFile("status.svg", "image/svg+xml"),
}
"""The file of each path."""
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

UNAVAILABLE = "503 Service Unavailable"

Start = Callable[..., Any]  # WSGI's start_response.


ANSWERING = gauge("1 if the daemon's loop answered this scrape, else 0.")
PAGES_FAILED = counter("Pages that failed and were answered with status 500.")
PAGE: Mapping[str, MetricFamily] = {
    "info": gauge("Always 1; which release runs.", lambda _: {__version__: 1}, labels=("version",)),
    "group_bytes": gauge(
        "Bytes in RAM of a group; the 65th row has all others.",
        lambda snapshot: {
            (group.identity, group.model, str(group.gid), group.kind): group.held_bytes
            for group in snapshot.groups
        },
        labels=("identity", "model_name", "gid", "kind"),
    ),
    "session_connected": gauge(
        "Connected schedulers of an engine; 0: only workers. Of the first 256 sessions.",
        lambda snapshot: _connected(snapshot.sessions),
        labels=("engine", "model_name", "identity"),
    ),
}
"""Families of numbers whose owner is the Snapshot."""


class WebPages(Collector):
    """The WSGI application, and what its /metrics collects."""

    def __init__(self, ask: Callable[[], Future[Snapshot]], token: str = "") -> None:
        """`ask` has the loop make a snapshot. Requests must have the token where there is one."""
        self._ask = ask
        self._token = token
        self._report = StatusReport()
        self._lock = threading.Lock()
        self._pages_failed = 0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        self._room = threading.BoundedSemaphore(REQUESTS_MAX)
        folder = resources.files("hybridkv.observe") / "pages"
        self._bodies = {path: (folder / file.name).read_bytes() for path, file in PAGES.items()}

    def __call__(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        """Answer a request. WSGI calls this, see PEP 3333."""
        if self._token:
            expected = f"Bearer {self._token}".encode("latin-1")
            given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, expected):
                asks = ("WWW-Authenticate", "Bearer")
                return _answer_text(
                    start, "401 Unauthorized", "the daemon's metrics-token is asked", asks
                )
        elif not LOOPBACK.fullmatch(environ.get("HTTP_HOST", "")):
            return _answer_text(
                start, "403 Forbidden", "ask by http://127.0.0.1:PORT or http://localhost:PORT"
            )
        if environ.get("REQUEST_METHOD") != "GET":
            return _answer_text(
                start, "405 Method Not Allowed", "only GET works here", ("Allow", "GET")
            )
        if not self._room.acquire(blocking=False):
            return _answer_text(start, UNAVAILABLE, "too many ask at once", ("Retry-After", "1"))
        try:
            return self._page(environ, start)
        except Exception:  # the supervised boundary: a page that fails ends nothing
            with self._lock:
                self._pages_failed += 1
            logger.exception("a page failed")
            failed = "the page failed; the daemon's log says why"
            return _answer_text(start, "500 Internal Server Error", failed)
        finally:
            self._room.release()

    def collect(self) -> Iterator[families.Metric]:
        """Every metric but debug values, named hybridkv_daemon_*."""
        snapshot = self._snapshot()
        yield _exported("answering", ANSWERING, {(): float(snapshot is not None)})
        if snapshot is None:
            return
        values = Values()
        values.add_numbers(
            {"pages_failed": PAGES_FAILED}, self, {"pages_failed": self._pages_failed}
        )
        values.add_numbers(PAGE, snapshot, {})
        for source in (values, snapshot.values):
            numbers: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
            for (name, labels), number in source.items():
                numbers[name][labels] = number
            for name, family in source.families.items():
                if family.kind == "histogram":
                    yield _histogram(name, family, snapshot.waits, source.of(name))
                elif not family.is_debug:
                    yield _exported(name, family, numbers[name])

    def _page(self, environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(
                environ, lambda status, headers, *_: start(status, [*headers, *HEADERS])
            )
            return answer
        if path in ("/status.json", "/healthz"):
            snapshot = self._snapshot()
            if snapshot is None:
                return _answer_text(start, UNAVAILABLE, "the daemon's loop does not answer")
            if path == "/healthz":
                # The other levels are of a daemon that does what it can.
                problems = health(snapshot)
                bad = [problem.text for problem in problems if problem.level == "bad"]
                return _answer_text(start, UNAVAILABLE if bad else "200 OK", "\n".join(bad) or "ok")
            status = msgspec.json.encode(self._report.make(snapshot))
            return _answer(start, "200 OK", status, "application/json")
        if path in self._bodies:
            return _answer(start, "200 OK", self._bodies[path], PAGES[path].media_type)
        return _answer_text(
            start, "404 Not Found", "there are / and /status.json and /metrics and /healthz"
        )

    def _snapshot(self) -> Snapshot | None:
        try:
            return self._ask().result(ANSWER_SECONDS)
        except TimeoutError:
            return None


def _connected(sessions: Iterable[SessionStatus]) -> Mapping[tuple[str, ...], float]:
    """Returns each engine's connected schedulers.

    An engine that greeted anew has two sessions while its workers copy for the first one.
    """
    connected: Counter[tuple[str, ...]] = Counter()
    for session in sessions:
        connected[session.engine_id, session.model, session.identity] += session.is_connected
    return connected


def _histogram(
    name: str, family: MetricFamily, buckets: Iterable[HistogramBucket], total: float
) -> families.Metric:
    """A histogram whose values add up to `total`."""
    metric = families.HistogramMetricFamily(f"{PREFIX}{name}", family.help)
    bounds = [(str(bound).replace("inf", "+Inf"), durations) for bound, durations in buckets]
    metric.add_metric((), bounds, total)
    return metric


def _exported(
    name: str, family: MetricFamily, numbers: Mapping[tuple[str, ...], float]
) -> families.Metric:
    """The metric of a family, with its numbers by the values of its labels."""
    is_counter = family.kind == "counter"
    exported_class = families.CounterMetricFamily if is_counter else families.GaugeMetricFamily
    metric = exported_class(f"{PREFIX}{name}", family.help, labels=family.labels)
    for labels in sorted(numbers):
        metric.add_metric(labels, numbers[labels])
    return metric


def serve_web(
    ask: Callable[[], Future[Snapshot]],
    port: int | None,
    host: str = LOOPBACK_ADDRESS,
    token_file: str | None = None,
) -> str:
    """Serve at an address of this machine in a thread. Returns the URL of /metrics.

    With None the port is METRICS_PORT, or a free one where that is taken. Raises ConfigError where
    `port` is taken, where the address is not this machine's, and where a token cannot be read.
    """
    check_metrics(host, token_file)
    token = "" if token_file is None else _token_of(token_file)
    pages, wanted = WebPages(ask, token), METRICS_PORT if port is None else port
    server = _server_at(pages, host, wanted)
    if server is None and port is not None:
        raise ConfigError(f"metrics-port={port} is taken by another process", "another one works")
    is_free = server is not None
    server = server or make_server(host, 0, pages, _server_class(host), _Handler)
    threading.Thread(target=server.serve_forever, name="web", daemon=True).start()
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
    if not is_free:
        logger.warning("port %d is taken; the status page is at %s", wanted, url)
    return f"{url}metrics"


def _token_of(path: str) -> str:
    """The token in a file. Raises ConfigError that does not show it."""
    works = 'a file that you may read, with a word like that of "openssl rand -hex 16", works'
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not ASCII"
        raise ConfigError(f"metrics-token: {path} cannot be read ({why})", works) from None
    if not token.isprintable() or " " in token or len(token) < TOKEN_CHARACTERS_MIN:
        what = f"metrics-token: {path} has no word of {TOKEN_CHARACTERS_MIN} characters or more"
        raise ConfigError(what, works)
    return token


def _server_class(host: str) -> "type[_HttpServer]":
    return _HttpServer6 if ":" in host else _HttpServer


def _server_at(pages: WebPages, host: str, port: int) -> WSGIServer | None:
    """A server at that port. None = the port was taken for PORT_SECONDS.

    Raises ConfigError where no server can listen at this host.
    """
    until = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return make_server(host, port, pages, _server_class(host), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                what = f"metrics-host={host} is no address of this machine"
                raise ConfigError(what, '"127.0.0.1" works') from error
            if time.monotonic() > until:
                return None
            time.sleep(PORT_AGAIN_SECONDS)


class _HttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """When each client is disconnected, in monotonic seconds."""
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left. The client stays queued, and would be offered again at once.
            time.sleep(SHORTAGE_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns True, and notes the client's time limit, if there is room for the client."""
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
                    # The client may have closed the connection that its time limit is about to
                    # close.
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        # The descriptor may be another client's as soon as it is closed.
        with self._lock:
            self._until.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing of clients that went away."""


class _HttpServer6(_HttpServer):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as requests come every few seconds."""


def _answer_text(
    start: Start, status: str, text: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    return _answer(start, status, f"{text}\n".encode(), "text/plain; charset=utf-8", *headers)


def _answer(
    start: Start, status: str, body: bytes, kind: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers, *HEADERS])
    return [body]
