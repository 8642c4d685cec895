"""One lookup that waits for tiers: its states, the events that change them, and its next action.

TRANSITIONS is the only way from one state to the next::

                         +-----+
                         |     | planned
                         |     v
    FINDING --planned--> READING --completed--> ENDED
       |                    |
       +------ overdue, cancelled ------------> ENDED

Nothing here pins, reads or asks: `tiers.promotion` brings the facts, and does the actions.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from hybridkv.core.coverage import PromptHit, loadable_hits
from hybridkv.store.index import Slot
from hybridkv.tiers.health import TierState
from hybridkv.tiers.load_or_compute import Shortfall, choose_load
from hybridkv.tiers.object_search import LookupRequest, NeededObject, ObjectSearch


class LookupState(StrEnum):
    """The states of a lookup that waits."""

    FINDING = "finding"  # Tiers are asked which objects they have, in rounds.
    READING = "reading"  # It is decided what is read, and the objects are being read.
    ENDED = "ended"  # It waits no more: it is answered, or nobody wants the answer.


class LookupEvent(StrEnum):
    """The events of a lookup that waits."""

    FIND_DONE = "find_done"  # A tier has said which objects it has.
    PLANNED = "planned"  # There is nothing more to find, and it is decided what is read.
    READ_DONE = "read_done"  # A read of an object has ended, well or not.
    COMPLETED = "completed"  # Nothing more can come.
    OVERDUE = "overdue"  # The deadline has come.
    CANCELLED = "cancelled"  # Nobody wants the answer any more.


TRANSITIONS: dict[tuple[LookupState, LookupEvent], LookupState] = {
    (LookupState.FINDING, LookupEvent.FIND_DONE): LookupState.FINDING,
    (LookupState.FINDING, LookupEvent.PLANNED): LookupState.READING,
    (LookupState.FINDING, LookupEvent.OVERDUE): LookupState.ENDED,
    (LookupState.FINDING, LookupEvent.CANCELLED): LookupState.ENDED,
    (LookupState.READING, LookupEvent.READ_DONE): LookupState.READING,
    # There was no room for what was decided.
    (LookupState.READING, LookupEvent.PLANNED): LookupState.READING,
    (LookupState.READING, LookupEvent.COMPLETED): LookupState.ENDED,
    (LookupState.READING, LookupEvent.OVERDUE): LookupState.ENDED,
    (LookupState.READING, LookupEvent.CANCELLED): LookupState.ENDED,
    # A thread of a tier may come back long after the lookup has ended.
    (LookupState.ENDED, LookupEvent.FIND_DONE): LookupState.ENDED,
    (LookupState.ENDED, LookupEvent.READ_DONE): LookupState.ENDED,
}
"""The next state by (state, event). Any other event is counted, and changes no state."""


class ReadAction(Enum):
    """What to do about the next object that a lookup needs."""

    HOLD = "hold"  # It is in RAM by now: pin it.
    JOIN = "join"  # It is being read for another lookup: wait for it too.
    START = "start"  # Begin to read it.
    WAIT = "wait"  # Its tier is busy: come again later.
    GIVE_UP = "give_up"  # Its tier is silent: read nothing more.


class ReadFacts(NamedTuple):
    """The facts about the next object that a lookup needs, and about the tier that has it.

    While the object is being read, that tier is the one that reads it.
    """

    is_in_ram: bool
    is_being_read: bool
    is_tier_hung: bool
    may_read_tier: bool
    is_tier_busy: bool

    def action(self) -> ReadAction:
        """Returns what to do about the object."""
        if self.is_in_ram:
            return ReadAction.HOLD
        if self.is_tier_hung or not (self.is_being_read or self.may_read_tier):
            return ReadAction.GIVE_UP
        if self.is_being_read:
            return ReadAction.JOIN
        return ReadAction.WAIT if self.is_tier_busy else ReadAction.START


@dataclass(eq=False)
class WaitingLookup:
    """A lookup that is not answered yet."""

    request: LookupRequest
    search: ObjectSearch  # What is known of its objects.
    state: LookupState = LookupState.FINDING
    finds: int = 0  # Tiers that are being asked, or will be when it is the lookup's turn.
    hits: Sequence[PromptHit] = ()
    """The hits for which is read, ascending: the target, and one that comes earlier."""
    planned_at: float = 0.0  # When it was decided what is read.
    needs: deque[NeededObject] = field(default_factory=deque)  # Objects whose read is not begun.
    reads: int = 0  # Objects that are being read.
    held: list[Slot] = field(default_factory=list)
    """Objects that are pinned until the lookup is answered, each as often as it is pinned."""
    begun_bytes: Counter[TierState] = field(default_factory=Counter)
    """By tier, the bytes of objects whose read was begun for this lookup."""
    read_bytes: Counter[TierState] = field(default_factory=Counter)
    """By tier, the bytes of objects that came."""
    origins: dict[int, str] = field(default_factory=dict)
    """By chunk, the name of the tier from which it, or a part of it, came."""
    shortfalls: list[Shortfall] = field(default_factory=list)
    """Why it gets less than the tiers have, in the order of time."""

    @property
    def why(self) -> str:
        """The last reason why it gets less than the tiers have, for people. Empty = it does not."""
        return self.shortfalls[-1].sentence if self.shortfalls else ""

    @property
    def target_chunks(self) -> int:
        """The chunks of the hit that it becomes where all reads succeed, as far as is known."""
        return self.hits[-1].chunks if self.hits else self.request.chunks

    @property
    def is_finding(self) -> bool:
        """Whether it is not decided yet what is read."""
        return self.state is LookupState.FINDING

    @property
    def is_ended(self) -> bool:
        """Whether it waits no more."""
        return self.state is LookupState.ENDED

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can come, so that it ends."""
        return not (self.is_finding or self.needs or self.reads)

    def transition(self, event: LookupEvent) -> bool:
        """Take the next state. Returns False where the table has none for the event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

    def plan_reads(self, room_bytes: int, now: float) -> list[Slot]:
        """Decide which objects are read into `room_bytes`, and keep why they are not more.

        Returns the objects in RAM of the hits that are read, and of the hit that RAM had.
        """
        objects = self.search.present_objects(now)
        loadable = loadable_hits(objects, room_bytes)
        choice = choose_load(
            loadable,
            resident=objects.resident,
            longest=objects.longest,
            token_seconds=self.request.token_seconds,
            patience_seconds=self.request.deadline - now,
        )
        self.hits = choice.hits
        self.needs = deque(self.search.needed_objects(choice.hits))
        self.shortfalls += choice.shortfalls
        return self.search.resident_slots(self.hits)
