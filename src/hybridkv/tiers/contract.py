"""The contract of a tier below RAM.

A tier keeps records (tiers.record) by key, KEY_BYTES each, and may lose any of them at any time.
It does not check a record; its reader does. Methods may block, and are called by the tier's own
threads, several at once; only `peek` and `gauges` are called by the daemon's loop and return at
once. A fault of one item is the TierError of that item; the call does not fail as a whole.

`tests.tier_suite` has the suite that every tier passes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.core.errors import HybridKVError
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN


class TierError(HybridKVError):
    """The tier failed; the breaker counts it."""


class MissingError(TierError):
    """The record is not there (any more), which is no failure of the tier."""


class DamagedError(TierError):
    """The record is there, and is not what was put: it has another length, for instance."""


class UndecodableError(TierError):
    """The record is there, and this daemon lacks the library or the key that decodes it."""


class FullError(TierError):
    """The tier has no room, and can make none."""


class WriteRequest(NamedTuple):
    """A record to write."""

    key: bytes
    pieces: Sequence[memoryview]
    """The record's bytes, in order; each piece starts and ends on a page (SLOT_ALIGN) of memory."""
    parent: bytes = bytes(SHORT_HASH_BYTES)
    """As in the record's header; the record of the parent is evicted after this one."""
    interior: bool = False  # As in the record's header; interior records are evicted first.


class ReadRequest(NamedTuple):
    """A record to read."""

    key: bytes
    pieces: Sequence[memoryview]
    """Memory for its bytes, aligned as in WriteRequest. A record may be some pages shorter."""


def first_bytes(pieces: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of the pieces, or all where they are fewer."""
    first = []
    for piece in pieces:
        if size <= 0:
            break
        first.append(piece[:size])
        size -= len(piece)
    return first


def bytes_after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """The pieces without their first `done` bytes."""
    left = []
    for piece in pieces:
        if done < len(piece):
            left.append(piece[done:] if done > 0 else piece)
        done = max(0, done - len(piece))
    return left


def is_length(size: int, pieces_bytes: int) -> bool:
    """Whether a record of `size` bytes may be read into memory of `pieces_bytes`."""
    return 0 < size <= pieces_bytes and not size % SLOT_ALIGN


def zero_after(pieces: Sequence[memoryview], size: int) -> None:
    """Zero the memory behind a record of `size` bytes, as `Tier.get` has to."""
    for piece in bytes_after(pieces, size):
        piece[:] = bytes(len(piece))


class Tier(ABC):
    """A store of records below RAM."""

    name: str  # One word for settings, metrics and sentences, such as "disk".

    @abstractmethod
    def open(self) -> None:
        """Connect, or scan what is there, at the start and again after a TierError.

        Raises ConfigError for settings that can never work, else TierError; `peek` always works.
        """

    def peek(self, key: bytes) -> bool | None:
        """Whether the record is there, as known without I/O; None: `find` must be asked."""
        return None

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its record is there; False is always allowed.

        Keys are in the order of prefixes. Raises TierError where nobody answers.
        """

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """Count records as used, which are hit in RAM; for each key whether its record is there.

        What is used goes last where a tier evicts in such an order. Raises TierError as `find`.
        """
        return self.find(keys)

    @abstractmethod
    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        """Read records, prefix first; for each item None, or its error and any bytes.

        The memory behind a shorter record is zeroed. A record that is longer than the memory, or
        ends within a page, is damaged.
        """

    @abstractmethod
    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        """Publish records, each as a whole or not at all; for each item None or its error.

        That holds for readers in other processes too. A record that is there may be kept.
        """

    @abstractmethod
    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Remove records that are there; `damaged` ones are put into quarantine where possible."""

    @abstractmethod
    def keys(self) -> Iterator[bytes]:
        """The key of every record, in any order."""

    def tend(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Do regular work, each second: find others' records, reconnect. Raises TierError."""

    def gauges(self) -> Mapping[str, float]:
        """Metrics: `bytes`, `bytes_max`, `objects`, as far as they are known without I/O."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release every resource; records stay. Other threads may still be inside a call."""
