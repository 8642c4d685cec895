"""Lookups that wait for tiers: what was asked, what is known by now, and why no more was read."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.lookup_states import OVER, TRANSITIONS, LookupEvent, LookupState
from hybridkv.tiers.record import RecordName
from hybridkv.tiers.state import TierState

ObjectPlace = tuple[int, int]
"""(group index, chunk) of an object of a prompt."""


class ShortfallKind(Enum):
    """Why a lookup got less than the tiers have: a metric, its label, and a sentence for people."""

    CROWDED = "promotions_cut", "crowded", "too many lookups wait for tiers"
    TIERS_AWAY = "promotions_cut", "tiers_away", "no tier can be asked at the moment"
    SILENT = "promotions_cut", "tiers_away", "{tier} does not answer"
    SLOWER = (
        "promotions_cut",
        "slower",
        "reading {tokens} tokens would take {read_seconds:.2g} s, "
        "computing them {compute_seconds:.2g} s",
    )
    NO_ROOM = "promotions_cut", "no_room", "RAM has no room for it"
    FAILED = "promotions_cut", "failed", "{tier}: {error}"
    NOT_FOUND_IN_TIME = "deadlines_missed", "", "no tier had a thread to look for it in time"
    NOT_READ_IN_TIME = "deadlines_missed", "", "it was not read in time"

    def __init__(self, metric: str, label: str, sentence: str) -> None:
        self.counter = metric, label
        self.sentence = sentence


class Shortfall(NamedTuple):
    """Why a lookup got less than the tiers have, with the facts of its sentence."""

    kind: ShortfallKind
    tier: str = ""
    error: str = ""
    tokens: int = 0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0

    def sentence(self) -> str:
        """The reason for people."""
        return self.kind.sentence.format(**self._asdict())


class NeededObject(NamedTuple):
    """An object that a waiting lookup wants, and the tier that has it."""

    tier: TierState
    group_index: int
    chunk: int


class LookupRequest(NamedTuple):
    """What an engine asked for. Times are seconds of the loop's clock."""

    connection_id: int
    id: int
    lease: int
    namespace: Namespace
    geometry: Geometry
    hashes: bytes
    """The hashes of the chunks, HASH_BYTES each, of the longest prefix that may be hit."""
    asked_at: float
    deadline: float
    tokens_per_second: int
    """How fast the engine computes; 0 = not known."""
    resident: int
    """The hit in chunks that RAM alone had at `asked_at`."""

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, chunk: int) -> bytes:
        """The hash of one chunk; empty before the first one."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES] if chunk >= 0 else b""

    def name_of(self, group_index: int, chunk: int) -> RecordName:
        """The name of one object in tiers."""
        namespace = self.namespace
        return RecordName(namespace.identity, namespace.gids[group_index], self.hash_of(chunk))

    def resident_slots(self, chunks: int) -> Iterator[Slot]:
        """The objects of a hit of `chunks` chunks that RAM has."""
        for index, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, chunks):
                slot = self.namespace.get(self.hash_of(chunk), index)
                if slot is not None:
                    yield slot


@dataclass(eq=False)
class WaitingLookup:
    """A lookup that is not answered yet, with what is known by now."""

    request: LookupRequest
    state: LookupState = LookupState.FINDING
    target: int = 0
    """The hit in chunks that the lookup may become, as far as is known."""
    located: dict[ObjectPlace, TierState] = field(default_factory=dict)
    """The tier that has an object."""
    unknown: dict[ObjectPlace, None] = field(default_factory=dict)
    """Objects of which some tier must be asked whether it has them."""
    finding: int = 0
    """Tiers that are asked, or will be when it is the lookup's turn."""
    todo: deque[NeededObject] = field(default_factory=deque)
    reading: int = 0
    """Objects that are being read."""
    held: list[Slot] = field(default_factory=list)
    """Objects that are pinned until the lookup is answered, once for each time."""
    started_at: float = 0.0
    """When the plan was made."""
    begun_bytes: Counter[TierState] = field(default_factory=Counter)
    """Bytes of the objects whose read was started, and of those that came."""
    read_bytes: Counter[TierState] = field(default_factory=Counter)
    origins: dict[int, str] = field(default_factory=dict)
    """The name of the tier that gave (a part of) a chunk."""
    shortfall: Shortfall | None = None

    @property
    def is_over(self) -> bool:
        """Whether the lookup does not wait any more."""
        return self.state in OVER

    def advance(self, event: LookupEvent) -> None:
        """Take the step of the table for `event`."""
        self.state = TRANSITIONS.get((self.state, event), self.state)
