"""Records as the values of a Valkey or Redis server.

::

    valkey://127.0.0.1:6379/0                 also redis://
    valkeys://USER:PASSWORD@cache.example/0   with TLS, also rediss://; ca=FILE: a private authority
    valkey+unix:///run/valkey.sock?db=0

The server decides what goes where its memory ends: `maxmemory` with `maxmemory-policy allkeys-lru`
makes a cache of it.  With `noeviction` puts are refused once it is full, and so they are with
`bytes` once the server uses as much.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from ssl import SSLEOFError, SSLZeroReturnError
from typing import NamedTuple, TypeAlias

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers import contract
from hybridkv.tiers.byte_ledger import WriteBudget
from hybridkv.tiers.contract import ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.record import KEY_BYTES
from hybridkv.tiers.remote import Deadline, batches
from hybridkv.tiers.valkey.address import parse_address
from hybridkv.tiers.valkey.pool import IDLE_SECONDS_MAX, ConnectionPool
from hybridkv.tiers.valkey.resp import ProtocolError, RefusedCommand, Reply, command, command_head

VALUE_BYTES_MAX = 512 << 20
"""The server's default of proto-max-bulk-len."""
FLIGHT_BYTES_MAX = 8 << 20
"""Bytes of values in one round trip of several: the server keeps a copy of what it has not sent."""
FLIGHT_COMMANDS_MAX = 1000
TRIES = 2
_RESETS = (ConnectionError, SSLEOFError, SSLZeroReturnError)
"""How a connection ends that the server, or something between, has closed."""


class PendingCommand(NamedTuple):
    """A command and where its answer goes."""

    send: Sequence[bytes | memoryview]
    value_bytes: int = 0
    """The size of the value in the command or in its answer."""
    into: Sequence[memoryview] | None = None
    """Where the answer goes, if it is a value."""


_Answer: TypeAlias = "Reply | TierError"


class ValkeyTier(Tier):
    """A server's memory."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError where the URL says nothing that could work."""
        self.name = spec.name
        server = parse_address(spec)
        self._place, self._prefix = server.place, server.prefix
        self._timeout_seconds = spec.timeout_seconds
        self._pool = ConnectionPool(server, spec.timeout_seconds)
        self._budget = spec.max_bytes and WriteBudget(spec.max_bytes, spec.timeout_seconds)
        self._lock = threading.Lock()
        """For the budget."""
        self._gauges: dict[str, float] = {}

    # The contract

    def open(self) -> None:
        """Log in anew and try what is needed; raises ConfigError where the server refuses us."""
        deadline = Deadline(self._timeout_seconds)
        self._pool.open(deadline)
        probe = self._ask([_keyed(b"EXISTS", self._name(bytes(KEY_BYTES)))], deadline)
        for answer in (*probe, *self._look(deadline)):
            if isinstance(answer, TierError):
                raise answer
            if isinstance(answer, RefusedCommand):
                raise self._pool.refused(answer)

    def peek(self, key: bytes) -> bool | None:
        return None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        answers = map(self._sound, self._ask_each(b"EXISTS", keys))
        return [isinstance(answer, int) and answer > 0 for answer in answers]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        sizes = [sum(map(len, item.pieces)) for item in items]
        asks = [
            PendingCommand([command(b"GET", self._name(item.key))], size, item.pieces)
            for item, size in zip(items, sizes, strict=True)
        ]
        answers = self._ask(asks, Deadline(self._timeout_seconds))
        return [self._got(size, answer) for size, answer in zip(sizes, answers, strict=True)]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        deadline = Deadline(self._timeout_seconds)
        sizes = [sum(map(len, item.pieces)) for item in items]
        with self._admitted(sizes, deadline) as results:
            admitted = [at for at, error in enumerate(results) if error is None]
            asks = []
            for at in admitted:
                head = command_head([b"SET", self._name(items[at].key)], sizes[at])
                asks.append(PendingCommand([head, *items[at].pieces, b"\r\n"], sizes[at]))
            for at, answer in zip(admitted, self._ask(asks, deadline), strict=True):
                results[at] = self._wrong(answer)
        return results

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        # A damaged value is not put aside: it would take the memory of sound ones.
        for answer in self._ask_each(b"UNLINK", keys):
            self._sound(answer)

    def keys(self) -> Iterator[bytes]:
        """Every key under our prefix; some come twice where others are put or removed meanwhile."""
        pattern = re.sub(rb"[*?\[\]^\\]", rb"\\\g<0>", self._prefix) + b"*"
        cursor = b"0"
        while True:
            ask = PendingCommand([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")])
            (answer,) = self._ask([ask], Deadline(self._timeout_seconds))
            match self._sound(answer):
                case [bytes() as cursor, list() as names]:
                    yield from filter(None, map(self._key, names))
                case _:
                    raise TierError(f"{self._place} answers SCAN with something else")
            if cursor == b"0":
                return

    def tend(self) -> None:
        """Let go of what was idle for long, and see how full the server is."""
        self._pool.drop_idle(IDLE_SECONDS_MAX)
        for answer in self._look(Deadline(self._timeout_seconds)):
            self._sound(answer)

    def gauges(self) -> Mapping[str, float]:
        """`bytes` and `bytes_max` of the server, `objects` of the database, as `tend` saw them."""
        return self._gauges

    def close(self) -> None:
        self._pool.close()

    # Room

    @contextlib.contextmanager
    def _admitted(
        self, sizes: Sequence[int], deadline: Deadline
    ) -> Iterator[list[TierError | None]]:
        """For each value None or why it is not put; the caller replaces None by what came of it."""
        results = [self._too_large(size) for size in sizes]
        budget = self._budget
        if not budget or not sizes:
            yield results
            return
        with self._lock:
            question = budget.ask(time.monotonic())
        try:
            used = self._used_bytes(deadline)
        except TierError as error:
            yield [error for _ in sizes]
            return
        wanted = [at for at, error in enumerate(results) if error is None]
        with self._lock:
            fits = budget.admit(question, used, [sizes[at] for at in wanted], time.monotonic())
        sent = [at for at, fit in zip(wanted, fits, strict=True) if fit]
        for at in {*wanted} - {*sent}:
            results[at] = contract.FullError(f"{self._place} uses all of bytes={budget.bytes_max}")
        try:
            yield results
        finally:
            confirmed = sum(
                sizes[at] for at in sent if isinstance(results[at], contract.FullError | None)
            )
            with self._lock:
                budget.ended(confirmed, sum(sizes[at] for at in sent) - confirmed)

    def _too_large(self, size: int) -> TierError | None:
        if size <= VALUE_BYTES_MAX:
            return None
        return contract.FullError(f"{self._place} takes no value of {size} bytes")

    def _used_bytes(self, deadline: Deadline) -> int:
        (answer,) = self._ask([PendingCommand([command(b"INFO", b"memory")])], deadline)
        return _info(self._sound(answer)).get("used_memory", 0)

    def _look(self, deadline: Deadline) -> list[_Answer]:
        """Ask for what `gauges` says; returns the answers."""
        commands = (command(b"INFO", b"memory"), command(b"DBSIZE"))
        answers = self._ask([PendingCommand([one]) for one in commands], deadline)
        memory, objects = answers
        if isinstance(memory, bytes) and isinstance(objects, int):
            info = _info(memory)
            gauges: dict[str, float] = {"bytes": info.get("used_memory", 0), "objects": objects}
            own = self._budget.bytes_max if self._budget else 0
            bounds = [bound for bound in (info.get("maxmemory", 0), own) if bound]
            self._gauges = gauges | ({"bytes_max": min(bounds)} if bounds else {})
        return answers

    # Asking

    def _ask_each(self, verb: bytes, keys: Sequence[bytes]) -> list[_Answer]:
        asks = [_keyed(verb, self._name(key)) for key in keys]
        return self._ask(asks, Deadline(self._timeout_seconds))

    def _ask(self, asks: Sequence[PendingCommand], deadline: Deadline) -> list[_Answer]:
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

    def _round(
        self, asks: Sequence[PendingCommand], answers: list[_Answer], deadline: Deadline
    ) -> TierError | None:
        """One round trip for what has no answer yet; returns the error of a reset, which may pass.

        Everything that is asked may be asked again: it changes nothing the second time.
        """
        connection = self._pool.take(deadline)
        try:
            connection.send(chain.from_iterable(ask.send for ask in asks[len(answers) :]), deadline)
            for ask in asks[len(answers) :]:
                answers.append(
                    connection.reply(deadline)
                    if ask.into is None
                    else connection.value(ask.into, deadline)
                )
        except (OSError, ProtocolError, ValueError) as error:
            self._pool.drop(connection)
            if isinstance(error, _RESETS):
                self._pool.drop_idle()  # those are as old, and most likely as dead
                return self._pool.failed(error)
            raise self._pool.failed(error) from None
        except BaseException:
            self._pool.drop(connection)
            raise
        self._pool.give(connection)
        return None

    def _got(self, size: int, answer: _Answer) -> TierError | None:
        if answer is None:
            return contract.MissingError("no such value")
        if isinstance(answer, RefusedCommand) and answer.code == "WRONGTYPE":
            return contract.DamagedError("it is no string")
        if isinstance(answer, int) and answer != size:
            return contract.DamagedError(f"it has {answer} bytes instead of {size}")
        return self._wrong(answer)

    def _wrong(self, answer: _Answer) -> TierError | None:
        if isinstance(answer, TierError):
            return answer
        if not isinstance(answer, RefusedCommand):
            return None
        kind = contract.FullError if answer.code == "OOM" else TierError
        return kind(f"{self._place} refuses ({answer.code})")

    def _sound(self, answer: _Answer) -> Reply:
        error = self._wrong(answer)
        if error is not None:
            raise error
        assert not isinstance(answer, TierError)
        return answer

    # Names

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _key(self, name: object) -> bytes | None:
        """The key of one of the server's names, or None."""
        if not isinstance(name, bytes) or len(name) != len(self._prefix) + 2 * KEY_BYTES:
            return None
        try:
            key = bytes.fromhex(name[len(self._prefix) :].decode("ascii"))
        except ValueError:
            return None
        return key if self._name(key) == name else None


def _keyed(verb: bytes, name: bytes) -> PendingCommand:
    return PendingCommand([command(verb, name)])


def _info(answer: Reply) -> dict[str, int]:
    """The numbers of an answer to INFO."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    return {name: int(value) for name, value in pairs if value.isascii() and value.isdigit()}
