"""Records as the values of a Valkey or Redis server, or of a cluster of them.

::

    valkey://127.0.0.1:6379/0                 also redis://
    valkeys://USER:PASSWORD@cache.example/0   with TLS, also rediss://; ca=FILE: a private authority
    valkey+unix:///run/valkey.sock?db=0
    valkey://10.0.0.1,10.0.0.2:6380/0         the first that answers; a cluster tells of its nodes

The server evicts where its memory ends: `maxmemory` with `maxmemory-policy allkeys-lru` makes a
cache of it. With `noeviction` it refuses puts once it is full.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers import contract
from hybridkv.tiers.contract import ReadRequest, RecordStart, Tier, TierError, WriteRequest
from hybridkv.tiers.remote import FIND_SHARE, KEY_DIGITS, Deadline, sizes_of
from hybridkv.tiers.valkey.access import Access
from hybridkv.tiers.valkey.pool import Answer, PendingCommand
from hybridkv.tiers.valkey.resp import RefusedCommand, Reply, command
from hybridkv.tiers.valkey.servers import Servers, UnservedError, UnservedReadError
from hybridkv.tiers.valkey.slots import Address, slot_of

VALUE_BYTES_MAX = 512 << 20  # The server's default of proto-max-bulk-len.
_REFUSALS: Mapping[str, Refusal] = {
    "OOM": Refusal.MEMORY,
    "READONLY": Refusal.READ_ONLY,
    "NOPERM": Refusal.PERMISSION,
    "MISCONF": Refusal.SERVER,  # It cannot save to its disk, and therefore takes no writes.
    "NOREPLICAS": Refusal.SERVER,
}
"""By the code of an error, the reason of a server that answers and takes no values."""
_MEMORY = re.compile(rb"^(used_memory|maxmemory):(\d{1,20})\r?$", re.MULTILINE)


class ValkeyTier(Tier):
    """Keeps records as values in the memory of servers."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError for settings that can never work."""
        self.name = spec.kind
        access = Access(spec)
        self._place, self._prefix = access.place, access.prefix.encode()
        self._servers = Servers(access)
        self._ours = re.compile(re.escape(self._prefix) + b"(%b)" % KEY_DIGITS.encode())
        self._timeout_seconds = spec.timeout_seconds
        self._gauges: dict[str, float] = {}

    # The contract

    def open(self) -> None:
        """Log in anew and try each command. Raises ConfigError where a server refuses one."""
        deadline = Deadline(self._timeout_seconds)
        self._servers.log_in(deadline)
        # ASKING changes nothing for a slot that stays, and shows whether the user may send it.
        probe = self._pending(b"EXISTS", bytes(KEY_BYTES))._replace(asks=self._servers.is_cluster)
        for answer in (*self._servers.ask_owners([probe], deadline), *self._ask_gauges(deadline)):
            if isinstance(answer, RefusedCommand):
                raise self._servers.permission_error(answer)
            if not isinstance(answer, UnservedError):
                self._checked(answer)

    def find(self, keys: Sequence[bytes]) -> list[bool | None]:
        # Only where no key has an answer, and no other node of a cluster is well, the call fails.
        answers = self._ask_each(b"EXISTS", keys, Deadline(FIND_SHARE * self._timeout_seconds))
        errors = [self._error_of(answer) for answer in answers]
        failed = [error for error in errors if error and not isinstance(error, UnservedError)]
        if failed and all(errors):
            raise failed[0]
        return [
            None if error else answer == 1 for error, answer in zip(errors, answers, strict=True)
        ]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        sizes = sizes_of(items)
        asks = [
            self._pending(b"GET", item.key)._replace(value_bytes=size, into=item.pieces)
            for item, size in zip(items, sizes, strict=True)
        ]
        answers = self._servers.ask_owners(asks, Deadline(self._timeout_seconds))
        for item, size, answer in zip(items, sizes, answers, strict=True):
            if isinstance(answer, int) and contract.is_length(answer, size):
                contract.zero_after(item.pieces, answer)
        errors = map(self._value_error, sizes, answers)
        return [
            UnservedReadError(str(error)) if isinstance(error, UnservedError) else error
            for error in errors
        ]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        end = b"%d" % (contract.START_BYTES - 1)
        asks = [
            ask
            for key in keys
            for ask in (self._pending(b"GETRANGE", key, b"0", end), self._pending(b"STRLEN", key))
        ]
        answers = self._servers.ask_owners(asks, Deadline(self._timeout_seconds))
        return list(map(self._start_of, answers[::2], answers[1::2]))

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        sizes = sizes_of(items)
        asks = [
            self._pending(b"SET", item.key, value=item.pieces)._replace(value_bytes=size)
            for item, size in zip(items, sizes, strict=True)
            if size <= VALUE_BYTES_MAX
        ]
        answers = iter(self._servers.ask_owners(asks, Deadline(self._timeout_seconds)))
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
        """Yields every key with our prefix. A key may come twice while others put or remove.

        Of a cluster, keys of a slot that moves meanwhile may lack.
        """
        error: TierError | None = None
        for address in self._servers.primaries:
            try:
                yield from self._keys_at(address)
            except TierError as failed:
                error = error or failed  # The other nodes still tell of their keys.
        if error is not None:
            raise error

    def _keys_at(self, address: Address) -> Iterator[bytes]:
        """Yields every key with our prefix that one server has."""
        pattern = re.sub(rb"[*?\[\]^\\]", rb"\\\g<0>", self._prefix) + b"*"
        cursor = b"0"
        while True:
            ask = PendingCommand(command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"))
            deadline = Deadline(self._timeout_seconds)
            (answer,) = self._servers.ask_at(address, [ask], deadline)
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
        """Close connections that were idle for long, and ask how full each server is."""
        for answer in self._ask_gauges(Deadline(self._timeout_seconds)):
            if not isinstance(answer, UnservedError):
                self._checked(answer)

    def gauges(self) -> Mapping[str, float]:
        """Returns `bytes` and `bytes_max` of the server, `objects` of the database, as of `tend`.

        Of a cluster they are sums over its primaries. There is a bound if each of them has one.
        """
        return self._gauges

    def close(self) -> None:
        self._servers.close()

    # Commands

    def _ask_gauges(self, deadline: Deadline) -> list[Answer]:
        """Ask each server for the values of `gauges`. Returns the answers."""
        asks = [PendingCommand(command(b"INFO", b"memory")), PendingCommand(command(b"DBSIZE"))]
        by_server = self._servers.ask_each(asks, deadline)
        gauges, bounds = {"bytes": 0.0, "objects": 0.0}, []
        for memory, objects in by_server:
            if isinstance(memory, bytes) and isinstance(objects, int):
                info = {name: int(number) for name, number in _MEMORY.findall(memory)}
                gauges["bytes"] += info.get(b"used_memory", 0)
                gauges["objects"] += objects
                bounds.append(info.get(b"maxmemory", 0))
        if bounds:
            self._gauges = gauges | ({"bytes_max": float(sum(bounds))} if all(bounds) else {})
        return [answer for answers in by_server for answer in answers]

    def _ask_each(self, verb: bytes, keys: Sequence[bytes], deadline: Deadline) -> list[Answer]:
        return self._servers.ask_owners([self._pending(verb, key) for key in keys], deadline)

    def _pending(
        self, verb: bytes, key: bytes, *rest: bytes, value: Sequence[memoryview] | None = None
    ) -> PendingCommand:
        """Returns a command on the value of `key`."""
        name = self._prefix + key.hex().encode()
        return PendingCommand(command(verb, name, *rest, value=value), slot_of(name))

    def _value_error(self, size: int, answer: Answer) -> TierError | None:
        """Returns the error in the answer to a command that reads a value."""
        if answer is None:
            return contract.MissingError("no such value")
        if isinstance(answer, RefusedCommand) and answer.code == "WRONGTYPE":
            return contract.DamagedError("it is no string")
        if isinstance(answer, int) and not contract.is_length(answer, size):
            return contract.DamagedError(f"it has {answer} bytes instead of {size}")
        return self._error_of(answer)

    def _start_of(self, start: Answer, size: Answer) -> RecordStart | TierError:
        """Returns a record's start, from the answers to GETRANGE and STRLEN."""
        if isinstance(start, bytes) and isinstance(size, int):
            return RecordStart(start, size) if start else contract.MissingError("no such value")
        error = self._value_error(0, start) or self._value_error(0, size)
        return error or TierError(f"{self._place} answers with something else")

    def _error_of(self, answer: Answer) -> TierError | None:
        if isinstance(answer, RefusedCommand):
            kind = contract.FullError if answer.code == "OOM" else TierError
            what = f"{self._place} refuses ({answer.code})"
            return kind(what, _REFUSALS.get(answer.code))
        return answer if isinstance(answer, TierError) else None

    def _checked(self, answer: Answer) -> Reply:
        if error := self._error_of(answer):
            raise error
        assert not isinstance(answer, TierError)
        return answer
