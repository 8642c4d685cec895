"""The contract of a tier below RAM.

A tier keeps records (storage.record) by key, KEY_BYTES each, and may lose any of them at any time.  It never looks into
a record: whoever reads one proves it.  Its methods may block, and are called by the tier's own threads, several at
once; only `peek` and `gauges` are called by the daemon's loop and return at once.  Whatever goes wrong with one item is
that item's TierError; a call never fails as a whole for what only some of its items suffer.

`hybridkv.testing.tiers` has the suite that every tier passes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.core.errors import HybridKVError
from hybridkv.storage.record import TAG_BYTES


class TierError(HybridKVError):
    """The tier failed; the breaker counts it."""


class MissingError(TierError):
    """It is not there (any more), which is no failure."""


class DamagedError(TierError):
    """It is there, and is not what was put: of another length, for instance."""


class FullError(TierError):
    """There is no room, and none can be made."""


class Putting(NamedTuple):
    """A record on its way down."""

    key: bytes
    pieces: Sequence[memoryview]
    """The record's bytes, in order; each piece starts and ends on a page (SLOT_ALIGN) of this process's memory."""
    parent: bytes = bytes(TAG_BYTES)
    """As in the record's header: what goes before it in the order of eviction is what is behind it."""
    interior: bool = False
    """As in the record's header: goes first."""


class Getting(NamedTuple):
    """A record on its way up."""

    key: bytes
    pieces: Sequence[memoryview]
    """Where its bytes go; together they have the record's size. Aligned as those of Putting."""


class Tier(ABC):
    """A store of records."""

    name: str
    """One word for settings, metrics and sentences: "disk", "valkey" ..."""

    @abstractmethod
    def open(self) -> None:
        """Connect, or scan what is there. Raises ConfigError for settings that can never work, TierError otherwise.

        Called once at the start, before anything else, and again after a TierError. `peek` works at all times.
        """

    @abstractmethod
    def peek(self, key: bytes) -> bool | None:
        """Whether the record is there, as far as is known without asking anybody; None: `find` must be asked."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its record is there; False is always allowed. Raises TierError where nobody answers.

        Keys come in the order of prefixes: a record is of little use without those before it in the list.
        """

    @abstractmethod
    def get(self, items: Sequence[Getting]) -> list[TierError | None]:
        """Read records, prefix first; for each item None or what was wrong. Bytes behind an error may be anything."""

    @abstractmethod
    def put(self, items: Sequence[Putting]) -> list[TierError | None]:
        """Publish records, each as a whole or not at all, also for readers in other processes.

        Where the key is there already the record may be replaced or kept: it is the same object.
        """

    @abstractmethod
    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Remove records, if they are there; damaged ones are put aside for whoever wants to look, where possible."""

    @abstractmethod
    def keys(self) -> Iterator[bytes]:
        """Every key that is there, in any order."""

    def tend(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Called about once a second: see what others have put, reconnect, tidy. Raises TierError."""

    def gauges(self) -> Mapping[str, float]:
        """For metrics: `bytes`, `bytes_max`, `objects` as far as they are known without asking anybody."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; what is there stays. Other threads may still be inside a call."""
