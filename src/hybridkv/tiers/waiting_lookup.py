"""One lookup that waits for tiers: its states, the events that change them, and its next action.

TRANSITIONS is the only way from one state to the next::

                         +-----+
                         |     | planned
                         |     v
    FINDING --planned--> READING --completed--> ENDED
       |                    |
       +------ overdue, cancelled ------------> ENDED

Nothing here pins, reads or asks: `next_actions` decides from facts, and `tiers.promotion` acts.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import islice
from typing import NamedTuple

from hybridkv.core.coverage import PromptHit, loadable_hits
from hybridkv.store.index import Slot
from hybridkv.tiers.health import JOB_ITEMS_MAX, TierState
from hybridkv.tiers.load_or_compute import Shortfall, ShortfallKind, choose_load
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


class Ask(NamedTuple):
    """Ask these tiers which of `search.asked` they have, each when it is the lookup's turn."""

    tiers: Sequence[TierState]


class Hold(NamedTuple):
    """Pin objects until the lookup is answered, and then let go of objects that were pinned."""

    slots: Sequence[Slot]
    unpinned: Sequence[Slot] = ()


class Join(NamedTuple):
    """Wait for objects that are being read for other lookups."""

    needs: Sequence[NeededObject]


class Read(NamedTuple):
    """Read the next objects from a tier, as many as there are slots for."""

    tier: TierState
    needs: Sequence[NeededObject]


LookupAction = Ask | Hold | Join | Read


class ReadStep(Enum):
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

    def step(self) -> ReadStep:
        """Returns what to do about the object."""
        if self.is_in_ram:
            return ReadStep.HOLD
        if self.is_tier_hung or not (self.is_being_read or self.may_read_tier):
            return ReadStep.GIVE_UP
        if self.is_being_read:
            return ReadStep.JOIN
        return ReadStep.WAIT if self.is_tier_busy else ReadStep.START


class TierFacts(NamedTuple):
    """The facts about a tier that decide whether it is asked and read."""

    is_readable: bool
    is_hung: bool
    has_thread: bool  # One more read may run.
    job_bytes: int  # The most bytes that one read should move.
    reading_bytes: int  # Bytes of RAM that are being read into from it.


class LookupFacts(NamedTuple):
    """The facts outside of a lookup that decide what is done for it next."""

    now: float
    tiers: Mapping[TierState, TierFacts]  # Fastest first.
    reads: Mapping[bytes, "ObjectRead"]  # The objects that are being read, by key.
    room_bytes: int  # Bytes of RAM that a hit may take.
    share_bytes: int  # The most bytes of RAM that are being read into from one tier.


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
    is_cramped: bool = False  # Whether the next object has no slot, and none is on its way.
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
        """True while it is not decided yet what is read."""
        return self.state is LookupState.FINDING

    @property
    def is_ended(self) -> bool:
        """True once it waits no more."""
        return self.state is LookupState.ENDED

    @property
    def is_complete(self) -> bool:
        """True once nothing more can come, so that it ends."""
        return not (self.is_finding or self.needs or self.reads)

    def transition(self, event: LookupEvent) -> bool:
        """Take the next state. Returns False where the table has none for the event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

    def next_actions(self, facts: LookupFacts) -> list[LookupAction]:
        """Returns what is to be done now, in this order. Empty = it waits for more, or is complete.

        The caller does it, and asks again with the facts that hold then.
        """
        if self.finds:
            return []
        if self.is_finding:
            actions = self._next_round(facts)
            return actions or self._plan(facts.room_bytes, facts.now)
        if self.is_cramped:
            # A shorter hit has room in that of what is held. What only the longer one needs may be
            # evicted from now on.
            self.is_cramped = False
            return self._plan(sum(slot.size_bytes for slot in set(self.held)), facts.now)
        return self._next_reads(facts)

    def _next_round(self, facts: LookupFacts) -> list[LookupAction]:
        """Begin the next round. Returns whom to ask, and in the first round what to pin."""
        is_first = not self.search.is_begun
        tiers = [tier for tier, known in facts.tiers.items() if known.is_readable]
        if not self.search.next_round(tiers):
            return []
        if not tiers:
            self.shortfalls.append(Shortfall(ShortfallKind.TIERS_AWAY, {}))
            return []
        if not is_first:
            return [Ask(tiers)]
        self.held = self.search.resident_slots(())
        return [Hold(self.held), Ask(tiers)]

    def _plan(self, room_bytes: int, now: float) -> list[LookupAction]:
        """Decide which objects are read into `room_bytes`, and keep why they are not more.

        Returns to pin what RAM has of the hits that are read and of the hit that RAM had.
        """
        if self.is_finding:
            self.planned_at = now
        self.state = TRANSITIONS[self.state, LookupEvent.PLANNED]
        objects = self.search.present_objects(now)
        choice = choose_load(
            loadable_hits(objects, room_bytes),
            resident=objects.resident,
            longest=objects.longest,
            token_seconds=self.request.token_seconds,
            patience_seconds=self.request.deadline - now,
        )
        self.shortfalls += choice.shortfalls
        hits, self.hits = self.hits, choice.hits
        # The same hit again has no room although it seems to fit, because objects without a slot
        # counted. Planning it once more would never end.
        is_new = self.hits != hits
        self.needs = deque(self.search.needed_objects(self.hits) if is_new else ())
        unpinned, self.held = self.held, self.search.resident_slots(self.hits)
        return [Hold(self.held, unpinned)]

    def _next_reads(self, facts: LookupFacts) -> list[LookupAction]:
        """Go through what is needed, prefix first, as far as the first object to read."""
        slots: list[Slot] = []
        joined: list[NeededObject] = []
        read: list[LookupAction] = []
        while self.needs and not read:
            need = self.needs[0]
            slot, running = self.request.slot_of(need.place), facts.reads.get(need.key)
            tier = need.tier if running is None else running.tier
            known = facts.tiers[tier]
            reading_bytes = known.reading_bytes + need.record.size_bytes
            is_share_used = known.reading_bytes > 0 and reading_bytes > facts.share_bytes
            read_facts = ReadFacts(
                is_in_ram=slot is not None,
                is_being_read=running is not None,
                is_tier_hung=known.is_hung,
                may_read_tier=known.is_readable,
                is_tier_busy=is_share_used or not known.has_thread,
            )
            match read_facts.step():
                case ReadStep.HOLD:
                    assert slot is not None
                    slots.append(slot)
                    self.needs.popleft()
                case ReadStep.JOIN:
                    joined.append(self.needs.popleft())
                case ReadStep.START:
                    read.append(Read(tier, self._next_job(tier, facts)))
                case ReadStep.WAIT:
                    break
                case ReadStep.GIVE_UP:
                    self.shortfalls.append(Shortfall(ShortfallKind.SILENT, {"tier": tier.name}))
                    self.needs.clear()
        self.held += slots
        self.reads += len(joined)
        pinned: list[LookupAction] = [Hold(slots)] if slots else []
        return [*pinned, *([Join(joined)] if joined else []), *read]

    def _next_job(self, tier: TierState, facts: LookupFacts) -> list[NeededObject]:
        """Returns the next few objects that are read from the tier at once."""
        known = facts.tiers[tier]
        bytes_max = min(known.job_bytes, facts.share_bytes - known.reading_bytes)
        job: list[NeededObject] = []
        job_bytes = 0
        for need in islice(self.needs, JOB_ITEMS_MAX):
            job_bytes += need.record.size_bytes
            is_enough = job_bytes > bytes_max or need.key in facts.reads
            if need.tier is not tier or (job and is_enough):
                break
            job.append(need)
        return job


class ReadWaiter(NamedTuple):
    """A lookup that waits for a read, and the object as it needs it."""

    lookup: WaitingLookup
    need: NeededObject


@dataclass(eq=False)
class ObjectRead:
    """An object that is being read."""

    tier: TierState
    slot: Slot
    waiters: list[ReadWaiter]  # The first one began the read.
