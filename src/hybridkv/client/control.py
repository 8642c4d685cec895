"""Blocking calls with a deadline, for commands and start-up, and never for an engine's hooks."""

import contextlib
import itertools
import logging
import os
import select
import stat
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec import structs

from hybridkv.client.link import Link
from hybridkv.core.errors import HybridKVError, RemediedError
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")

ANSWER_SECONDS = 1.0
"""The limit of one greeting. A busy machine is slow, and another attempt costs more."""

PAGE_SECONDS = 60.0
"""The time that a tier has for each page of its records."""
POLL_SECONDS = 0.005  # The pause before a page is asked for that a tier had not read yet.

_Answer = TypeVar("_Answer", bound=wire.Reply)


class DaemonUnreachableError(RemediedError):
    """No daemon answers at the socket."""


class DaemonRefusedError(DaemonUnreachableError):
    """The daemon at the socket is another user's, or speaks another protocol version."""


class DaemonVersionError(DaemonRefusedError):
    """The daemon speaks another version of the protocol."""


class ControlClient:
    """A control connection. Entering it connects, without a wait where nobody listens."""

    def __init__(
        self,
        socket_path: str,
        timeout_seconds: float = 5.0,
        hello: wire.Hello | None = None,
        group: int | None = None,
    ) -> None:
        """The daemon may be of another user that is a member of `group`."""
        self._socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._why = "nothing listens there"
        hello = hello or wire.Hello(1, wire.PROTOCOL_VERSION, "control")
        self.link = Link(socket_path, hello, self._lost, group)
        self._ids = itertools.count(2)

    def __enter__(self) -> "ControlClient":
        deadline = time.monotonic() + self._timeout_seconds
        try:
            while self.link.welcome is None:
                self.link.poll(time.monotonic())
                if self.link.refusal is not None:
                    if self.link.is_other_version:
                        raise DaemonVersionError(self.link.refusal)
                    raise DaemonRefusedError(self.link.refusal)
                if self.link.welcome is None:
                    self._wait(deadline, connecting=self.link.is_served)
        except BaseException:
            self.link.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()

    @property
    def welcome(self) -> wire.Welcome:
        """The daemon's answer to the greeting."""
        assert self.link.welcome is not None
        return self.link.welcome

    def call(self, request: wire.Request) -> wire.Reply:
        """Send a request and return its reply.

        Raises DaemonUnreachableError, or HybridKVError on a refusal.
        """
        deadline = time.monotonic() + self._timeout_seconds
        self.tell(request)
        while True:
            for reply in self.link.poll(time.monotonic()):
                if isinstance(reply, wire.Error):
                    raise HybridKVError(reply.message)
                if reply.id == getattr(request, "id", 0):
                    return reply
            self._wait(deadline)

    def tell(self, request: wire.Request) -> None:
        """Send a one-way message. Raises DaemonUnreachableError."""
        if not self.link.send(request, time.monotonic()):
            raise DaemonUnreachableError(f"{self._socket_path}: {self._why}")

    def stats(self, status: bool = False, debug: bool = True) -> wire.Report:
        """Return the daemon's values and tiers, and with `status` what its status page shows.

        Without `debug`, debug values are left out.
        """
        return self._ask(wire.Stats(next(self._ids), status, debug), wire.Report)

    def explain(self, request_id: str) -> wire.Explained:
        """Return the course of a request, where the daemon knows it, and the latest requests."""
        return self._ask(wire.Explain(next(self._ids), request_id[: wire.TEXT_MAX]), wire.Explained)

    def start_prefetch(self, request_id: str, family: bytes, in_ms: int) -> wire.Prefetching:
        """Prefetch the prompt of a request, or with `family` those that begin so (StartPrefetch).

        Returns what became of each so far.
        """
        request_id = request_id[: wire.TEXT_MAX]
        request = wire.StartPrefetch(next(self._ids), request_id, family, in_ms)
        return self._ask(request, wire.Prefetching)

    def read_prefetches(self, numbers: Sequence[int]) -> list[wire.PrefetchStatus]:
        """Return what became of prefetches, without those that the daemon has forgotten."""
        request = wire.ReadPrefetches(next(self._ids), [*numbers])
        return self._ask(request, wire.Prefetching).prefetches

    def engines(self) -> list[wire.WireEngine]:
        """Return every session that an engine has with the daemon."""
        return self._ask(wire.ListEngines(next(self._ids)), wire.Engines).engines

    def pin_chunks(self, request: wire.Pin) -> wire.Pinned:
        """Pin or unpin what a request names, if it names anything. Returns all pins."""
        return self._ask(structs.replace(request, id=next(self._ids)), wire.Pinned)

    def clear_objects(self, tiers: bool = False) -> int:
        """Drop every object, and with `tiers` begin to empty the tiers below RAM.

        Returns the number of objects that RAM had.
        """
        dropped = 0
        while True:
            count = self._ask(wire.Clear(next(self._ids)), wire.Done).count
            dropped += count
            if count < wire.CHANGES_MAX:
                break
        if tiers:
            self.call(wire.Clear(next(self._ids), tiers=True))
        return dropped

    def list_objects(self, place: int) -> Iterator[wire.ObjectPage]:
        """Yield pages of what a place holds: 0 is RAM, n the n-th tier.

        The `error` of the last one is why there are no more. A page may be empty.
        """
        cursor: int | None = 0
        heard_at = time.monotonic()
        while cursor is not None:
            page = self._ask(wire.ListObjects(next(self._ids), place, cursor), wire.ObjectPage)
            is_next, cursor = page.cursor != cursor, page.cursor
            if page.objects or is_next:
                heard_at = time.monotonic()
                yield page
            elif time.monotonic() > heard_at + PAGE_SECONDS:
                yield wire.ObjectPage(0, [], None, f"it does not answer within {PAGE_SECONDS:g} s")
                return
            else:
                time.sleep(POLL_SECONDS)

    def forget_objects(
        self, place: int, keys: Sequence[bytes] = (), rest: bool = False
    ) -> wire.Forgotten:
        """Forget at most CHANGES_MAX objects in one place, by their keys, as in wire.Forget.

        Of a tier it returns what was done since the last call, which may be some of it.
        """
        request = wire.Forget(next(self._ids), place, b"".join(keys), rest)
        return self._ask(request, wire.Forgotten)

    def quotas(self) -> wire.QuotaReport:
        """Return the bounds of tenants."""
        return self._ask(wire.ReadQuotas(next(self._ids)), wire.QuotaReport)

    def set_quota(
        self, tenant: int, bound_bytes: int | None, is_default: bool = False
    ) -> wire.QuotaReport:
        """Change a bound, as wire.SetQuota has it. Returns all bounds."""
        request = wire.SetQuota(next(self._ids), tenant, bound_bytes, is_default)
        return self._ask(request, wire.QuotaReport)

    def _ask(self, request: wire.Request, kind: type[_Answer]) -> _Answer:
        reply = self.call(request)
        assert isinstance(reply, kind)
        return reply

    def _lost(self, why: str) -> None:
        self._why = why

    def _wait(self, deadline: float, connecting: bool = False) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or (self.link.fd is None and not connecting):
            raise DaemonUnreachableError(
                f"no daemon answers at {self._socket_path} ({self._why})",
                f'start one: "hybridkv serve --socket {self._socket_path}"',
            )
        descriptors = [self.link.fd] if self.link.fd is not None else []
        select.select(descriptors, [], [], min(left, 0.02))


def runtime_directory() -> str:
    """Return XDG_RUNTIME_DIR where that is this user's directory, else "".

    sudo, cron and services inherit the name of another user's directory, or of one that is gone.
    """
    path = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # The directory that the environment names is gone.
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            return path
    return ""
