"""Connections to one Valkey or Redis server that are kept for the next call, and their errors."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from hybridkv.core.breaker import Breaker
from hybridkv.core.errors import ConfigError
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.remote import Deadline, batches, dial
from hybridkv.tiers.valkey.access import Access
from hybridkv.tiers.valkey.resp import ProtocolError, RefusedCommand, Reply, RespConnection, command
from hybridkv.tiers.valkey.slots import Address

FLIGHT_BYTES_MAX = 8 << 20
"""Bytes of values in one round trip: the server keeps a copy of what it has not sent yet."""
FLIGHT_COMMANDS_MAX = 1000
TRIES = 2
IDLE_MAX = 16  # Connections that are kept for the next call.
IDLE_SECONDS_MAX = 30.0
"""The network may drop a connection that is idle for longer, and tell neither end."""
_RESETS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the server, or something between, has closed."""
_ASKING = command(b"ASKING")


class LostConnectionError(TierError):
    """A connection was closed after its login. Another connection may work."""


class PendingCommand(NamedTuple):
    """A command and the memory for its answer."""

    send: Sequence[bytes | memoryview]
    slot: int = 0  # Of its key in a cluster.
    value_bytes: int = 0  # Bytes of the value in the command, or in its answer.
    into: Sequence[memoryview] | None = None  # Memory for an answer that is a value.
    asks: bool = False  # ASKING goes before it, since its slot is on its way to the server.


Answer: TypeAlias = "Reply | TierError"


class ConnectionPool:
    """Connections to one server that are logged in, each for one thread at a time."""

    def __init__(self, access: Access, address: Address) -> None:
        self.place = access.place_of(address)
        """The URL for people: without user and password."""
        self.health = Breaker()  # By how the last calls ended. Its owner changes it.
        self._access = access
        self._address = address
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[RespConnection] = []  # The last is the one used last, and is used next.
        self._live: set[RespConnection] = set()  # All connections, idle or in use.

    def connect(self, deadline: Deadline) -> None:
        """Log in. Raises ConfigError where the login can never work, else TierError."""
        try:
            self._keep(self._connect(deadline))
        except ProtocolError:
            raise ConfigError(
                f"{self.place}: what answers there is no Valkey or Redis server without TLS",
                f"{self._access.works()} of one works, or valkeys:// for one with TLS",
            ) from None
        except OSError as error:
            raise self._error_of(error) from None

    def exchange(self, asks: Sequence[PendingCommand], deadline: Deadline) -> list[Answer]:
        """Returns an answer or an error for each command. Never raises.

        Where a connection was closed, the commands without an answer are sent again. Each of them
        changes nothing the second time.
        """
        answers: list[Answer] = []
        error = TierError("not asked")
        sizes = [ask.value_bytes for ask in asks]
        for _, end in batches(sizes, FLIGHT_BYTES_MAX, FLIGHT_COMMANDS_MAX):
            for _ in range(TRIES):
                pending = asks[len(answers) : end]
                try:
                    with self.connection(deadline) as connection:
                        for ask in pending:
                            connection.send_all([*_ASKING, *ask.send] if ask.asks else ask.send)
                        for ask in pending:
                            answers.append(_answer(connection, ask))
                    break
                except (TierError, ConfigError) as failed:
                    error = TierError(str(failed))
                    if not isinstance(failed, LostConnectionError):
                        # The server does not answer, so the other batches are not tried.
                        return answers + [error] * (len(asks) - len(answers))
            answers += [error] * (end - len(answers))
        return answers

    @contextlib.contextmanager
    def connection(self, deadline: Deadline) -> Iterator[RespConnection]:
        """Lends a connection for a call, and keeps it for the next call if this one ends well.

        Raises TierError and ConfigError, also for an error of the connection inside the context.
        """
        with self._lock:
            if self._closed:
                raise TierError("closed")
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect(deadline)
        except (OSError, ProtocolError) as error:
            raise self._error_of(error) from None
        connection.deadline = deadline
        try:
            yield connection
        except BaseException as error:
            # Nothing that follows on this connection can be trusted.
            self._drop([connection])
            if isinstance(error, _RESETS):
                self.drop_idle()  # They are as old, and most likely closed too.
                raise LostConnectionError(str(self._error_of(error))) from None
            if isinstance(error, OSError | ProtocolError | ValueError):
                raise self._error_of(error) from None
            raise
        if connection.is_refused:
            self._drop([connection])
            self.drop_idle()  # They lead to the same server, with the same login.
        else:
            self._keep(connection)

    def _keep(self, connection: RespConnection) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        self._drop([connection])

    def _drop(self, connections: Collection[RespConnection]) -> None:
        with self._lock:
            self._live.difference_update(connections)
        for connection in connections:
            connection.close()

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close all connections that have been idle for `seconds`."""
        until = time.monotonic() - seconds
        with self._lock:
            stale = [idle for idle in self._idle if idle.used_at <= until]
            self._idle = [idle for idle in self._idle if idle.used_at > until]
        self._drop(stale)

    def close(self) -> None:
        """Close all connections. A call that uses one fails."""
        with self._lock:
            self._closed = True
        self.drop_idle()
        with self._lock:
            for connection in self._live:
                connection.abort()

    def _error_of(self, error: Exception) -> TierError:
        """Returns the TierError for an error of a connection."""
        # The system's texts have no secrets: addresses and the names of files at most.
        if isinstance(error, TimeoutError):
            how = " with TLS" if self._access.wants_tls else ""
            seconds = f"{self._access.timeout_seconds:g} s"
            return TierError(f"{self.place} does not answer{how} within {seconds}")
        return TierError(f"{self.place}: {getattr(error, 'strerror', None) or error}")

    def _connect(self, deadline: Deadline) -> RespConnection:
        """Returns a connection after its login, with the password that its file has now.

        Raises OSError, ProtocolError, ConfigError and TierError.
        """
        login = self._access.login
        try:
            return self._log_in(login, deadline)
        except ConfigError:
            # A password that ends after an hour is renewed in its file, and not at this moment.
            if not self._access.renew_password(login):
                raise
        return self._log_in(self._access.login, deadline)

    def _log_in(self, login: Sequence[str], deadline: Deadline) -> RespConnection:
        """Returns a connection after its login. Raises as `_connect` does."""
        connection = RespConnection(self._dial(deadline), deadline)
        with self._lock:
            closed = self._closed
            self._live.add(connection)
        try:
            if closed:
                raise TierError("closed")
            steps = {"SELECT": command(b"SELECT", b"%d" % int(self._access.database))}
            if login:
                steps = {"AUTH": command(b"AUTH", *(word.encode() for word in login))} | steps
            for buffers in steps.values():
                connection.send_all(buffers)
            for step in steps:
                if isinstance(answer := connection.reply(), RefusedCommand):
                    raise self._access.refusal_error(self.place, answer, step)
        except BaseException:
            self._drop([connection])
            raise
        return connection

    def _dial(self, deadline: Deadline) -> socket.socket:
        host, port = self._address
        if port:
            sock = dial(host, port, deadline)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        tls = self._access.tls
        try:
            sock.settimeout(deadline.seconds_left())
            if not port:
                sock.connect(host)
            return tls.wrap_socket(sock, server_hostname=host) if tls else sock
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self.place}: no authority that is known here"
                    " signed the server's certificate for this name",
                    "ca=/path/to/authority.pem works",
                ) from None
            raise


def _answer(connection: RespConnection, ask: PendingCommand) -> Reply:
    """Returns the answer to a command, or to its ASKING where that is refused."""
    asked = connection.reply() if ask.asks else None
    answer = connection.reply(ask.into)
    return asked if isinstance(asked, RefusedCommand) else answer
