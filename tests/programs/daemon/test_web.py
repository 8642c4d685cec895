"""The daemon's pages are on loopback only, read only, and hold nothing that they should not."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIServer, make_server

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.observe import web
from hybridkv.observe.history import Snapshot
from hybridkv.observe.web import HEADERS, PAGES, REQUESTS_MAX, WebPages
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import free_port
from tests.unit.daemon.harness import make_daemon
from tests.waiting import DEADLINE_SECONDS, until

ALL = (*PAGES, "/status.json", "/metrics", "/healthz")
PAGES_FOLDER = Path(__file__).parents[3] / "src" / "hybridkv" / "observe" / "pages"


def answered() -> Future[Snapshot]:
    future: Future[Snapshot] = Future()
    future.set_result(make_daemon().view.snapshot(0.0))
    return future


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of the loopback at which another program listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_refused_where_somebody_asked_for_it(
    tmp_path: Path, taken_port: int
) -> None:
    path = tmp_path / "daemon.sock"
    daemon = ForkedDaemon(str(path), "16MiB", metrics_port=taken_port)
    with pytest.raises(ConfigError, match=rf"^metrics-port={taken_port} is taken .* works$"):
        daemon.start()
    assert not path.exists()
    assert not stale_arenas(path)


def test_where_nobody_asked_another_port_is_taken_and_named(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "METRICS_PORT", taken_port)
    url = web.serve_web(answered, None)
    assert urlsplit(url).port != taken_port
    assert caplog.messages == [f"port {taken_port} is taken; the status page is at {url[:-7]}"]


class Begun(NamedTuple):
    """The beginning of an answer of a page."""

    status: str
    headers: dict[str, str]


class Answer(NamedTuple):
    """An answer of a page."""

    status: str
    headers: dict[str, str]
    body: bytes


def ask(
    pages: WebPages, path: str = "/", host: str | None = "127.0.0.1:9477", method: str = "GET"
) -> Answer:
    begun: list[Begun] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path} | (
        {"HTTP_HOST": host} if host is not None else {}
    )
    body = b"".join(
        pages(environ, lambda status, headers, *_: begun.append(Begun(status, dict(headers))))
    )
    ((status, headers),) = begun
    return Answer(status, headers, body)


@pytest.mark.parametrize("path", ALL)
def test_every_page_is_served_with_headers_that_keep_others_out(path: str) -> None:
    status, headers, body = ask(WebPages(answered), path)
    assert status == "200 OK"
    assert body
    assert dict(HEADERS).items() <= headers.items()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9477", "localhost:8080", "LOCALHOST", "127.8.9.1:1", "[::1]:9"]
)
def test_names_of_the_loopback_are_answered(host: str) -> None:
    assert ask(WebPages(answered), "/status.json", host)[0] == "200 OK"


@pytest.mark.parametrize(
    "host",
    [
        *(
            None,
            "",
            "evil.example",
            "evil.example:9477",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
        ),
        *(
            "10.0.0.1:9477",
            "127.0.0.1:9477@evil.example",
            "localhost\n",
            "[::2]",
            "127.0.0.1:9477,evil.example",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_another_name_of_this_machine_is_refused(path: str, host: str | None) -> None:
    """DNS rebinding: a page of evil.example that resolves to 127.0.0.1 asks with its own name."""
    status, headers, body = ask(WebPages(answered), path, host)
    assert status.startswith("403")
    assert b"hybridkv_" not in body
    assert dict(HEADERS).items() <= headers.items()


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "X"]
)
def test_only_get(method: str) -> None:
    status, headers, _ = ask(WebPages(answered), "/", method=method)
    assert status.startswith("405")
    assert headers["Allow"] == "GET"


@pytest.mark.parametrize(
    "path", ["/x", "/../daemon.py", "/status.html", "//", "", "/metrics/", "/pages/status.js"]
)
def test_there_is_nothing_else(path: str) -> None:
    assert ask(WebPages(answered), path)[0].startswith("404")


def test_a_page_that_fails_is_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Future[Snapshot]:
        raise RuntimeError("no")

    assert ask(WebPages(fails), "/status.json")[0].startswith("500")
    assert "a page failed" in caplog.text


def test_a_page_that_fails_is_counted() -> None:
    answers = iter((RuntimeError("no"), answered()))

    def fails_once() -> Future[Snapshot]:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    pages = WebPages(fails_once)
    assert ask(pages, "/status.json")[0].startswith("500")
    assert b"hybridkv_daemon_pages_failed_total 1.0" in ask(pages, "/metrics")[2]


def test_a_loop_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.observe.web.ANSWER_SECONDS", 0.01)
    for path in ("/status.json", "/healthz"):
        status, _, body = ask(WebPages(Future), path)
        assert status.startswith("503")
        assert body == b"the daemon's loop does not answer\n"


def test_too_many_at_once_are_told_to_come_again() -> None:
    asked: list[Future[Snapshot]] = []
    all_in = threading.Event()

    def holds() -> Future[Snapshot]:
        asked.append(Future())
        if len(asked) == REQUESTS_MAX:
            all_in.set()
        return asked[-1]

    pages = WebPages(holds)
    threads = [
        threading.Thread(target=ask, args=(pages, "/status.json")) for _ in range(REQUESTS_MAX)
    ]
    for thread in threads:
        thread.start()
    assert all_in.wait(DEADLINE_SECONDS)
    status, headers, _ = ask(pages, "/status.json")
    assert status.startswith("503")
    assert headers["Retry-After"] == "1"
    for future in asked:
        future.set_result(make_daemon().view.snapshot(0.0))
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert ask(pages, "/status.css")[0] == "200 OK"


def test_whoever_was_answered_makes_room() -> None:
    pages = WebPages(answered)
    assert {ask(pages, "/status.json")[0] for _ in range(2 * REQUESTS_MAX)} == {"200 OK"}


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup() -> None:
    for file, _ in PAGES.values():
        text = (PAGES_FOLDER / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), file
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert word not in text, f"{file}: {word}"
        assert not re.search(r"\son\w+=|style=|javascript:", text), file


def test_no_password_of_a_tier_is_shown() -> None:
    spec = parse_tier("valkey://user:secret@host:6379/0", "tier")
    assert "secret" not in spec.shown


def test_over_a_real_socket(daemon: DaemonProcess) -> None:
    with ControlClient(daemon.socket_path) as control:
        address = urlsplit(control.stats().metrics_url)
    with urllib.request.urlopen(
        f"http://{address.netloc}/status.json", timeout=DEADLINE_SECONDS
    ) as answer:
        assert json.load(answer)["values"]["connections"] >= 0
        assert answer.headers["Server"].startswith("hybridkv")
    connection = http.client.HTTPConnection(
        "127.0.0.1", address.port or 0, timeout=DEADLINE_SECONDS
    )
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403
    connection.close()
    assert listens_only_on_loopback(address.port or 0)


def test_healthz_has_a_line_for_each_problem(tmp_path: Path) -> None:
    """A tier that cannot be used is a problem. A note is none."""
    port = free_port()
    options = ["--tier", f"valkey://127.0.0.1:{port}/0"]
    with ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", metrics_port=0, options=options) as ill:
        status, body = health_of(ill)
    assert status == 503
    assert re.fullmatch(rf"valkey \(valkey://127\.0\.0\.1:{port}/0\) cannot be used; .*\n", body)
    with ForkedDaemon(str(tmp_path / "d.sock"), "16MiB", metrics_port=0) as well:
        assert health_of(well) == (200, "ok\n")


def health_of(daemon: DaemonProcess) -> tuple[int, str]:
    """Return the status and the text of /healthz."""
    with ControlClient(daemon.socket_path) as control:
        address = urlsplit(control.stats().metrics_url)
    connection = http.client.HTTPConnection(
        "127.0.0.1", address.port or 0, timeout=DEADLINE_SECONDS
    )
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def listens_only_on_loopback(port: int) -> bool:
    """Return True where the kernel has no other address for a listener on this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {
        socket.inet_ntoa(bytes.fromhex(host)[::-1])
        for host, number in local
        if int(number, 16) == port
    } == {"127.0.0.1"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """Connections to a server of two clients at a time."""
    servers: list[WSGIServer] = []

    def make_and_keep(*arguments: Any) -> WSGIServer:
        servers.append(make_server(*arguments))
        return servers[-1]

    monkeypatch.setattr(web, "make_server", make_and_keep)
    monkeypatch.setattr(web, "CONNECTIONS_MAX", 2)
    port = urlsplit(web.serve_web(answered, 0)).port
    yield lambda: socket.create_connection(("127.0.0.1", port or 0), DEADLINE_SECONDS)
    servers[0].shutdown()
    servers[0].server_close()


def answer_of(client: socket.socket) -> bytes:
    """Return the bytes until the other side closes. b"" where it closed at once."""
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET /status.css HTTP/1.0\r\nHost: localhost\r\n\r\n")
        return b"".join(iter(lambda: client.recv(4096), b""))
    return b""


def test_clients_that_say_nothing_are_counted(served: Callable[[], socket.socket]) -> None:
    with served(), served() as second:
        with served() as third:
            assert answer_of(third) == b""
        assert answer_of(second).startswith(b"HTTP/1.0 200")
        # Its place is free a moment after it has its answer.
        until(lambda: _is_answered(served), "its place is free")


def _is_answered(served: Callable[[], socket.socket]) -> bool:
    with served() as client:
        return answer_of(client).startswith(b"HTTP/1.0 200")


def test_a_client_that_drips_has_no_more_time_than_another(
    served: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its bytes comes in time, its request never."""
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.3)
    with served() as client:
        client.settimeout(0.05)
        deadline = time.monotonic() + DEADLINE_SECONDS / 2
        ended = False
        while not ended:
            assert time.monotonic() < deadline, "it is let go"
            try:
                client.sendall(b"G")
                ended = client.recv(4096) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
    until(lambda: _is_answered(served), "its place is free")


TOKEN = "0123456789abcdef0123"


def status_of(url: str, **headers: str) -> int:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            assert answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_with_a_token_every_page_asks_for_it(host: str, tmp_path: Path) -> None:
    """Whatever the Host header names. Nobody sees the token in a command line or a log."""
    file, path = tmp_path / "token", tmp_path / "run" / "daemon.sock"
    file.write_text(f"{TOKEN}\n")
    options = ["--metrics-host", host, "--metrics-token", f"file:{file}"]
    with DaemonProcess(str(path), "16MiB", metrics_port=0, options=options) as daemon:
        with ControlClient(str(path)) as control:
            url = control.stats().metrics_url.removesuffix("/metrics")
        assert urlsplit(url).hostname == host
        for page in ALL:
            assert status_of(f"{url}{page}") == 401
            assert status_of(f"{url}{page}", Authorization=f"Bearer {TOKEN[1:]}") == 401
            assert status_of(f"{url}{page}", Authorization=f"Bearer \xff{TOKEN}") == 401
            assert status_of(f"{url}{page}", Authorization=f"Bearer {TOKEN}") == 200
            asked = {"Authorization": f"Bearer {TOKEN}", "Host": "gpu7.example:9477"}
            assert status_of(f"{url}{page}", **asked) == 200
        assert daemon.process is not None
        words = Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in words
        assert TOKEN not in path.with_suffix(".log").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        ("short", "has no word of 16 characters or more"),
        (f"{TOKEN} {TOKEN}", "has no word of 16 characters or more"),
        (f"{TOKEN}\xff", r"cannot be read \(it is not ASCII\)"),
    ],
)
def test_a_token_that_cannot_be_used(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match=rf"^metrics-token: {tmp_path}/token {says}; .* works$"):
        web.serve_web(answered, 0, token_file=str(tmp_path / "token"))


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    """Nothing is bound: an address for documentation is no interface's."""
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(ConfigError, match=r'^metrics-host=192.0.2.7 is no .*; "127.0.0.1" works$'):
        web.serve_web(answered, 0, "192.0.2.7", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="is not on the loopback and needs a token"):
        web.serve_web(answered, 0, "192.0.2.7")
