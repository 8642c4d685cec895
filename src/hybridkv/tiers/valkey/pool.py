"""Connections to a Valkey or Redis server that are kept for the next call, and their errors."""

import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.remote import Deadline, dial
from hybridkv.tiers.valkey.resp import ProtocolError, RefusedCommand, RespConnection, command

PREFIX = "hybridkv:1:"
PORT = 6379
IDLE_MAX = 16  # Connections that are kept for the next call.
IDLE_SECONDS_MAX = 30.0
"""The network may drop a connection that is idle for longer, and tell neither end."""
_NEEDED = "GET SET EXISTS UNLINK SCAN DBSIZE INFO"
_RESETS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the server, or something between, has closed."""


class LostConnectionError(TierError):
    """A connection was closed after its login. Another connection may work."""


class ConnectionPool:
    """Connections that are logged in, each for one thread at a time."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError where the URL names no server. Its text shows no password."""
        is_unix = spec.kind == "valkey+unix"
        rest, own = ("/run/valkey.sock?db=0", "db") if is_unix else (f"127.0.0.1:{PORT}/0", "ca")
        works = f'"{spec.kind}://{rest}" works'
        parts = _split(spec, works)
        # The last @ ends the login, so nothing secret follows it.
        self.place = f"{spec.kind}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """The URL for people: without user and password."""
        bounds = "the server's maxmemory and maxmemory-policy"
        shown = replace(spec, location=self.place)
        options = shown.known_options("prefix", "password_file", own, bounded_by=bounds)
        self.prefix = options.get("prefix", PREFIX)  # How the names of its values begin.
        self._host, self._port = parts.hostname or "", parts.port or PORT
        self._socket = unquote(parts.path) if is_unix else ""
        self._authority = options.get("ca")
        self._database = options.get("db", "0") if is_unix else parts.path.strip("/") or "0"
        self._login = [unquote(word) for word in (parts.username, parts.password) if word]
        self._users = int(bool(parts.username))  # Words of the login before the password.
        self._password_file = options.get("password_file", "")
        """A file with the password, which is read at each `open`. "" = it is in the URL."""
        self._timeout_seconds = spec.timeout_seconds
        if not (self._socket if is_unix else self._host):
            raise ConfigError(f"tier {self.place} names no server", works)
        if not re.fullmatch("[0-9]+", self._database):
            what = f"tier {self.place}: database {self._database!r} is no number"
            raise ConfigError(what, works)
        if not self.prefix:
            raise ConfigError(f"tier {self.place}: prefix is empty", f"prefix={PREFIX} works")
        self._check_login(parts)
        self._wants_tls = spec.kind in ("valkeys", "rediss")
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[RespConnection] = []  # The last is the one used last, and is used next.
        self._live: set[RespConnection] = set()  # All connections, idle or in use.

    def _check_login(self, parts: SplitResult) -> None:
        """Raise ConfigError unless there is one password, or neither user nor password."""
        if parts.password and self._password_file:
            what = f"tier {self.place}: the password is given twice, in the URL and password_file"
            raise ConfigError(what, f"{self._works()} with password_file works")
        if parts.username and not (parts.password or self._password_file):
            raise ConfigError(
                f"tier {self.place}: there is a user without a password",
                f"{self._works('USER:PASSWORD@')} works",
            )

    def _works(self, login: str = "") -> str:
        """Returns this URL with another login, for a message."""
        scheme, _, rest = self.place.partition("://")
        return f'"{scheme}://{login}{rest}"'

    def _read_password(self) -> str:
        try:
            return Path(self._password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            what = f"{self.place}: password_file={self._password_file!r} cannot be read ({why})"
            raise ConfigError(what, "a file of yours with the password alone works") from None

    def connect(self, deadline: Deadline) -> None:
        """Log in anew. Raises ConfigError where the login can never work, else TierError."""
        with self._lock:
            self._closed = False
        if self._wants_tls:
            try:
                self._tls = ssl.create_default_context(cafile=self._authority)
            except OSError:
                raise ConfigError(
                    f"{self.place}: ca={self._authority!r} is no readable file of certificates",
                    "ca=/etc/ssl/certs/ca-certificates.crt works",
                ) from None
        if self._password_file:
            self._login = [*self._login[: self._users], self._read_password()]
        self.drop_idle()
        try:
            self._keep(self._connect(deadline))
        except ProtocolError:
            raise ConfigError(
                f"{self.place}: what answers there is no Valkey or Redis server without TLS",
                f"{self._works()} of one works, or valkeys:// for one with TLS",
            ) from None
        except OSError as error:
            raise self._error_of(error) from None

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
            how = " with TLS" if self._wants_tls else ""
            seconds = f"{self._timeout_seconds:g} s"
            return TierError(f"{self.place} does not answer{how} within {seconds}")
        return TierError(f"{self.place}: {getattr(error, 'strerror', None) or error}")

    def refusal_error(self, refusal: RefusedCommand, step: str = "") -> TierError | ConfigError:
        """Returns the error for a refusal at `open`. `step` is the command of the login, or ""."""
        login = f"{self._works('USER:PASSWORD@')} with those that it knows"
        if self._password_file:
            login = f"the password that it knows in password_file={self._password_file!r}"
        wrong_login = ("the server refuses this user or password", login)
        meanings = {
            "NOAUTH": ("the server wants a password", self._works(":PASSWORD@")),
            "WRONGPASS": wrong_login,
            "AUTH ERR": wrong_login,
            "NOPERM": (
                "the user may not do what a cache needs",
                f"one with {_NEEDED} on ~{self.prefix}*",
            ),
            "DENIED": ("the server is in protected mode", "one with a password"),
            "MOVED": ("this is a node of a cluster", "a server of its own"),
            "SELECT ERR": (f"the server refuses database {self._database}", "0"),
        }
        meaning = meanings.get(f"{step} {refusal.code}") or meanings.get(refusal.code)
        if meaning is None:
            return TierError(f"{self.place} refuses ({refusal.code})")
        what, remedy = meaning
        return ConfigError(f"{self.place}: {what}", f"{remedy} works")

    def _connect(self, deadline: Deadline) -> RespConnection:
        """Returns a connection after its login.

        Raises OSError, ProtocolError, ConfigError and TierError.
        """
        connection = RespConnection(self._dial(deadline), deadline)
        with self._lock:
            closed = self._closed
            self._live.add(connection)
        try:
            if closed:
                raise TierError("closed")
            steps = {"SELECT": command(b"SELECT", b"%d" % int(self._database))}
            if self._login:
                words = [word.encode() for word in self._login]
                steps = {"AUTH": command(b"AUTH", *words)} | steps
            for buffers in steps.values():
                connection.send_all(buffers)
            for step in steps:
                if isinstance(answer := connection.reply(), RefusedCommand):
                    raise self.refusal_error(answer, step)
        except BaseException:
            self._drop([connection])
            raise
        return connection

    def _dial(self, deadline: Deadline) -> socket.socket:
        if self._socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = dial(self._host, self._port, deadline)
        try:
            sock.settimeout(deadline.seconds_left())
            if self._socket:
                sock.connect(self._socket)
            return self._tls.wrap_socket(sock, server_hostname=self._host) if self._tls else sock
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self.place}: no authority that is known here"
                    " signed the server's certificate for this name",
                    "ca=/path/to/authority.pem works",
                ) from None
            raise


def _split(spec: TierSpec, works: str) -> SplitResult:
    """Returns the parts of the URL. Errors show none of it: any part may be a password."""
    try:
        parts = urlsplit(spec.location)
        is_sound = parts.port is None or parts.port > 0
    except ValueError:
        is_sound = False
    _, at, host = spec.location.partition("://")[2].rpartition("@")
    if at and not (is_sound and parts.netloc.endswith("@" + host.partition("/")[0])):
        raise ConfigError(
            f"tier {spec.kind}: in the URL's user and password / ? # @ are written %2F %3F %23 %40",
            works.replace("://", "://USER:PASSWORD@"),
        )
    if not is_sound:
        raise ConfigError(f"tier {spec.kind}: the URL names no server", works)
    return parts
