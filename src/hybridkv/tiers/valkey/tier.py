"""Records as the values of a Valkey or Redis server.

::

    valkey://127.0.0.1:6379/0                 also redis://
    valkeys://USER:PASSWORD@cache.example/0   with TLS, also rediss://; ca=FILE: a private authority
    valkey+unix:///run/valkey.sock?db=0

The server evicts where its memory ends: `maxmemory` with `maxmemory-policy allkeys-lru` makes a
cache of it. With `noeviction` it refuses puts once it is full.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers import contract
from hybridkv.tiers.contract import ReadRequest, RecordStart, Tier, TierError, WriteRequest
from hybridkv.tiers.remote import FIND_SHARE, KEY_DIGITS, Deadline, batches, sizes_of
from hybridkv.tiers.valkey.pool import IDLE_SECONDS_MAX, ConnectionPool, LostConnectionError
from hybridkv.tiers.valkey.resp import RefusedCommand, Reply, command

VALUE_BYTES_MAX = 512 << 20  # The server's default of proto-max-bulk-len.
FLIGHT_BYTES_MAX = 8 << 20
"""Bytes of values in one round trip: the server keeps a copy of what it has not sent yet."""
FLIGHT_COMMANDS_MAX = 1000
TRIES = 2
_REFUSALS: Mapping[str, Refusal] = {
    "OOM": Refusal.MEMORY,
    "READONLY": Refusal.READ_ONLY,
    "NOPERM": Refusal.PERMISSION,
    "MISCONF": Refusal.SERVER,  # It cannot save to its disk, and therefore takes no writes.
    "NOREPLICAS": Refusal.SERVER,
}
"""By the code of an error, the reason of a server that answers and takes no values."""
_MEMORY = re.compile(rb"^(used_memory|maxmemory):(\d{1,20})\r?$", re.MULTILINE)


class PendingCommand(NamedTuple):
    """A command and the memory for its answer."""

    send: Sequence[bytes | memoryview]
    value_bytes: int = 0  # Bytes of the value in the command, or in its answer.
    into: Sequence[memoryview] | None = None  # Memory for an answer that is a value.


_Answer: TypeAlias = "Reply | TierError"


class ValkeyTier(Tier):
    """Keeps records as values in a server's memory."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError for settings that can never work."""
        self.name = spec.kind
        self.pool = ConnectionPool(spec)
        self._place, self._prefix = self.pool.place, self.pool.prefix.encode()
        self._ours = re.compile(re.escape(self._prefix) + b"(%b)" % KEY_DIGITS.encode())
        self._timeout_seconds = spec.timeout_seconds
        self._gauges: dict[str, float] = {}
        self._finds_cut = 0

    # The contract

    def open(self) -> None:
        """Log in anew and try each command. Raises ConfigError where the server refuses one."""
        deadline = Deadline(self._timeout_seconds)
        self.pool.connect(deadline)
        probe = self._ask_each(b"EXISTS", [bytes(KEY_BYTES)], deadline)
        for answer in (*probe, *self._ask_gauges(deadline)):
            if isinstance(answer, RefusedCommand):
                raise self.pool.refusal_error(answer)
            self._checked(answer)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        # A key without an answer is not found. Only where no key has an answer, the call fails.
        answers = self._ask_each(b"EXISTS", keys, Deadline(FIND_SHARE * self._timeout_seconds))
        errors = [error for answer in answers if (error := self._error_of(answer))]
        if errors and len(errors) == len(answers):
            raise errors[0]
        self._finds_cut += bool(errors)
        return [answer == 1 for answer in answers]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        sizes = sizes_of(items)
        asks = [
            PendingCommand(command(b"GET", self._name(item.key)), size, item.pieces)
            for item, size in zip(items, sizes, strict=True)
        ]
        answers = self._ask(asks, Deadline(self._timeout_seconds))
        for item, size, answer in zip(items, sizes, answers, strict=True):
            if isinstance(answer, int) and contract.is_length(answer, size):
                contract.zero_after(item.pieces, answer)
        return [self._get_error(size, answer) for size, answer in zip(sizes, answers, strict=True)]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        end = b"%d" % (contract.START_BYTES - 1)
        asks = [
            PendingCommand(ask)
            for key in keys
            for ask in (
                command(b"GETRANGE", self._name(key), b"0", end),
                command(b"STRLEN", self._name(key)),
            )
        ]
        answers = self._ask(asks, Deadline(self._timeout_seconds))
        return list(map(self._start_of, answers[::2], answers[1::2]))

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        sizes = sizes_of(items)
        asks = [
            PendingCommand(command(b"SET", self._name(item.key), value=item.pieces), size)
            for item, size in zip(items, sizes, strict=True)
            if size <= VALUE_BYTES_MAX
        ]
        answers = iter(self._ask(asks, Deadline(self._timeout_seconds)))
        return [
            self._error_of(next(answers))
            if size <= VALUE_BYTES_MAX
            else contract.FullError(
                f"{self._place} takes no value of {size} bytes", Refusal.TOO_LARGE
            )
            for size in sizes
        ]

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        # A damaged value is not put aside: it would take the memory of sound ones.
        for answer in self._ask_each(b"UNLINK", keys, Deadline(self._timeout_seconds)):
            self._checked(answer)

    def keys(self) -> Iterator[bytes]:
        """Yields every key with our prefix. A key may come twice while others put or remove."""
        pattern = re.sub(rb"[*?\[\]^\\]", rb"\\\g<0>", self._prefix) + b"*"
        cursor = b"0"
        while True:
            ask = PendingCommand(command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"))
            (answer,) = self._ask([ask], Deadline(self._timeout_seconds))
            match self._checked(answer):
                case [bytes() as cursor, list() as names]:
                    for name in names:
                        if isinstance(name, bytes) and (ours := self._ours.fullmatch(name)):
                            yield bytes.fromhex(ours[1].decode())
                case _:
                    raise TierError(f"{self._place} answers SCAN with something else")
            if cursor == b"0":
                return

    def tend(self) -> None:
        """Close connections that were idle for long, and ask how full the server is."""
        self.pool.drop_idle(IDLE_SECONDS_MAX)
        for answer in self._ask_gauges(Deadline(self._timeout_seconds)):
            self._checked(answer)

    def gauges(self) -> Mapping[str, float]:
        """Returns `bytes` and `bytes_max` of the server, `objects` of the database, as of `tend`.

        `finds_cut` is how often `find` did not learn of every object in time.
        """
        return {**self._gauges, "finds_cut": float(self._finds_cut)}

    def close(self) -> None:
        self.pool.close()

    # Commands

    def _ask_gauges(self, deadline: Deadline) -> list[_Answer]:
        """Ask for the values of `gauges`. Returns the answers."""
        asks = [PendingCommand(command(b"INFO", b"memory")), PendingCommand(command(b"DBSIZE"))]
        memory, objects = answers = self._ask(asks, deadline)
        if isinstance(memory, bytes) and isinstance(objects, int):
            info = {name: int(number) for name, number in _MEMORY.findall(memory)}
            gauges: dict[str, float] = {"bytes": info.get(b"used_memory", 0), "objects": objects}
            bound = info.get(b"maxmemory", 0)
            self._gauges = gauges | ({"bytes_max": bound} if bound else {})
        return answers

    def _ask_each(self, verb: bytes, keys: Sequence[bytes], deadline: Deadline) -> list[_Answer]:
        return self._ask([PendingCommand(command(verb, self._name(key))) for key in keys], deadline)

    def _ask(self, asks: Sequence[PendingCommand], deadline: Deadline) -> list[_Answer]:
        """Returns an answer or an error for each command. Never raises.

        Where a connection was closed, the commands without an answer are sent again. Each of them
        changes nothing the second time.
        """
        answers: list[_Answer] = []
        error = TierError("not asked")
        sizes = [ask.value_bytes for ask in asks]
        for _, end in batches(sizes, FLIGHT_BYTES_MAX, FLIGHT_COMMANDS_MAX):
            for _ in range(TRIES):
                pending = asks[len(answers) : end]
                try:
                    with self.pool.connection(deadline) as connection:
                        for ask in pending:
                            connection.send_all(ask.send)
                        for ask in pending:
                            answers.append(connection.reply(ask.into))
                    break
                except (TierError, ConfigError) as failed:
                    error = TierError(str(failed))
                    if not isinstance(failed, LostConnectionError):
                        # The server does not answer, so the other batches are not tried.
                        return answers + [error] * (len(asks) - len(answers))
            answers += [error] * (end - len(answers))
        return answers

    def _get_error(self, size: int, answer: _Answer) -> TierError | None:
        if answer is None:
            return contract.MissingError("no such value")
        if isinstance(answer, RefusedCommand) and answer.code == "WRONGTYPE":
            return contract.DamagedError("it is no string")
        if isinstance(answer, int) and not contract.is_length(answer, size):
            return contract.DamagedError(f"it has {answer} bytes instead of {size}")
        return self._error_of(answer)

    def _start_of(self, start: _Answer, size: _Answer) -> RecordStart | TierError:
        """Returns a record's start, from the answers to GETRANGE and STRLEN."""
        if isinstance(start, bytes) and isinstance(size, int):
            return RecordStart(start, size) if start else contract.MissingError("no such value")
        error = self._get_error(0, start) or self._get_error(0, size)
        return error or TierError(f"{self._place} answers with something else")

    def _error_of(self, answer: _Answer) -> TierError | None:
        if isinstance(answer, RefusedCommand):
            kind = contract.FullError if answer.code == "OOM" else TierError
            what = f"{self._place} refuses ({answer.code})"
            return kind(what, _REFUSALS.get(answer.code))
        return answer if isinstance(answer, TierError) else None

    def _checked(self, answer: _Answer) -> Reply:
        if error := self._error_of(answer):
            raise error
        assert not isinstance(answer, TierError)
        return answer

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()
