"""Blocking calls with a deadline, for commands and for start-up. Never used on the engine's hot path."""

import select
import time

from hybridkv.client.link import Link
from hybridkv.core.errors import HybridKVError
from hybridkv.wire.messages import (
    CHANGES_MAX,
    PROTOCOL_VERSION,
    TEXT_MAX,
    Clear,
    Done,
    Engines,
    Error,
    Explain,
    Explained,
    Hello,
    ListEngines,
    Reply,
    Report,
    Request,
    Stats,
    Welcome,
    WireEngine,
)


class DaemonUnreachableError(HybridKVError):
    """No daemon answers at the socket."""


class DaemonRefusedError(DaemonUnreachableError):
    """Whoever serves the socket will not serve us: another user, or another protocol version."""


class Control:
    """A control connection; a context manager."""

    def __init__(self, socket_path: str, timeout_seconds: float = 5.0, hello: Hello | None = None) -> None:
        self._socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._why = "nothing listens there"
        self._link = Link(socket_path, hello or Hello(1, PROTOCOL_VERSION, "control"), self._lost)
        self._ids = 1

    def __enter__(self) -> "Control":
        try:
            self._greet()
        except BaseException:
            self._link.close()
            raise
        return self

    def _greet(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while self._link.welcome is None:
            self._link.poll(time.monotonic())
            if self._link.refusal is not None:
                raise DaemonRefusedError(self._link.refusal)
            if self._link.welcome is None:
                self._wait(deadline, connecting=True)

    def __exit__(self, *exc: object) -> None:
        self._link.close()

    @property
    def welcome(self) -> Welcome:
        """The daemon's greeting."""
        assert self._link.welcome is not None
        return self._link.welcome

    def call(self, request: Request) -> Reply:
        """Send one request and wait for its reply; raises DaemonUnreachableError, or HybridKVError on a refusal."""
        deadline = time.monotonic() + self._timeout_seconds
        if not self._link.send(request, time.monotonic()):
            raise DaemonUnreachableError(f"{self._socket_path}: {self._why}")
        while True:
            for reply in self._link.poll(time.monotonic()):
                if isinstance(reply, Error):
                    raise HybridKVError(reply.message)
                if reply.id == getattr(request, "id", 0):
                    return reply
            self._wait(deadline)

    def tell(self, request: Request) -> None:
        """Send a one-way message."""
        if not self._link.send(request, time.monotonic()):
            raise DaemonUnreachableError(f"{self._socket_path}: {self._why}")

    def stats(self, status: bool = False) -> Report:
        """The daemon's counters; with `status` also what its status page shows."""
        reply = self.call(Stats(self._next_id(), status))
        assert isinstance(reply, Report)
        return reply

    def explain(self, request_id: str) -> Explained:
        """What became of a request."""
        reply = self.call(Explain(self._next_id(), request_id[:TEXT_MAX]))
        assert isinstance(reply, Explained)
        return reply

    def engines(self) -> list[WireEngine]:
        """Every engine that is connected."""
        reply = self.call(ListEngines(self._next_id()))
        assert isinstance(reply, Engines)
        return reply.engines

    def clear(self, tiers: bool = False) -> int:
        """Drop every object; returns how many. With `tiers` those below RAM begin to remove theirs as well."""
        dropped = 0
        while True:
            reply = self.call(Clear(self._next_id()))
            assert isinstance(reply, Done)
            dropped += reply.count
            if reply.count < CHANGES_MAX:
                break
        if tiers:
            self.call(Clear(self._next_id(), tiers=True))
        return dropped

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _lost(self, why: str) -> None:
        self._why = why

    def _wait(self, deadline: float, connecting: bool = False) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or (self._link.fd is None and not connecting):
            raise DaemonUnreachableError(
                f'no daemon answers at {self._socket_path} ({self._why}); start one: "hybridkv serve --socket '
                f'{self._socket_path}"'
            )
        descriptors = [self._link.fd] if self._link.fd is not None else []
        select.select(descriptors, [], [], min(left, 0.02))
