"""The contract of a tier below RAM.

A tier keeps records (tiers.record) by key, KEY_BYTES each, and may lose any of them at any time.
The reader of a record checks it, not the tier. Methods may block. They are called by the tier's own
threads, several at once. The daemon's loop calls only `peek`, `has_other_writers` and `gauges`,
which return at once, and of tiers of other packages none. A fault of one item is the TierError of
that item, and the call does not fail as a whole. After a call has returned, the tier writes to none
of its memory. Only a `put` that was given up may still read it for a moment (buckets).

A tier of another package is a plug-in (tiers.factory). Every tier passes the suite in
tiers.conformance. docs/tiers-of-your-own.md has an example.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.core.errors import HybridKVError
from hybridkv.core.refusals import Refusal
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN

START_BYTES = 512
"""Of a record, to know what it is: its header, and the checksums after it of up to 48 parts."""


class TierError(HybridKVError):
    """The tier failed. The breaker counts it."""

    def __init__(self, what: str, refusal: Refusal | None = None) -> None:
        """`refusal` is the reason of storage that answers and takes no record. None = it failed.

        A tier that fails again and again is closed and opened again. One that refuses is not.
        """
        super().__init__(what)
        self.refusal = refusal


class MissingError(TierError):
    """The record is not there, or not any more. That is no failure of the tier."""


class DamagedError(TierError):
    """The record is there and is not what was put. It has another length, for instance."""


class UndecodableError(TierError):
    """The record is there, and this daemon lacks the library or the key that decodes it."""


class FullError(TierError):
    """The tier has no room, and can make none."""


class WriteRequest(NamedTuple):
    """A record that `Tier.put` writes."""

    key: bytes
    pieces: Sequence[memoryview]
    """The record's bytes in order. Each piece starts and ends on a page (SLOT_ALIGN) of memory."""
    parent: bytes = bytes(SHORT_HASH_BYTES)
    """As in the record's header. The record of the parent is evicted after this record."""
    interior: bool = False  # As in the record's header. Interior records are evicted first.


class FindRequest(NamedTuple):
    """A record that `Tier.find_again` looks for."""

    key: bytes
    parent: bytes = bytes(SHORT_HASH_BYTES)
    """As in WriteRequest, where its writer knew the chunk before."""


class ReadRequest(NamedTuple):
    """A record that `Tier.get` reads."""

    key: bytes
    pieces: Sequence[memoryview]
    """Memory for its bytes, aligned as in WriteRequest. A record may be some pages shorter."""


class RecordStart(NamedTuple):
    """What `Tier.read_starts` tells of a record. None = the tier cannot tell."""

    start: bytes  # The first START_BYTES. A record has more.
    size_bytes: int | None = None  # Of the whole record, as the tier has it.
    written_at: float | None = None  # Seconds since the epoch.
    used_at: float | None = None  # When it was written or used last, some minutes early or late.


def first_bytes(pieces: Sequence[memoryview], size: int) -> list[memoryview]:
    """Returns the first `size` bytes of the pieces, or all where they are fewer."""
    first = []
    for piece in pieces:
        if size <= 0:
            break
        first.append(piece[:size])
        size -= len(piece)
    return first


def bytes_after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns the pieces without their first `done` bytes."""
    left = []
    for piece in pieces:
        if done < len(piece):
            left.append(piece[done:] if done > 0 else piece)
        done = max(0, done - len(piece))
    return left


def is_length(size: int, pieces_bytes: int) -> bool:
    """Returns whether a record of `size` bytes may be read into memory of `pieces_bytes`."""
    return 0 < size <= pieces_bytes and not size % SLOT_ALIGN


def zero_after(pieces: Sequence[memoryview], size: int) -> None:
    """Zero the memory after a record of `size` bytes, as `Tier.get` has to."""
    for piece in bytes_after(pieces, size):
        piece[:] = bytes(len(piece))


def _error_of_erasure(start: RecordStart | TierError) -> TierError | None:
    """Returns why a record is not proven to be gone, by what `read_starts` says of it."""
    if isinstance(start, MissingError):
        return None
    return TierError("it is still there") if isinstance(start, RecordStart) else start


class Tier(ABC):
    """A store of records below RAM."""

    name: str  # One word for settings, metrics and sentences, such as "disk".

    @abstractmethod
    def open(self) -> None:
        """Connect, or scan the records. It asks the storage, by what the settings say now.

        So it reads files of settings, and resolves addresses, each time. It is called at the start,
        and after `close`. Raises ConfigError for settings that cannot work, else TierError. `peek`
        works before.
        """

    def peek(self, key: bytes) -> bool | None:
        """Returns whether the record is there, as known without I/O. None = only `find` knows."""
        return None

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """Returns for each key whether its record is there. False is always allowed.

        None = nobody said so in time. It is a miss too, and daemons count it and say why. Keys are
        in the order of prefixes. Raises TierError where nobody answers for any of them.
        """

    def has_other_writers(self) -> bool:
        """Returns whether other daemons may put records, as known without I/O."""
        return True

    def find_again(self, wanted: Sequence[FindRequest]) -> Sequence[bool | None]:
        """Returns what `find` returns, as the storage says now.

        Nothing is answered from what is remembered of records that were not there. Raises TierError
        as `find` does.
        """
        return self.find([request.key for request in wanted])

    def use(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """Count records as used, because RAM hits them. Returns what `find` returns.

        A tier that evicts by use evicts used records last. Raises TierError as `find` does.
        """
        return self.find(keys)

    @abstractmethod
    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        """Read records, prefix first. Returns each item's error, or None.

        The memory after a shorter record is zeroed. A record that is longer than the memory, or
        ends within a page, is damaged. The memory of an item with an error has any bytes.
        """

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        """Returns what the start of each record says, or its error. It counts as no use.

        It may lack records that are there. Then nobody can tell whose they are. A MissingError says
        that no reader finds the record: it is the proof of `erase`.
        """
        return [TierError("this kind of tier reads no starts of records") for _ in keys]

    @abstractmethod
    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        """Publish records, each as a whole or not at all. Returns each item's error, or None.

        That holds for readers in other processes too. A record that is there may be kept.
        """

    @abstractmethod
    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Remove records that are there. `damaged` ones go to quarantine where that is possible."""

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        """Remove records, as somebody asked for their deletion. Returns each item's error, or None.

        None = the storage says that no reader finds the record any more. That it was not there is
        no error. Raises TierError where nobody answers.
        """
        self.discard(keys)
        # `find_again` may say False of a record that nobody could be asked about.
        return [_error_of_erasure(start) for start in self.read_starts(keys)]

    def empty_quarantine(self) -> None:  # noqa: B027  # most kinds put nothing aside
        """Remove all damaged records that were put aside. Raises TierError."""

    @abstractmethod
    def keys(self) -> Iterator[bytes]:
        """Yields the key of every record, in any order."""

    def tend(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Do regular work, each second: find others' records, reconnect. Raises TierError."""

    def gauges(self) -> Mapping[str, float]:
        """Returns `bytes`, `bytes_max` and `objects`, as far as they are known without I/O."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release every resource. Records stay, and `open` may follow.

        Other threads may still be inside a call, which then ends, with an error or without one.
        Until the next `open` a call may fail. Never raises.
        """
