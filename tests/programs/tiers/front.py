"""A server in front of an S3 server, which refuses requests as S3 does and passes the others on."""

import http.client
import threading
import time
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import NamedTuple, Self

_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length"))


class Refused(NamedTuple):
    """An answer to a request that does not reach the server."""

    status: int
    code: str


EXPIRED = Refused(400, "ExpiredToken")
SLOW_DOWN = Refused(503, "SlowDown")


class Front:
    """Listens on the loopback. `rule` says of a request's headers how it is refused. None = not."""

    def __init__(self, address: str) -> None:
        """`address` is that of the server behind, as host:port."""
        self.rule: Callable[[Message], Refused | None] = lambda headers: None
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                refused = front.rule(self.headers)
                if refused is not None:
                    text = f"<Error><Code>{refused.code}</Code></Error>".encode()
                    self._answer(refused.status, {}, b"" if self.command == "HEAD" else text)
                    return
                behind = http.client.HTTPConnection(address)
                # The signature is of the address that the client knows.
                behind.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    behind.putheader(name, value)
                behind.endheaders(body or None)
                answer = behind.getresponse()
                content = answer.read()
                headers = {n: v for n, v in answer.getheaders() if n.lower() not in _HOP}
                size = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self._answer(answer.status, headers, content, size)
                behind.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request

            def _answer(
                self, status: int, headers: dict[str, str], content: bytes, size: str | None = None
            ) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", size or str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Rate:
    """Refuses what comes sooner than so many requests a second admit, as a bucket does."""

    def __init__(self, per_second: float) -> None:
        self._seconds = 1 / per_second
        self._next_at = 0.0
        self._lock = threading.Lock()
        self.refused = 0

    def __call__(self, headers: Message) -> Refused | None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                self.refused += 1
                return SLOW_DOWN
            self._next_at = max(self._next_at, now - self._seconds) + self._seconds
            return None
