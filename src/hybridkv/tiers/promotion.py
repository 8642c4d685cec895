"""Promotion: lookups wait while tiers below give what RAM does not have.

A waiting lookup goes through three steps, and ends as soon as nothing more can come, at its
deadline at the latest. The daemon then answers it from what RAM has::

    find    tiers that cannot say at once what they have are asked, of long prompts in rounds
    plan    up to which boundary reading is worth it (tiers.load_or_compute), and what is missing
    read    prefix first, into slots that become objects like any other

`tick` goes on with all of them, and returns those that ended. From its first step on a lookup pins
the hit that RAM has already, and then what comes (`held`), until the daemon has answered it and
unpins the slots: waiting costs no hit.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.core.coverage import part_bytes, stored_counts
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import DamagedError, TierError
from hybridkv.tiers.health import JOB_ITEMS_MAX, TierState
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob
from hybridkv.tiers.load_or_compute import (
    NeededObject,
    ObjectPlace,
    ShortfallKind,
    WaitingLookup,
    next_finds,
    plan_reads,
)
from hybridkv.tiers.record import Record

WAITING_MAX = 1024  # Lookups that wait at the same time; more are answered from RAM.
READING_SHARE = 8  # At most 1/8 of the arena is being read into from one tier.
DAMAGED_MAX = 1024
"""Damaged objects of one tier that wait to be put aside; more stay there until they are read."""


@dataclass(eq=False)
class ObjectRead:
    """An object that is being read, and its slot."""

    need: NeededObject
    slot: Slot
    lookups: list[WaitingLookup]  # The lookups that wait for it; the first one began to read it.


class Promotion:
    """All lookups that wait."""

    def __init__(self, store: Store, tiers: Sequence[TierState]) -> None:
        """`tiers` are those below RAM, fastest first."""
        self._store = store
        self._tiers = tiers
        self._lookups: dict[tuple[int, int], WaitingLookup] = {}  # By (connection, lease).
        self._reads: dict[bytes, ObjectRead] = {}  # By the object's key.
        self._finds: dict[TierJob, tuple[WaitingLookup, list[ObjectPlace]]] = {}
        self._turns: dict[TierState, dict[WaitingLookup, None]] = {tier: {} for tier in tiers}
        """Lookups of which a tier is asked as soon as it has a thread for it, in order."""
        self._damaged = {tier: deque[JobItem]() for tier in tiers}
        self._reading_bytes: Counter[TierState] = Counter()
        self.counters: Counter[tuple[str, str]] = Counter()
        """Lookups that fell short, by the (metric, label) of the reason."""

    def __len__(self) -> int:
        return len(self._lookups)

    def begin(self, lookup: WaitingLookup, masks: Sequence[bytes], now: float) -> bool:
        """Whether the lookup is to wait; if not, `lookup.shortfall` may tell why.

        `masks` are the presence masks of RAM, per group.
        """
        tiers = [tier for tier in self._tiers if tier.may_read(now)]
        if not tiers or len(self._lookups) >= WAITING_MAX:
            self._fall_short(lookup, ShortfallKind.CROWDED if tiers else ShortfallKind.TIERS_AWAY)
            return False
        lookup.target = lookup.request.chunks
        _locate(lookup, masks, tiers)
        self._ask(lookup, now)
        if lookup.finding:
            self._hold_hits(lookup)
        elif not self._go_on(lookup, now):
            self._store.unpin(lookup.held)
            return False
        self._lookups[lookup.request.connection_id, lookup.request.lease] = lookup
        return True

    def is_waiting(self, connection_id: int, lease: int) -> bool:
        """Whether the lookup with that lease waits."""
        return (connection_id, lease) in self._lookups

    def cancel(self, connection_id: int, lease: int | None = None) -> None:
        """Forget one lookup, or all of a connection: nobody waits for the answer any more."""
        for key in list(self._lookups) if lease is None else [(connection_id, lease)]:
            lookup = self._lookups.get(key)
            if lookup is not None and key[0] == connection_id:
                self._leave(lookup)
                self._store.unpin(lookup.held)

    def on_find_done(self, job: TierJob, outcome: JobOutcome) -> None:
        """Take over what a tier said it has."""
        lookup, places = self._finds.pop(job)
        lookup.finding -= 1
        if outcome.error is not None:
            facts = {"tier": self._tiers[job.tier].name, "error": str(outcome.error)}
            self._fall_short(lookup, ShortfallKind.FAILED, **facts)
        for place, is_there in zip(places, outcome.found, strict=False):
            if is_there:
                lookup.located.setdefault(place, self._tiers[job.tier])

    def on_read_done(self, job: TierJob, outcome: JobOutcome, now: float) -> list[Slot]:
        """Take over what was read, or give up what was not; the new objects of the index."""
        tier = self._tiers[job.tier]
        touched: set[WaitingLookup] = set()
        stored: list[Slot] = []
        for at, item in enumerate(job.items):
            read = self._reads.pop(item.key)
            self._reading_bytes[tier] -= read.slot.size_bytes
            came: Slot | TierError | None = outcome.error or outcome.errors[at]
            if came is None:
                tier.suspects.discard(item.key)
                came = self._enter(read, outcome.tenants[at])
                if came is read.slot:
                    stored.append(read.slot)
            else:
                self._store.free(read.slot)
                if isinstance(came, DamagedError):
                    self._found_damaged(tier, item, read.lookups)
            touched.update(read.lookups)
            for lookup in read.lookups:
                self._came(lookup, read.need, came, now)
        if all(lookup.is_over for lookup in touched) and outcome.error is None:
            # It comes too late for any lookup, but now the tier's speed is known.
            tier.speed = tier.speed.measured(job.size_bytes, now - job.submitted_at, now)
        return stored

    def _found_damaged(
        self, tier: TierState, item: JobItem, lookups: Sequence[WaitingLookup]
    ) -> None:
        """Have a damaged record put aside, and those replaced that would have been read after it.

        Damage comes in regions, and these lookups end here: each would find one record of it.
        """
        damaged = self._damaged[tier]
        if len(damaged) < DAMAGED_MAX:
            damaged.append(item._replace(slot=None))
        else:
            tier.counters["damage_left"] += 1
        tier.suspect((item.key,))
        for lookup in lookups:
            name_of = lookup.request.name_of
            left = (need for need in lookup.todo if need.tier is tier)
            tier.suspect(name_of(need.group_index, need.at).key for need in left)

    def tick(self, now: float) -> list[WaitingLookup]:
        """Go on where something came, or there is room or a thread; the lookups that ended."""
        ended = []
        for lookup in list(self._lookups.values()):
            is_complete = lookup.is_planned and not lookup.todo and not lookup.reading
            if lookup.request.deadline <= now and not is_complete:
                kind = ShortfallKind.NOT_READ_IN_TIME
                if any(lookup in turns for turns in self._turns.values()):
                    kind = ShortfallKind.NOT_FOUND_IN_TIME
                self._fall_short(lookup, kind)
                ended.append(self._end(lookup, now))
        for tier in self._tiers:
            self._take_turns(tier, now)
            damaged = self._damaged[tier]
            if damaged and tier.has_thread(JobKind.DISCARD):
                items = [damaged.popleft() for _ in range(min(len(damaged), JOB_ITEMS_MAX))]
                tier.submit(TierJob(JobKind.DISCARD, tier.number, items), now)
        for lookup in list(self._lookups.values()):
            self._ask(lookup, now)
            if not lookup.finding and not self._go_on(lookup, now):
                ended.append(self._end(lookup, now))
        return ended

    def wakes_at(self) -> float:
        """When the next lookup is due."""
        deadlines = (lookup.request.deadline for lookup in self._lookups.values())
        return min(deadlines, default=float("inf"))

    # Find

    def _ask(self, lookup: WaitingLookup, now: float) -> None:
        """Begin the next round of a lookup of which no tier is being asked, if there is one."""
        while not lookup.finding and not lookup.is_planned:
            lookup.asked = next_finds(lookup)
            if not lookup.asked:
                break
            tiers = [tier for tier in self._tiers if tier.may_read(now)]
            if not tiers:
                self._fall_short(lookup, ShortfallKind.TIERS_AWAY)
                lookup.unknown.clear()
            for tier in tiers:
                self._turns[tier][lookup] = None
                lookup.finding += 1
                self._take_turns(tier, now)

    def _take_turns(self, tier: TierState, now: float) -> None:
        """Ask the tier about lookups in turn while it has threads; give up all if it is ill."""
        turns = self._turns[tier]
        while turns and (tier.has_thread(JobKind.FIND) or not tier.may_read(now)):
            lookup = next(iter(turns))
            del turns[lookup]
            lookup.finding -= 1
            if not tier.may_read(now):
                self._fall_short(lookup, ShortfallKind.SILENT, tier=tier.name)
                continue
            asked: dict[ObjectPlace, JobItem] = {}
            for place in lookup.asked:
                name = lookup.request.name_of(*place)
                is_there = tier.peek(name.key)
                if is_there:
                    lookup.located.setdefault(place, tier)
                elif is_there is None:
                    asked[place] = JobItem(Record(name, 0, 0, 0))
            if asked:
                job = TierJob(JobKind.FIND, tier.number, list(asked.values()))
                self._finds[job] = lookup, list(asked)
                lookup.finding += 1
                tier.submit(job, now)

    # Read

    def _plan(self, lookup: WaitingLookup, now: float) -> None:
        """Decide what is read, in all that RAM may ever have room for."""
        lookup.is_planned, lookup.started_at = True, now
        # What is being read becomes objects, of this prompt or of others.
        reading = sum(self._reading_bytes.values())
        self._decide(lookup, len(self._store) - self._store.writing_bytes + reading, now)
        if lookup.hits:  # Else it ends, and where it has waited it holds what it had.
            self._hold_hits(lookup)

    def _plan_again(self, lookup: WaitingLookup, now: float) -> None:
        """Decide for a shorter hit, in the room of what was read: there is no room for more.

        What only the longer hit needs may be evicted from now on.
        """
        held, lookup.held = lookup.held, []
        before = lookup.hits
        lookup.todo.clear()
        self._decide(lookup, sum(slot.size_bytes for slot in set(held)), now)
        self._hold_hits(lookup)
        self._store.unpin(held)
        if lookup.hits == before:
            # It cannot be, because what has no slot counted. The loop would not end.
            lookup.todo.clear()

    def _decide(self, lookup: WaitingLookup, room_bytes: int, now: float) -> None:
        for kind, facts in plan_reads(lookup, room_bytes, now):
            self._fall_short(lookup, kind, **facts)

    def _hold_hits(self, lookup: WaitingLookup) -> None:
        """Hold what RAM has of the hits that are read, and the hit that it had to begin with.

        Room for more must cost neither, whoever needs the room.
        """
        for slot in lookup.request.resident_slots((lookup.request.resident, *lookup.hits)):
            self._hold(lookup, slot)

    def _go_on(self, lookup: WaitingLookup, now: float) -> bool:
        """Plan what is read, once; start what can be started; whether anything is to come."""
        if not lookup.is_planned:
            self._plan(lookup, now)
        while lookup.todo:
            need = lookup.todo[0]
            name = lookup.request.name_of(need.group_index, need.at)
            slot = lookup.request.namespace.get(name.chunk_hash, need.group_index)
            known = self._reads.get(name.key)
            tier = need.tier if known is None else known.need.tier
            if slot is not None:
                self._hold(lookup, slot)
            elif tier.is_hung or (known is None and not tier.may_read(now)):
                self._fall_short(lookup, ShortfallKind.SILENT, tier=tier.name)
                lookup.todo.clear()
                break
            elif known is not None:
                known.lookups.append(lookup)
                lookup.reading += 1
            elif not tier.has_thread(JobKind.READ) or not self._start(lookup, tier, now):
                break
            else:
                continue
            lookup.todo.popleft()
        return bool(lookup.todo or lookup.reading)

    def _start(self, lookup: WaitingLookup, tier: TierState, now: float) -> bool:
        """Read the next few objects from `tier`; whether any."""
        request, geometry = lookup.request, lookup.request.geometry
        items: list[JobItem] = []
        job_bytes, most = 0, tier.job_bytes(JobKind.READ, now)
        while lookup.todo and lookup.todo[0].tier is tier and len(items) < JOB_ITEMS_MAX:
            need = lookup.todo[0]
            group = geometry.groups[need.group_index]
            name = request.name_of(need.group_index, need.at)
            shape = part_bytes(geometry, group, need.at), geometry.parts(group)
            size, taken = slot_bytes(*shape), self._reading_bytes[tier]
            job_bytes += size
            is_busy = taken and taken + size > len(self._store) // READING_SHARE
            if (items and job_bytes > most) or is_busy or name.key in self._reads:
                break
            slot = next(iter(self._store.grant(shape, 1)), None)
            if slot is None:
                if not self._store.is_growing and not lookup.reading:
                    self._plan_again(lookup, now)
                    return True
                break
            self._reads[name.key] = ObjectRead(need, slot, [lookup])
            items.append(JobItem(Record(name, *shape, slot.generation), slot))
            self._reading_bytes[tier] += size
            lookup.begun_bytes[tier] += size
            lookup.reading += 1
            lookup.todo.popleft()
        if items:
            tier.submit(TierJob(JobKind.READ, tier.number, items), now)
        return bool(items)

    def _enter(self, read: ObjectRead, tenant: int) -> Slot | None:
        """Make what was read an object; the slot that has it."""
        request, need, slot = read.lookups[0].request, read.need, read.slot
        if not request.namespace.is_current:
            self._store.free(slot)
            return None
        chunk_hash = request.hash_of(need.at)
        parent = request.hash_of(request.chunk_of(need.at) - 1)
        place = request.namespace, need.group_index, chunk_hash, parent
        if self._store.commit(slot, *place, tenant=tenant):
            slot.in_tiers |= need.tier.bit
            return slot
        return request.namespace.get(chunk_hash, need.group_index)

    def _came(
        self, lookup: WaitingLookup, need: NeededObject, came: Slot | TierError | None, now: float
    ) -> None:
        """Tell a lookup of an object that was read: its slot, its error, or None without room."""
        lookup.reading -= 1
        if lookup.is_over:
            return
        if isinstance(came, Slot):
            self._hold(lookup, came)
            lookup.read_bytes[need.tier] += came.size_bytes
            lookup.origins.setdefault(lookup.request.chunk_of(need.at), need.tier.name)
            return
        # Where else it is: only in slower tiers, so that it ends.
        key = lookup.request.name_of(need.group_index, need.at).key
        others = self._tiers[need.tier.number + 1 :] if came is not None else ()
        for tier in others:
            if tier.may_read(now) and tier.peek(key):
                lookup.todo.appendleft(need._replace(tier=tier))
                return
        lookup.todo.clear()
        self.counters[ShortfallKind.FAILED.counter] += not lookup.shortfall
        facts = {"tier": need.tier.name, "error": came or "no room"}
        lookup.shortfall = ShortfallKind.FAILED.sentence.format(**facts)

    # End

    def _hold(self, lookup: WaitingLookup, slot: Slot) -> None:
        self._store.hold((slot,))
        lookup.held.append(slot)

    def _fall_short(self, lookup: WaitingLookup, kind: ShortfallKind, **facts: str | float) -> None:
        self.counters[kind.counter] += kind not in lookup.short_of
        lookup.short_of.add(kind)
        lookup.shortfall = kind.sentence.format(**facts)

    def _leave(self, lookup: WaitingLookup) -> None:
        lookup.is_over = True
        del self._lookups[lookup.request.connection_id, lookup.request.lease]
        for turns in self._turns.values():
            turns.pop(lookup, None)
        lookup.todo.clear()

    def _end(self, lookup: WaitingLookup, now: float) -> WaitingLookup:
        self._leave(lookup)
        for tier, begun in lookup.begun_bytes.items():
            read = lookup.read_bytes[tier]
            if read or lookup.reading:
                # Where nothing came in time, the tier is only known to be slower than that.
                seconds = now - lookup.started_at
                tier.speed = tier.speed.measured(read or begun / 2, seconds, now)
        return lookup


def _locate(lookup: WaitingLookup, masks: Sequence[bytes], tiers: Sequence[TierState]) -> None:
    """Ask for what tiers know at once, as far as the prefix that every hit needs may reach."""
    geometry = lookup.request.geometry
    reach, groups = lookup.request.chunks, geometry.groups
    full_first = sorted(range(len(groups)), key=lambda at: groups[at].kind is not GroupKind.FULL)
    for index in full_first:
        mask, counts = masks[index], stored_counts(geometry, groups[index])
        chunk = mask.find(0, 0, reach)
        while chunk >= 0:
            is_lost = counts[chunk % len(counts)] and not _locate_one(lookup, (index, chunk), tiers)
            if is_lost and groups[index].kind is GroupKind.FULL:
                reach = chunk
                break
            chunk = mask.find(0, chunk + 1, reach)
    _locate_tail(lookup, reach, tiers)


def _locate_tail(lookup: WaitingLookup, reach: int, tiers: Sequence[TierState]) -> None:
    """Find the longest tail up to chunk `reach` of which RAM or tiers have every object.

    Only tiers that know at once what they have are considered: a tail is one of up to
    TAIL_UNITS_MAX names, and asking a network for each would cost more than computing the tail.
    """
    request, resident = lookup.request, lookup.request.resident
    for number in reversed(range(resident.tail, len(request.tails) // HASH_BYTES)):
        at = request.chunks + number
        if request.chunk_of(at) < resident.chunks - bool(resident.tail):
            break
        if request.chunk_of(at) > reach:
            continue
        there: dict[ObjectPlace, TierState] = {}
        for index in range(len(request.geometry.groups)):
            if request.namespace.get(request.hash_of(at), index) is not None:
                continue
            key = request.name_of(index, at).key
            tier = next((tier for tier in tiers if tier.peek(key)), None)
            if tier is None:
                break
            there[index, at] = tier
        else:
            lookup.located |= there
            lookup.tail = number + 1
            break


def _locate_one(lookup: WaitingLookup, place: ObjectPlace, tiers: Sequence[TierState]) -> bool:
    """Whether a tier has the object, or may have it."""
    key = lookup.request.name_of(*place).key
    is_unknown = False
    for tier in tiers:
        is_there = tier.peek(key)
        if is_there:
            lookup.located[place] = tier
            return True
        is_unknown = is_unknown or is_there is None
    if is_unknown:
        lookup.unknown[place] = None
    return is_unknown
