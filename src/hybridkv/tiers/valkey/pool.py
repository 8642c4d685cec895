"""Connections to a Valkey or Redis server, kept for the next call, and what their errors mean."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.remote import Deadline, dial
from hybridkv.tiers.valkey.address import ServerAddress
from hybridkv.tiers.valkey.resp import ProtocolError, RefusedCommand, RespConnection, command

IDLE_MAX = 16
"""Connections that are kept for the next call."""
IDLE_SECONDS_MAX = 30.0
"""The network may forget a connection that is idle for longer without telling either end."""
_NEEDED = "GET SET EXISTS UNLINK SCAN DBSIZE INFO"
_RESETS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection ends that the server, or something between, has closed."""


class LostConnectionError(TierError):
    """A connection was closed that had been logged in; another one may work."""


class ConnectionPool:
    """Connections that are logged in, each for one thread at a time."""

    def __init__(self, server: ServerAddress, timeout_seconds: float) -> None:
        """`timeout_seconds` is for messages only."""
        self._server = server
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._tls: ssl.SSLContext | None = None
        self._idle: list[RespConnection] = []
        """The one used last is at the end, and is used next."""
        self._live: set[RespConnection] = set()
        """All connections, idle or in use."""

    def open(self, deadline: Deadline) -> None:
        """Log in anew; raises ConfigError where the server will never let us, or TierError."""
        server = self._server
        if server.tls:
            try:
                self._tls = ssl.create_default_context(cafile=server.authority)
            except OSError:
                raise ConfigError(
                    f"{server.place}: ca={server.authority!r} is no readable file of certificates",
                    "ca=/etc/ssl/certs/ca-certificates.crt works",
                ) from None
        self.drop_idle()
        try:
            self._keep(self._connect(deadline))
        except ProtocolError:
            raise ConfigError(
                f"{server.place}: what answers there is no Valkey or Redis server without TLS",
                f"{server.works()} of one works, or valkeys:// for one with TLS",
            ) from None
        except OSError as error:
            raise self._failed(error) from None

    @contextlib.contextmanager
    def connection(self, deadline: Deadline) -> Iterator[RespConnection]:
        """A connection for a call, kept for the next one if this one ends well.

        Raises TierError and ConfigError, also for what goes wrong on the connection meanwhile.
        """
        with self._lock:
            if self._closed:
                raise TierError("closed")
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect(deadline)
        except (OSError, ProtocolError) as error:
            raise self._failed(error) from None
        connection.deadline = deadline
        try:
            yield connection
        except BaseException as error:
            # Nothing that follows on it can be trusted.
            self._drop(connection)
            if isinstance(error, _RESETS):
                self.drop_idle()  # those are as old, and most likely as dead
                raise LostConnectionError(str(self._failed(error))) from None
            if isinstance(error, OSError | ProtocolError | ValueError):
                raise self._failed(error) from None
            raise
        self._keep(connection)

    def _keep(self, connection: RespConnection) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        self._drop(connection)

    def _drop(self, *connections: RespConnection) -> None:
        with self._lock:
            self._live.difference_update(connections)
        for connection in connections:
            connection.close()

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close all that have been idle for so long."""
        until = time.monotonic() - seconds
        with self._lock:
            stale = [idle for idle in self._idle if idle.used_at <= until]
            self._idle = [idle for idle in self._idle if idle.used_at > until]
        self._drop(*stale)

    def close(self) -> None:
        """Close all connections; a call that uses one fails."""
        with self._lock:
            self._closed = True
        self.drop_idle()
        with self._lock:
            for connection in self._live:
                connection.abort()

    def _failed(self, error: Exception) -> TierError:
        """What an error of a connection means."""
        # The system's texts have no secrets: addresses and the names of files at most.
        place = self._server.place
        if isinstance(error, TimeoutError):
            how = " with TLS" if self._server.tls else ""
            return TierError(f"{place} does not answer{how} within {self._timeout_seconds:g} s")
        return TierError(f"{place}: {getattr(error, 'strerror', None) or error}")

    def refused(self, refusal: RefusedCommand, step: str = "") -> TierError | ConfigError:
        """What a refusal at the start means; `step` is the command of the login, if it was one."""
        server, code = self._server, refusal.code
        wrong_login = (
            "the server refuses this user or password",
            f"{server.works('USER:PASSWORD@')} with those that it knows",
        )
        meanings = {
            "NOAUTH": ("the server wants a password", server.works(":PASSWORD@")),
            "WRONGPASS": wrong_login,
            "AUTH ERR": wrong_login,
            "NOPERM": (
                "the user may not do what a cache needs",
                f"one with {_NEEDED} on ~{server.prefix.decode()}*",
            ),
            "DENIED": ("the server is in protected mode", "one with a password"),
            "MOVED": ("this is a node of a cluster", "a server of its own"),
            "SELECT ERR": (f"the server refuses database {server.database}", "0"),
        }
        meaning = meanings.get(f"{step} {code}") or meanings.get(code)
        if meaning is None:
            return TierError(f"{server.place} refuses ({code})")
        what, remedy = meaning
        return ConfigError(f"{server.place}: {what}", f"{remedy} works")

    def _connect(self, deadline: Deadline) -> RespConnection:
        """A connection that is logged in; raises OSError, ProtocolError, ConfigError, TierError."""
        server = self._server
        connection = RespConnection(self._dial(deadline), deadline)
        with self._lock:
            closed = self._closed
            self._live.add(connection)
        try:
            if closed:
                raise TierError("closed")
            steps = {"SELECT": command(b"SELECT", b"%d" % server.database)}
            if server.password:
                login = [server.user.encode()] if server.user else []
                steps = {"AUTH": command(b"AUTH", *login, server.password.encode())} | steps
            for buffers in steps.values():
                connection.send(buffers)
            for step in steps:
                if isinstance(answer := connection.reply(), RefusedCommand):
                    raise self.refused(answer, step)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _dial(self, deadline: Deadline) -> socket.socket:
        server = self._server
        if server.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = dial(server.host, server.port, deadline)
        try:
            sock.settimeout(deadline.left())
            if server.path:
                sock.connect(server.path)
            return self._tls.wrap_socket(sock, server_hostname=server.host) if self._tls else sock
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{server.place}: no authority that is known here"
                    " signed the server's certificate for this name",
                    "ca=/path/to/authority.pem works",
                ) from None
            raise
