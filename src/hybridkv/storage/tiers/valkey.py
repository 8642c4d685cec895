"""Records as the values of a Valkey or Redis server.

::

    valkey://127.0.0.1:6379/0                 also redis://
    valkeys://USER:PASSWORD@cache.example/0   with TLS; also rediss://; ca=FILE for a private authority
    valkey+unix:///run/valkey.sock?db=0

The server decides what goes where its memory ends: `maxmemory` with `maxmemory-policy allkeys-lru` makes a cache of it.
With `noeviction` puts are refused once it is full, and so they are with `bytes` once the server uses as much.
"""

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.tiers import TierSpec
from hybridkv.storage.record import KEY_BYTES
from hybridkv.storage.tiers.base import DamagedError, FullError, Getting, MissingError, Putting, Tier, TierError
from hybridkv.storage.tiers.remote import Deadline, batches, dial
from hybridkv.storage.tiers.resp import Connection, ProtocolError, Refusal, Reply, command, command_head

PREFIX = "hybridkv:1:"
PORT = 6379
VALUE_BYTES_MAX = 512 << 20
"""The server's proto-max-bulk-len, as it is unless someone changed it."""
FLIGHT_BYTES_MAX = 8 << 20
"""Of values in one round trip, where more than one value is in it: the server keeps a copy of what it has not sent."""
FLIGHT_COMMANDS_MAX = 1000
IDLE_MAX = 16
"""Connections that are kept for the next call."""
IDLE_SECONDS_MAX = 30.0
"""What lies between here and there may forget a connection that is idle for longer, without telling anybody."""
TRIES = 2
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True, "valkey+unix": False}
_RESETS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection ends that the server, or somebody between, has let go of."""
_NEEDED = "GET SET EXISTS UNLINK SCAN DBSIZE INFO"


@dataclass(frozen=True, slots=True)
class _Server:
    """Where it is, from the tier's URL."""

    place: str
    """For people: without user and password."""
    host: str
    port: int
    path: str
    """Of its Unix socket, or empty."""
    tls: bool
    authority: str | None
    """File with the certificate of who signed the server's."""
    database: int
    user: str = field(repr=False)
    password: str = field(repr=False)

    def works(self, login: str = "") -> str:
        """A URL like this one, for a sentence."""
        scheme, _, rest = self.place.partition("://")
        return f'"{scheme}://{login}{rest}"'


class _Ask(NamedTuple):
    """A command and where its answer goes."""

    send: Sequence[bytes | memoryview]
    value_bytes: int = 0
    """Of the value in it or in its answer."""
    into: Sequence[memoryview] | None = None
    """The answer is a value that goes there."""


_Answer: TypeAlias = "Reply | TierError"


class _Idle(NamedTuple):
    connection: Connection
    since: float


@dataclass(slots=True, eq=False)
class _Doubt:
    """Values that were sent, and whose answer did not come: the server may take them later."""

    size: int
    until: float = math.inf
    """When it has taken them or never will: a timeout after it answers again."""


class ValkeyTier(Tier):
    """A server's memory."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError where the URL says nothing that could work."""
        self.name = spec.name
        self._server, self._prefix = _parse(spec)
        self._timeout_seconds = spec.timeout_seconds
        self._max_bytes = spec.max_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._tls: ssl.SSLContext | None = None
        self._idle: list[_Idle] = []
        """The one used last is at the end, and is used next."""
        self._live: set[Connection] = set()
        """Idle or in use."""
        self._let_bytes = 0
        """Of all values ever let in, where there is a bound."""
        self._done_bytes = 0
        """Of those among them whose put has ended: what the server says that is asked now has them in it."""
        self._doubts: list[_Doubt] = []
        self._gauges: dict[str, float] = {}

    # The contract

    def open(self) -> None:
        """Log in anew and try what is needed; raises ConfigError where the server will never let us."""
        deadline = Deadline(self._timeout_seconds)
        try:
            if self._server.tls:
                self._tls = self._context()
            self._drop_idle()
            self._give(self._connect(deadline))
        except ProtocolError:
            raise ConfigError(
                f"{self._server.place}: what answers there is no Valkey or Redis server without TLS;"
                f" {self._server.works()} of one works, or valkeys:// for one with TLS"
            ) from None
        except OSError as error:
            raise self._failed(error) from None
        probe = self._ask([_Ask([command(b"EXISTS", self._name(bytes(KEY_BYTES)))])], deadline)
        for answer in (*probe, *self._look(deadline)):
            if isinstance(answer, TierError):
                raise answer
            if isinstance(answer, Refusal):
                raise self._refused(answer, "")

    def peek(self, key: bytes) -> bool | None:
        return None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        asks = [_Ask([command(b"EXISTS", self._name(key))]) for key in keys]
        return [_number(self._sound(answer)) > 0 for answer in self._ask(asks, Deadline(self._timeout_seconds))]

    def get(self, items: Sequence[Getting]) -> list[TierError | None]:
        asks = [
            _Ask([command(b"GET", self._name(item.key))], sum(map(len, item.pieces)), item.pieces) for item in items
        ]
        answers = self._ask(asks, Deadline(self._timeout_seconds))
        return [self._got(ask.value_bytes, answer) for ask, answer in zip(asks, answers, strict=True)]

    def put(self, items: Sequence[Putting]) -> list[TierError | None]:
        deadline = Deadline(self._timeout_seconds)
        sizes = [sum(map(len, item.pieces)) for item in items]
        with self._admitted(sizes, deadline) as results:
            let = [at for at, refusal in enumerate(results) if refusal is None]
            asks = [
                _Ask(
                    [command_head([b"SET", self._name(items[at].key)], sizes[at]), *items[at].pieces, b"\r\n"],
                    sizes[at],
                )
                for at in let
            ]
            for at, answer in zip(let, self._ask(asks, deadline), strict=True):
                results[at] = self._wrong(answer)
        return results

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        # A damaged value is not put aside: it would take the memory of sound ones.
        asks = [_Ask([command(b"UNLINK", self._name(key))]) for key in keys]
        for answer in self._ask(asks, Deadline(self._timeout_seconds)):
            self._sound(answer)

    def keys(self) -> Iterator[bytes]:
        """Every key under our prefix. One may come twice where keys are put or removed meanwhile."""
        pattern = b"".join(b"\\%c" % byte if byte in b"*?[]^\\" else b"%c" % byte for byte in self._prefix) + b"*"
        cursor = b"0"
        while True:
            ask = _Ask([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")])
            (answer,) = self._ask([ask], Deadline(self._timeout_seconds))
            match self._sound(answer):
                case [bytes() as cursor, list() as names]:
                    yield from filter(None, map(self._key, names))
                case _:
                    raise TierError(f"{self._server.place} answers SCAN with something else")
            if cursor == b"0":
                return

    def tend(self) -> None:
        """Let go of what was idle for long, and see how full the server is."""
        oldest = time.monotonic() - IDLE_SECONDS_MAX
        with self._lock:
            stale = [idle.connection for idle in self._idle if idle.since < oldest]
            self._idle = [idle for idle in self._idle if idle.since >= oldest]
            self._live.difference_update(stale)
        for connection in stale:
            connection.close()
        for answer in self._look(Deadline(self._timeout_seconds)):
            self._sound(answer)

    def gauges(self) -> Mapping[str, float]:
        """`bytes` and `bytes_max` of the whole server, `objects` of the whole database, as `tend` saw them last."""
        return self._gauges

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._live.difference_update(one.connection for one in idle)
            used = list(self._live)
        for one in idle:
            one.connection.close()
        for connection in used:
            connection.abort()

    # Room

    @contextlib.contextmanager
    def _admitted(self, sizes: Sequence[int], deadline: Deadline) -> Iterator[list[TierError | None]]:
        """For each value None or why it is not put.

        What the server says it uses has the values whose puts had ended when it was asked. All others that were let
        in count next to it, so that the bound holds whatever ends between its answer and what is decided here.  So do,
        for a time, those whose answers did not come.
        """
        results: list[TierError | None] = [
            FullError(f"{self._server.place} takes no value of {size} bytes") if size > VALUE_BYTES_MAX else None
            for size in sizes
        ]
        used = done = 0
        doubts: list[_Doubt] = []
        if self._max_bytes is not None and sizes:
            with self._lock:
                now = time.monotonic()
                self._done_bytes += sum(doubt.size for doubt in self._doubts if doubt.until <= now)
                self._doubts = [doubt for doubt in self._doubts if doubt.until > now]
                done, doubts = self._done_bytes, self._doubts
            try:
                used = self._used_bytes(deadline)
            except TierError as error:
                yield [error for _ in sizes]
                return
        let: list[int] = []
        with self._lock:
            now = time.monotonic()
            for doubt in doubts:
                doubt.until = min(doubt.until, now + self._timeout_seconds)
            for at, size in enumerate(sizes):
                if results[at] is not None:
                    continue
                if self._max_bytes is not None and used + self._let_bytes - done + size > self._max_bytes:
                    results[at] = FullError(f"{self._server.place} uses all of bytes={self._max_bytes}")
                else:
                    self._let_bytes += size
                    let.append(at)
        try:
            yield results
        finally:
            told = sum(sizes[at] for at in let if results[at] is None or isinstance(results[at], FullError))
            untold = sum(sizes[at] for at in let) - told
            with self._lock:
                self._done_bytes += told
                if untold and self._max_bytes is not None:
                    self._doubts = [*self._doubts, _Doubt(untold)]

    def _used_bytes(self, deadline: Deadline) -> int:
        (answer,) = self._ask([_Ask([command(b"INFO", b"memory")])], deadline)
        return _info(self._sound(answer)).get("used_memory", 0)

    def _look(self, deadline: Deadline) -> list[_Answer]:
        answers = self._ask([_Ask([command(b"INFO", b"memory")]), _Ask([command(b"DBSIZE")])], deadline)
        memory, objects = answers
        if isinstance(memory, bytes) and isinstance(objects, int):
            info = _info(memory)
            bounds = [bound for bound in (info.get("maxmemory", 0), self._max_bytes) if bound]
            gauges: dict[str, float] = {"bytes": info.get("used_memory", 0), "objects": objects}
            self._gauges = gauges | ({"bytes_max": min(bounds)} if bounds else {})
        return answers

    # Asking

    def _ask(self, asks: Sequence[_Ask], deadline: Deadline) -> list[_Answer]:
        """An answer or an error for each; never raises."""
        answers: list[Reply | TierError] = []
        sizes = [ask.value_bytes for ask in asks]
        for _, end in batches(sizes, FLIGHT_BYTES_MAX, FLIGHT_COMMANDS_MAX):
            error = None
            for _ in range(TRIES):
                try:
                    error = self._round(asks[:end], answers, deadline)
                except (TierError, ConfigError) as failed:
                    error = TierError(str(failed))
                    end = len(asks)  # nobody is there, or in time: the other batches need not try
                    break
                if error is None:
                    break
            answers += [error or TierError("not asked")] * (end - len(answers))
            if end == len(asks):
                break
        return answers

    def _round(self, asks: Sequence[_Ask], answers: list[_Answer], deadline: Deadline) -> TierError | None:
        """One round trip for what has no answer yet; returns the error where the connection broke, which may pass.

        Everything that is asked may be asked again: it changes nothing the second time.
        """
        connection = self._take(deadline)
        try:
            connection.send(chain.from_iterable(ask.send for ask in asks[len(answers) :]), deadline)
            for ask in asks[len(answers) :]:
                answers.append(connection.reply(deadline) if ask.into is None else connection.value(ask.into, deadline))
        except (OSError, ProtocolError, ValueError) as error:
            self._drop(connection)
            if isinstance(error, _RESETS):
                self._drop_idle()  # those are as old, and most likely as dead
                return self._failed(error)
            raise self._failed(error) from None
        except BaseException:
            self._drop(connection)
            raise
        self._give(connection)
        return None

    def _got(self, size: int, answer: _Answer) -> TierError | None:
        if answer is None:
            return MissingError("no such value")
        if isinstance(answer, Refusal) and answer.code == "WRONGTYPE":
            return DamagedError("it is no string")
        if isinstance(answer, int) and answer != size:
            return DamagedError(f"it has {answer} bytes instead of {size}")
        return self._wrong(answer)

    def _wrong(self, answer: _Answer) -> TierError | None:
        if isinstance(answer, TierError):
            return answer
        if not isinstance(answer, Refusal):
            return None
        return (FullError if answer.code == "OOM" else TierError)(f"{self._server.place} refuses ({answer.code})")

    def _sound(self, answer: _Answer) -> Reply:
        error = self._wrong(answer)
        if error is not None:
            raise error
        assert not isinstance(answer, TierError)
        return answer

    # Connections

    def _take(self, deadline: Deadline) -> Connection:
        with self._lock:
            if self._closed:
                raise TierError("closed")
            if self._idle:
                return self._idle.pop().connection
        try:
            return self._connect(deadline)
        except (OSError, ProtocolError) as error:
            raise self._failed(error) from None

    def _give(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(_Idle(connection, time.monotonic()))
                return
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._live.discard(connection)
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._live.difference_update(one.connection for one in idle)
        for one in idle:
            one.connection.close()

    def _connect(self, deadline: Deadline) -> Connection:
        """A connection that is logged in; raises OSError, ProtocolError, ConfigError, TierError."""
        server = self._server
        connection = Connection(self._dial(deadline))
        with self._lock:
            closed = self._closed
            self._live.add(connection)
        try:
            if closed:
                raise TierError("closed")
            login = [server.user.encode()] if server.user else []
            steps = {"SELECT": command(b"SELECT", b"%d" % server.database)}
            if server.password:
                steps = {"AUTH": command(b"AUTH", *login, server.password.encode())} | steps
            connection.send(steps.values(), deadline)
            answers = [connection.reply(deadline) for _ in steps]
            for step, answer in zip(steps, answers, strict=True):
                if isinstance(answer, Refusal):
                    raise self._refused(answer, step)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _dial(self, deadline: Deadline) -> socket.socket:
        server = self._server
        if not server.path:
            sock = dial(server.host, server.port, deadline)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.left())
            if server.path:
                sock.connect(server.path)
            return self._tls.wrap_socket(sock, server_hostname=server.host) if self._tls else sock
        except ssl.SSLError as error:
            sock.close()
            if error.reason == "CERTIFICATE_VERIFY_FAILED":
                raise ConfigError(
                    f"{server.place}: no authority that is known here signed the server's certificate for this name;"
                    " ca=/path/to/authority.pem works"
                ) from None
            raise
        except BaseException:
            sock.close()
            raise

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._server.authority)
        except OSError:
            raise ConfigError(
                f"{self._server.place}: ca={self._server.authority!r} is no readable file of certificates;"
                " ca=/etc/ssl/certs/ca-certificates.crt works"
            ) from None

    def _failed(self, error: Exception) -> TierError:
        # The text of what the system says has no secrets: addresses and the names of files at most.
        if isinstance(error, TimeoutError):
            how = " with TLS" if self._server.tls else ""
            return TierError(f"{self._server.place} does not answer{how} within {self._timeout_seconds:g} s")
        return TierError(f"{self._server.place}: {getattr(error, 'strerror', None) or error}")

    def _refused(self, refusal: Refusal, step: str) -> TierError | ConfigError:
        """What a refusal at the start means; `step` is the command of the login, if it was one."""
        server, code = self._server, refusal.code
        if code == "NOAUTH":
            return ConfigError(f"{server.place}: the server wants a password; {server.works(':PASSWORD@')} works")
        if code == "WRONGPASS" or (step, code) == ("AUTH", "ERR"):
            return ConfigError(
                f"{server.place}: the server refuses this user or password; {server.works('USER:PASSWORD@')} with"
                " those that it knows works"
            )
        if code == "NOPERM":
            keys = self._prefix.decode()
            return ConfigError(
                f"{server.place}: the user may not do what a cache needs; one with {_NEEDED} on ~{keys}* works"
            )
        if code == "DENIED":
            return ConfigError(f"{server.place}: the server is in protected mode; one with a password works")
        if code == "MOVED":
            return ConfigError(f"{server.place}: this is a node of a cluster; a server of its own works")
        if (step, code) == ("SELECT", "ERR"):
            return ConfigError(f"{server.place}: the server refuses database {server.database}; 0 works")
        return TierError(f"{server.place} refuses ({code})")

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _key(self, name: object) -> bytes | None:
        """The key that a name of the server's is, or None."""
        if not isinstance(name, bytes) or len(name) != len(self._prefix) + 2 * KEY_BYTES:
            return None
        try:
            key = bytes.fromhex(name[len(self._prefix) :].decode("ascii"))
        except ValueError:
            return None
        return key if self._name(key) == name else None


def _parse(spec: TierSpec) -> tuple[_Server, bytes]:
    unix = spec.kind == "valkey+unix"
    example = '"valkey+unix:///run/valkey.sock?db=0"' if unix else f'"{spec.kind}://127.0.0.1:{PORT}/0"'
    parts = _split(spec, example)
    host, port = parts.hostname or "", parts.port or PORT
    # From here on there is nothing secret before a colon: the last @ was the login's.
    place = f"{spec.kind}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    options = replace(spec, location=place).known_options(*(("prefix", "db") if unix else ("prefix", "ca")))
    database = options.get("db", "0") if unix else parts.path.strip("/") or "0"
    prefix = options.get("prefix", PREFIX)
    if spec.kind not in _SCHEMES or not (parts.path if unix else host):
        raise ConfigError(f"tier {place} names no server; {example} works")
    if not (database.isascii() and database.isdigit()):
        raise ConfigError(f"tier {place}: database {database!r} is no number; {example} works")
    if not prefix:
        raise ConfigError(f"tier {place}: prefix is empty; prefix={PREFIX} works")
    server = _Server(
        place=place,
        host=host,
        port=port,
        path=unquote(parts.path) if unix else "",
        tls=_SCHEMES[spec.kind],
        authority=options.get("ca"),
        database=int(database),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )
    if server.user and not server.password:
        raise ConfigError(f"tier {place}: there is a user without a password; {server.works('USER:PASSWORD@')} works")
    return server, prefix.encode()


def _split(spec: TierSpec, example: str) -> SplitResult:
    """The URL's parts; the errors print none of it, since any of it may be a password."""
    try:
        parts = urlsplit(spec.location)
        sound = parts.port is None or parts.port > 0
    except ValueError:
        sound = False
    _, at, host = spec.location.partition("://")[2].rpartition("@")
    if at and not (sound and parts.netloc.endswith("@" + host.partition("/")[0])):
        raise ConfigError(
            f"tier {spec.kind}: in the URL's user and password / ? # @ are written %2F %3F %23 %40;"
            f" {example.replace('://', '://USER:PASSWORD@')} works"
        )
    if not sound:
        raise ConfigError(f"tier {spec.kind}: the URL names no server; {example} works")
    return parts


def _info(answer: Reply) -> dict[str, int]:
    """The numbers of an answer to INFO."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    return {name: int(value) for name, value in pairs if value.isascii() and value.isdigit()}


def _number(answer: Reply) -> int:
    return answer if isinstance(answer, int) else 0
