"""Promotion: lookups wait while tiers below give what RAM does not have.

A lookup that waits is FINDING, then READING, and ends as soon as nothing more can come, at its
deadline at the latest (tiers.waiting_lookup has the table). The daemon then answers it from RAM::

    FINDING   tiers that cannot say at once what they have are asked, of long prompts in rounds
    READING   objects are read, prefix first, into slots that become objects like any other

In between it is decided up to which boundary reading is worth it (tiers.load_or_compute). Where
there is no room for what was decided, it is decided once more, for a shorter hit.

A lookup decides from facts what is to be done next, and it is done here: `tick` goes on with all
lookups, and returns those that ended. From its first step on a lookup pins the hit that RAM has
already, and then the objects that come (`held`), until the daemon has answered it and unpins the
slots: waiting costs no hit.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.store.index import NewObject, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import DamagedError, TierError
from hybridkv.tiers.health import JOB_ITEMS_MAX, TierState
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob
from hybridkv.tiers.load_or_compute import Shortfall, ShortfallKind
from hybridkv.tiers.object_search import LookupKey, ObjectPlace
from hybridkv.tiers.record import Record
from hybridkv.tiers.waiting_lookup import (
    Ask,
    Hold,
    Join,
    LookupAction,
    LookupEvent,
    LookupFacts,
    ObjectRead,
    Read,
    ReadWaiter,
    TierFacts,
    WaitingLookup,
)

WAITING_MAX = 1024  # Lookups that wait at the same time. More are answered from RAM.
READING_SHARE = 8  # At most 1/8 of the arena is being read into from one tier.
DAMAGED_MAX = 1024
"""Damaged objects of one tier that wait for quarantine. More stay until they are read again."""

MetricLabel = tuple[str, str]  # (metric, label), as the daemon's view has all labelled counters.


class TierQuestion(NamedTuple):
    """A FIND job: what a tier is asked for one lookup."""

    lookup: WaitingLookup
    places: list[ObjectPlace]  # In the order of the job's items.


class ReadResult(NamedTuple):
    """The end of an object's read: its slot, its error, or neither where RAM does not keep it."""

    tier: TierState
    slot: Slot | None
    error: TierError | None


class Promotion:
    """All lookups that wait, and all reads and questions for them."""

    def __init__(self, store: Store, tiers: Sequence[TierState]) -> None:
        """`tiers` are those below RAM, fastest first."""
        self._store = store
        self._tiers = tiers
        self.lookups: dict[LookupKey, WaitingLookup] = {}
        self.reads: dict[bytes, ObjectRead] = {}  # By the object's key.
        self.questions: dict[TierJob, TierQuestion] = {}
        self.turns: dict[TierState, dict[WaitingLookup, None]] = {tier: {} for tier in tiers}
        """By tier, the lookups about which it is asked once it has a thread, in order."""
        self.damaged = {tier: deque[JobItem]() for tier in tiers}
        """By tier, the records that wait for quarantine."""
        self.reading_bytes: Counter[TierState] = Counter()  # Bytes of the slots in `reads`.
        self.counters: Counter[MetricLabel] = Counter()
        """Lookups that fell short, by reason, and events that no state expects."""

    def __len__(self) -> int:
        return len(self.lookups)

    def begin(self, lookup: WaitingLookup, now: float) -> bool:
        """Take over a lookup. Returns whether it waits. If not, `lookup.why` may have the reason.

        In either case the daemon answers the lookup, and then unpins what it held.
        """
        is_readable = any(tier.may_read(now) for tier in self._tiers)
        if not is_readable or len(self.lookups) >= WAITING_MAX:
            kind = ShortfallKind.CROWDED if is_readable else ShortfallKind.TIERS_AWAY
            lookup.shortfalls.append(Shortfall(kind, {}))
            self._count_shortfalls(lookup)
            return False
        self._step(lookup, self._facts(now))
        if lookup.is_complete:
            self._advance(lookup, LookupEvent.COMPLETED)
            self._count_shortfalls(lookup)
            return False
        self.lookups[lookup.request.key] = lookup
        return True

    def is_waiting(self, connection_id: int, lease: int) -> bool:
        """Returns whether the lookup with that lease waits."""
        return LookupKey(connection_id, lease) in self.lookups

    def cancel(self, connection_id: int, lease: int | None = None) -> list[WaitingLookup]:
        """Forget one lookup, or all of a connection, because nobody wants the answer any more.

        Returns the lookups that waited.
        """
        cancelled: list[WaitingLookup] = []
        keys = list(self.lookups) if lease is None else [LookupKey(connection_id, lease)]
        for key in keys:
            lookup = self.lookups.get(key)
            if lookup is not None and key.connection_id == connection_id:
                self._leave(lookup, LookupEvent.CANCELLED)
                self._store.unpin(lookup.held)
                cancelled.append(lookup)
        return cancelled

    def on_find_done(self, job: TierJob, outcome: JobOutcome) -> None:
        """A tier has said which of the objects that it was asked about it has."""
        lookup, places = self.questions.pop(job)
        lookup.finds -= 1
        self._advance(lookup, LookupEvent.FIND_DONE)
        tier = self._tiers[job.tier]
        if outcome.error is not None:
            facts = {"tier": tier.name, "error": str(outcome.error)}
            lookup.shortfalls.append(Shortfall(ShortfallKind.FAILED, facts))
        for place, is_there in zip(places, outcome.found, strict=False):
            if is_there:
                lookup.search.located.setdefault(place, tier)

    def on_read_done(self, job: TierJob, outcome: JobOutcome, now: float) -> list[Slot]:
        """A tier has read objects, or failed to. Returns the new objects of the index."""
        tier = self._tiers[job.tier]
        waiting: set[WaitingLookup] = set()
        stored: list[Slot] = []
        for at, item in enumerate(job.items):
            read = self.reads.pop(item.key)
            self.reading_bytes[tier] -= read.slot.size_bytes
            error, slot = outcome.error or outcome.errors[at], None
            if error is None:
                tier.suspects.discard(item.key)
                slot = self._enter(read, outcome.tenants[at])
                if slot is read.slot:
                    stored.append(slot)
            else:
                self._store.free_slot(read.slot)
                if isinstance(error, DamagedError):
                    self._on_damaged(tier, item, read.waiters)
            result = ReadResult(tier, slot, error)
            for waiter in read.waiters:
                waiting.add(waiter.lookup)
                self._on_object_read(waiter, result, now)
        if all(lookup.is_ended for lookup in waiting) and outcome.error is None:
            # It comes too late for any lookup, but now the tier's speed is known.
            tier.speed = tier.speed.measured(job.size_bytes, now - job.submitted_at, now)
        return stored

    def tick(self, now: float) -> list[WaitingLookup]:
        """Go on where an object came, or there is room or a thread. Returns the ended lookups."""
        ended = []
        for lookup in list(self.lookups.values()):
            is_complete = lookup.is_complete
            if lookup.request.deadline <= now and not is_complete:
                kind = ShortfallKind.NOT_READ_IN_TIME
                if any(lookup in turns for turns in self.turns.values()):
                    kind = ShortfallKind.NOT_FOUND_IN_TIME
                lookup.shortfalls.append(Shortfall(kind, {}))
                ended.append(self._end(lookup, LookupEvent.OVERDUE, now))
        for tier in self._tiers:
            self._take_turns(tier, now)
            self._discard_damaged(tier, now)
        facts = self._facts(now)
        for lookup in list(self.lookups.values()):
            facts = self._step(lookup, facts)
            if lookup.is_complete:
                ended.append(self._end(lookup, LookupEvent.COMPLETED, now))
        return ended

    def wakes_at(self) -> float:
        """Returns when the next lookup is overdue."""
        deadlines = (lookup.request.deadline for lookup in self.lookups.values())
        return min(deadlines, default=float("inf"))

    # Actions

    def _step(self, lookup: WaitingLookup, facts: LookupFacts) -> LookupFacts:
        """Do what the lookup decides, until it waits for more or is complete.

        Returns the facts as they are afterwards.
        """
        is_going_on = True
        while is_going_on and (actions := lookup.next_actions(facts)):
            for action in actions:
                is_going_on = self._perform(lookup, action, facts.now)
            facts = self._facts(facts.now)
        return facts

    def _facts(self, now: float) -> LookupFacts:
        """Returns what lookups need to know of RAM, tiers and reads."""
        share_bytes = len(self._store) // READING_SHARE
        # Slots that are being read into become objects, of any prompt.
        reading_bytes = sum(self.reading_bytes.values())
        room_bytes = len(self._store) - self._store.writing_bytes + reading_bytes
        tiers = {
            tier: TierFacts(
                is_readable=tier.may_read(now),
                is_hung=tier.is_hung,
                has_thread=tier.has_thread(JobKind.READ),
                job_bytes=tier.job_bytes(JobKind.READ, now),
                reading_bytes=self.reading_bytes[tier],
            )
            for tier in self._tiers
        }
        return LookupFacts(now, tiers, self.reads, room_bytes, share_bytes)

    def _perform(self, lookup: WaitingLookup, action: LookupAction, now: float) -> bool:
        """Do one action. Returns False where a read has no slot and one may come later."""
        match action:
            case Ask(tiers):
                for tier in tiers:
                    self.turns[tier][lookup] = None
                    lookup.finds += 1
                    self._take_turns(tier, now)
            case Hold(slots, unpinned):
                self._store.hold(slots)
                self._store.unpin(unpinned)
            case Join(needs):
                for need in needs:
                    self.reads[need.key].waiters.append(ReadWaiter(lookup, need))
            case Read(tier, needs):
                items: list[JobItem] = []
                for need in needs:
                    record = need.record
                    slot = next(iter(self._store.grant(record.shape, 1)), None)
                    if slot is None:
                        break
                    self.reads[need.key] = ObjectRead(tier, slot, [ReadWaiter(lookup, need)])
                    items.append(JobItem(record._replace(seed=slot.generation), slot))
                    self.reading_bytes[tier] += record.size_bytes
                    lookup.begun_bytes[tier] += record.size_bytes
                    lookup.reads += 1
                    lookup.needs.popleft()
                if items:
                    tier.submit_job(TierJob(JobKind.READ, tier.number, items), now)
                    return True
                # A slot may come, or else a shorter hit has room.
                lookup.is_cramped = not (self._store.is_growing or lookup.reads)
                return lookup.is_cramped
        return True

    # Finding

    def _take_turns(self, tier: TierState, now: float) -> None:
        """Ask the tier about lookups in turn while it has threads. Give up all if it is ill."""
        turns = self.turns[tier]
        while turns and (tier.has_thread(JobKind.FIND) or not tier.may_read(now)):
            lookup = next(iter(turns))
            del turns[lookup]
            lookup.finds -= 1
            if not tier.may_read(now):
                lookup.shortfalls.append(Shortfall(ShortfallKind.SILENT, {"tier": tier.name}))
                continue
            items: dict[ObjectPlace, JobItem] = {}
            for place in lookup.search.asked:
                name = lookup.request.name_of(place)
                is_there = tier.peek(name.key)
                if is_there:
                    lookup.search.located.setdefault(place, tier)
                elif is_there is None:
                    items[place] = JobItem(Record(name, 0, 0, 0))
            if items:
                job = TierJob(JobKind.FIND, tier.number, list(items.values()))
                self.questions[job] = TierQuestion(lookup, list(items))
                lookup.finds += 1
                tier.submit_job(job, now)

    # Reading

    def _enter(self, read: ObjectRead, tenant: int) -> Slot | None:
        """Make an object of the slot that was read into. Returns the slot that has the object."""
        (lookup, need), slot = read.waiters[0], read.slot
        request, place = lookup.request, need.place
        if not request.namespace.is_current:
            self._store.free_slot(slot)
            return None
        chunk_hash = need.record.name.chunk_hash
        parent = request.hash_of(request.chunk_of(place.position) - 1)
        new = NewObject(place.group_index, chunk_hash, parent, tenant=tenant)
        if not self._store.commit(slot, request.namespace, new):
            return request.slot_of(place)
        slot.in_tiers |= read.tier.bit
        return slot

    def _on_object_read(self, waiter: ReadWaiter, result: ReadResult, now: float) -> None:
        """An object that a lookup waits for has been read, or not."""
        lookup, need = waiter
        lookup.reads -= 1
        self._advance(lookup, LookupEvent.READ_DONE)
        if lookup.is_ended:
            return
        tier, slot, error = result
        if slot is not None:
            self._store.hold((slot,))
            lookup.held.append(slot)
            lookup.read_bytes[tier] += slot.size_bytes
            lookup.origins.setdefault(lookup.request.chunk_of(need.place.position), tier.name)
            return
        # A faster tier did not have it when the object was located.
        slower = self._tiers[tier.number + 1 :] if error is not None else ()
        for next_tier in slower:
            if next_tier.may_read(now) and next_tier.peek(need.record.name.key):
                lookup.needs.appendleft(need._replace(tier=next_tier))
                return
        lookup.needs.clear()
        facts = {"tier": tier.name, "error": str(error or "no room")}
        lookup.shortfalls.append(Shortfall(ShortfallKind.FAILED, facts))

    def _on_damaged(self, tier: TierState, item: JobItem, waiters: Sequence[ReadWaiter]) -> None:
        """A record is damaged: put it into quarantine, and replace those that were to be read next.

        Damage comes in regions, and each lookup ends with the first damaged record that it finds.
        """
        damaged = self.damaged[tier]
        if len(damaged) < DAMAGED_MAX:
            damaged.append(item._replace(slot=None))
        else:
            tier.counters["damage_left"] += 1
        tier.suspect((item.key,))
        for lookup, _ in waiters:
            tier.suspect(need.record.name.key for need in lookup.needs if need.tier is tier)

    def _discard_damaged(self, tier: TierState, now: float) -> None:
        """Put damaged records into quarantine where there is a thread for it."""
        damaged = self.damaged[tier]
        if damaged and tier.has_thread(JobKind.DISCARD):
            items = [damaged.popleft() for _ in range(min(len(damaged), JOB_ITEMS_MAX))]
            tier.submit_job(TierJob(JobKind.DISCARD, tier.number, items), now)

    # States

    def _advance(self, lookup: WaitingLookup, event: LookupEvent) -> None:
        """Take the lookup to its next state. Count an event that its state does not have."""
        if not lookup.transition(event):
            self.counters["lookup_events_ignored", f"{lookup.state}_{event}"] += 1

    def _count_shortfalls(self, lookup: WaitingLookup) -> None:
        """Count each kind of reason for which the lookup gets less than the tiers have."""
        for kind in {shortfall.kind for shortfall in lookup.shortfalls}:
            self.counters[kind.counter] += 1

    def _leave(self, lookup: WaitingLookup, event: LookupEvent) -> None:
        """Let the lookup wait no more. What is being read for it goes on."""
        self._advance(lookup, event)
        del self.lookups[lookup.request.key]
        for turns in self.turns.values():
            turns.pop(lookup, None)
        lookup.needs.clear()
        self._count_shortfalls(lookup)

    def _end(self, lookup: WaitingLookup, event: LookupEvent, now: float) -> WaitingLookup:
        """End the lookup, and measure the tiers that were read for it. Returns the lookup."""
        self._leave(lookup, event)
        for tier, begun in lookup.begun_bytes.items():
            read = lookup.read_bytes[tier]
            if read or lookup.reads:
                # Where nothing came in time, the tier is only known to be slower than that.
                seconds = now - lookup.planned_at
                tier.speed = tier.speed.measured(read or begun / 2, seconds, now)
        return lookup
