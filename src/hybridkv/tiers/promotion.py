"""Promotion: lookups wait while tiers below, or other engines, give what RAM does not have.

A lookup that waits is one story, `Promotion._story`: a generator that yields what it waits for::

    find     which objects do tiers have? Long prompts ask in rounds   waits for ANSWERS
    choose   up to which boundary: load or compute?
    room     beside what others hold (tiers.room_waits)                waits for ROOM
    read     every object that is needed, prefix first                 waits for TIER, SLOT, OBJECTS
    await    what another engine computes (tiers.promises)             waits for PROMISE
    await    what another node computes (tiers.node_waits):            waits for NODES
             find again, choose and read, until all is there

1. A lookup ends as soon as nothing more can come, and at its deadline at the latest. The daemon
   then answers it from RAM.
2. Waiting costs no hit. From its first step on a lookup pins the hit that RAM has already, and then
   the objects that come (`held`), until the daemon has answered it and unpins the slots.
3. An object is read once, whoever waits for it. What comes too late becomes an object of RAM too
   (tiers.shared_reads).
4. If RAM has no room for the hit that was chosen, and waiting for it would take longer than
   computing, a shorter one is chosen.

A prefetch (tiers.prefetches) is such a story without an engine that waits: find, choose, read. It
begins no question and no read while a lookup waits for a tier, and gives way where lookups or
stores need the room that it holds.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import NamedTuple

from hybridkv.core.coverage import Hit, LoadableHit, loadable_hits
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import DamagedError, MissingError, TierError
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob
from hybridkv.tiers.node_waits import NodeWait, NodeWaits
from hybridkv.tiers.object_search import (
    LookupKey,
    LookupRequest,
    NeededObject,
    ObjectPlace,
    ObjectSearch,
)
from hybridkv.tiers.promises import PromisedWait, Promises
from hybridkv.tiers.resident import resident_of
from hybridkv.tiers.room_waits import RoomWaits, waits_until
from hybridkv.tiers.shared_reads import ObjectReads

WAITING_MAX = 1024  # Lookups that wait at the same time. More are answered from RAM.
STORY_MAX = 32  # What a lookup has waited for, the last times.


class Wait(StrEnum):
    """What a lookup waits for."""

    ANSWERS = "answers"  # Tiers have been asked which objects they have, or will be in turn.
    TIER = "tier"  # The tier of the next object has all the reads that it may have.
    ROOM = "room"  # RAM has no room for the hit beside what others hold.
    SLOT = "slot"  # RAM has no slot for the next object yet.
    OBJECTS = "objects"  # All that is needed is being read.
    PROMISE = "promise"  # Another engine computes what RAM lacks.
    NODES = "nodes"  # Another node may, and tiers are asked again, or will be.


class ShortfallKind(Enum):
    """The reasons why a lookup gets less than the tiers have: as a label, and as a sentence.

    Those without a label are missed deadlines.
    """

    CROWDED = "crowded", "too many lookups wait"
    TIERS_AWAY = "tiers_away", "no tier can be asked at the moment"
    SILENT = "tiers_away", "{tier} does not answer"
    PARTLY_SILENT = "tiers_away", "{tier} does not answer for {objects} of {asked} objects"
    SLOWER = (
        "slower",
        "reading {tokens} tokens would take {read_seconds:.3g} s, "
        "computing them {compute_seconds:.3g} s",
    )
    LATE = (
        "late",
        "reading {tokens} tokens would take {read_seconds:.3g} s, "
        "and the lookup waits {patience_seconds:.3g} s",
    )
    NO_ROOM = "no_room", "RAM has room for {fits} of {tokens} tokens"
    FAILED = "failed", "{tier}: {error}"
    NOT_FOUND_IN_TIME = "", "no tier had a thread to look for it in time"
    NOT_READ_IN_TIME = "", "it was not read in time"
    PRESSURE = "pressure", "others need the room"  # Of a prefetch alone.

    def __init__(self, reason: str, sentence: str) -> None:
        self.reason = reason
        self.sentence = sentence  # With the names of facts in braces.


class Shortfall(NamedTuple):
    """A reason why a lookup gets less than the tiers have, with its facts."""

    kind: ShortfallKind
    facts: Mapping[str, str | float]

    @property
    def sentence(self) -> str:
        """The reason for people, such as "disk does not answer"."""
        return self.kind.sentence.format(**self.facts)


@dataclass(eq=False)
class WaitingLookup:
    """A lookup that is not answered yet. While it waits, Promotion alone changes it."""

    request: LookupRequest
    search: ObjectSearch  # What is known of its objects.
    steps: Generator[Wait, None, None] = field(init=False, repr=False)
    """What is left of its story (`Promotion._story`)."""
    story: deque[Wait] = field(default_factory=partial(deque, (), STORY_MAX))
    """What it has waited for. The last of it is what it waits for now."""
    finds: int = 0  # Tiers that are being asked, or will be when it is the lookup's turn.
    hits: Sequence[Hit] = ()
    """The hits for which is read, ascending: the target, and one that comes earlier."""
    chosen_at: float = 0.0  # When they were chosen, for the first time.
    needs: deque[NeededObject] = field(default_factory=deque)  # Objects whose read is not begun.
    needed_bytes: int = 0
    """The bytes of RAM that these need beside what others hold or read, as counted last. To count
    again at each tick would make the loop wait where long prompts wait."""
    is_admitted: bool = False  # Whether RAM's room for these is claimed.
    room_until: float | None = None  # When it waits for room no more. None = it has not waited.
    reads: int = 0  # Objects that are being read.
    held: list[Slot] = field(default_factory=list)
    """Objects that are pinned until the lookup is answered, each as often as it is pinned."""
    promised: PromisedWait | None = None  # What it waits for, or has waited for last.
    node_wait: NodeWait | None = None  # Its wait for other nodes, once that has begun.
    may_grow: bool = False  # Whether other nodes may still put more than tiers have.
    begun_bytes: Counter[TierState] = field(default_factory=Counter)
    """By tier, the bytes of objects whose read was begun for this lookup."""
    read_bytes: Counter[TierState] = field(default_factory=Counter)
    """By tier, the bytes of objects that came."""
    objects_read: int = 0  # Objects that came.
    origins: dict[int, str] = field(default_factory=dict)
    """By chunk, the name of the tier from which it, or a part of it, came."""
    shortfalls: list[Shortfall] = field(default_factory=list)
    """Why it gets less than the tiers have, in the order of time."""

    @property
    def why(self) -> str:
        """The last reason why it gets less than the tiers have, for people. Empty = it does not."""
        return self.shortfalls[-1].sentence if self.shortfalls else ""

    @property
    def target_depth(self) -> int:
        """The depth of the hit that it becomes where all reads succeed, as far as is known."""
        if self.hits and self.promised is None and not self.may_grow:
            return self.hits[-1].depth
        return self.request.chunks + (self.promised is not None and self.request.tail_count > 0)

    @property
    def is_complete(self) -> bool:
        """True once nothing more can come, so that its next step is its last."""
        is_open = self.story[-1] in (Wait.ANSWERS, Wait.PROMISE, Wait.NODES)
        return not (is_open or self.needs or self.reads)

    def add_shortfall(self, kind: ShortfallKind, **facts: str | float) -> None:
        """Keep a reason why it gets less than the tiers have."""
        self.shortfalls.append(Shortfall(kind, facts))


class ReadWaiter(NamedTuple):
    """A lookup that waits for an object, and the object as it needs it."""

    lookup: WaitingLookup
    need: NeededObject


class TierQuestion(NamedTuple):
    """A FIND job: what a tier is asked for one lookup."""

    lookup: WaitingLookup
    places: list[ObjectPlace]  # In the order of the job's items.


class Promotion:
    """All lookups that wait, and whom they wait for."""

    def __init__(self, store: Store, tiers: Sequence[TierState], promises: Promises) -> None:
        """`tiers` are those below RAM, fastest first."""
        self._store = store
        self._promises = promises
        self.node_waits = NodeWaits()
        self._tiers = tiers
        self._now = 0.0
        self.lookups: dict[LookupKey, WaitingLookup] = {}
        self.prefetch: WaitingLookup | None = None  # The one that runs, which is not in `lookups`.
        self.turns: dict[TierState, dict[WaitingLookup, None]] = {tier: {} for tier in tiers}
        """By tier, the lookups about which it is asked once it has a thread, in order."""
        self.questions: dict[TierJob, TierQuestion] = {}
        self.reads = ObjectReads(store, tiers)
        self.room_waits = RoomWaits(store, self.reads)
        self.waiters: dict[bytes, list[ReadWaiter]] = {}
        """By the key of each object that is being read, who waits for it. The first began it."""
        self.shortfalls: Counter[str] = Counter()  # Lookups that were cut, by reason.
        self.deadlines_missed = 0

    def __len__(self) -> int:
        return len(self.lookups)

    # Who waits

    def begin(self, lookup: WaitingLookup, now: float) -> bool:
        """Take over a lookup. Returns whether it waits. If not, `lookup.why` may have the reason.

        In either case the daemon answers the lookup, and then unpins what it held.
        """
        self._now = now
        may_read = bool(self._readable_tiers())
        if self._tiers and not may_read:
            lookup.add_shortfall(ShortfallKind.TIERS_AWAY)
        if not (may_read or self._promises.has_promises(lookup.request.namespace)):
            pass  # There is nobody to wait for.
        elif len(self.lookups) >= WAITING_MAX:
            lookup.add_shortfall(ShortfallKind.CROWDED)
        else:
            is_shared = bool(self._tiers_of_others())
            lookup.may_grow = is_shared and self.node_waits.may_wait(lookup.request, now)
            lookup.steps = self._story(lookup)
            if self._goes_on(lookup):
                self.lookups[lookup.request.key] = lookup
                return True
        self._count_shortfalls(lookup)
        return False

    def begin_prefetch(self, prefetch: WaitingLookup, now: float) -> bool:
        """Take over a prefetch. Returns whether it waits. If not, it is over.

        In either case the caller unpins what it held.
        """
        assert self.prefetch is None
        self._now = now
        prefetch.steps = self._prefetch_story(prefetch)
        if self._goes_on(prefetch):
            self.prefetch = prefetch
        return self.prefetch is not None

    def give_way(self) -> bool:
        """End the prefetch that runs, for the room that it holds. Returns whether one ran."""
        prefetch = self.prefetch
        if prefetch is None or not prefetch.held:
            return False
        prefetch.add_shortfall(ShortfallKind.PRESSURE)
        prefetch.steps.close()  # So its next step is its end.
        self._hold(prefetch, [])
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
                self._leave(lookup)
                self._store.unpin(lookup.held)
                cancelled.append(lookup)
        return cancelled

    def tick(self, now: float) -> Iterator[WaitingLookup]:
        """Take each lookup as far as it comes. Yields the lookups that have ended.

        The answer to one may promise what the next one waits for then.
        """
        self._now = now
        for lookup in list(self.lookups.values()):
            ends_itself = lookup.is_complete or lookup.story[-1] in (Wait.PROMISE, Wait.NODES)
            if lookup.request.deadline <= now and not ends_itself:
                kind = ShortfallKind.NOT_READ_IN_TIME
                if any(lookup in turns for turns in self.turns.values()):
                    kind = ShortfallKind.NOT_FOUND_IN_TIME
                lookup.add_shortfall(kind)
                yield self._end(lookup)
        for tier in self._tiers:
            self._take_turns(tier)
            self.reads.discard_damaged(tier, now)
        for lookup in list(self.lookups.values()):
            if lookup.request.key in self.lookups and not self._goes_on(lookup):
                yield self._end(lookup)
        prefetch = self.prefetch
        if prefetch is not None and (ended := self._end_prefetch(prefetch)):
            yield ended

    def _end_prefetch(self, prefetch: WaitingLookup) -> WaitingLookup | None:
        """Take the prefetch as far as it comes. Returns it once it has ended."""
        is_late = prefetch.request.deadline <= self._now and not prefetch.is_complete
        if is_late:
            prefetch.add_shortfall(ShortfallKind.NOT_READ_IN_TIME)
        elif self._goes_on(prefetch):
            return None
        prefetch.steps.close()
        self.prefetch = None
        for turns in self.turns.values():
            turns.pop(prefetch, None)
        return prefetch

    def wakes_at(self) -> float:
        """Returns when a lookup is overdue, asks tiers again, or waits for others no more."""
        over_at = float("inf") if self.prefetch is None else self.prefetch.request.deadline
        return min([over_at, *map(self._wakes_at, self.lookups.values())])

    def _wakes_at(self, lookup: WaitingLookup) -> float:
        deadline, wait = lookup.request.deadline, lookup.story[-1]
        if lookup.promised is not None and wait is Wait.PROMISE:
            return min(deadline, lookup.promised.ends_at())
        if lookup.room_until is not None and wait is Wait.ROOM:
            return min(deadline, lookup.room_until)
        if lookup.node_wait is not None and wait is Wait.NODES:
            # While tiers are being asked, their answer wakes it.
            asks_at = float("inf") if lookup.finds else lookup.node_wait.asks_at
            return min(deadline, lookup.node_wait.over_at(), asks_at)
        return deadline

    def _goes_on(self, lookup: WaitingLookup) -> bool:
        """Take a lookup as far as it comes. Returns False if its story has ended."""
        wait = next(lookup.steps, None)
        if wait is None:
            return False
        if not lookup.story or lookup.story[-1] is not wait:
            lookup.story.append(wait)
        return True

    def _leave(self, lookup: WaitingLookup) -> None:
        """Let the lookup wait no more. What is being read for it goes on."""
        lookup.steps.close()
        del self.lookups[lookup.request.key]
        for turns in self.turns.values():
            turns.pop(lookup, None)
        self._set_needs(lookup, ())
        self._count_shortfalls(lookup)

    def _end(self, lookup: WaitingLookup) -> WaitingLookup:
        """End the lookup, and measure the tiers that were read for it. Returns the lookup."""
        self._leave(lookup)
        self._measure_reads(lookup)
        return lookup

    def _measure_reads(self, lookup: WaitingLookup) -> None:
        """Measure the tiers by what was read since hits were chosen."""
        for tier, begun in lookup.begun_bytes.items():
            read = lookup.read_bytes[tier]
            if read or lookup.reads:
                # Where nothing came in time, the tier is only known to be slower than that.
                seconds = self._now - lookup.chosen_at
                tier.speed = tier.speed.measured(read or begun / 2, seconds, self._now)
        lookup.begun_bytes.clear()
        lookup.read_bytes.clear()

    def _count_shortfalls(self, lookup: WaitingLookup) -> None:
        """Count each kind of reason for which the lookup gets less than the tiers have."""
        for kind in {shortfall.kind for shortfall in lookup.shortfalls}:
            if kind.reason:
                self.shortfalls[kind.reason] += 1
            else:
                self.deadlines_missed += 1

    # The story of a lookup

    def _story(self, lookup: WaitingLookup) -> Generator[Wait, None, None]:
        """Read what tiers have and is worth reading, then wait for what others compute."""
        if self._readable_tiers():
            yield from self._find(lookup)
            yield from self._promote(lookup)
        latest = yield from self._await_promises(lookup)
        yield from self._await_nodes(lookup, latest)

    def _prefetch_story(self, prefetch: WaitingLookup) -> Generator[Wait, None, None]:
        """Read what tiers have of a prompt that is expected, while no lookup waits for a tier."""
        if not self._readable_tiers():
            prefetch.add_shortfall(ShortfallKind.TIERS_AWAY)
            return
        yield from self._find(prefetch)
        resident_bytes = sum(slot.size_bytes for slot in prefetch.search.resident_slots(()))
        room_bytes = resident_bytes + self.reads.expected_room_bytes
        self._choose(prefetch, min(room_bytes, self.reads.room_bytes))
        if not (yield from self._read(prefetch)):
            prefetch.add_shortfall(ShortfallKind.PRESSURE)

    def _is_tier_wanted(self) -> bool:
        """Returns whether a lookup waits for tiers, so that a prefetch has to wait."""
        waits = (lookup.story[-1] for lookup in self.lookups.values() if lookup.story)
        return any(wait not in (Wait.PROMISE, Wait.NODES) for wait in waits)

    def _promote(self, lookup: WaitingLookup) -> Generator[Wait, None, None]:
        """Choose what is worth reading of what tiers have, and read it."""
        lookup.chosen_at = self._now
        room_bytes = self.reads.room_bytes
        lookup.room_until = None
        while self._choose(lookup, room_bytes):
            if not (yield from self._await_room(lookup)):
                room_bytes = self.room_waits.room_beside_others(lookup.held, lookup.needs)
                continue
            has_room = yield from self._read(lookup)
            if has_room:
                break
            # A shorter hit has room in that of what is held. What only the longer one needs may be
            # evicted from now on.
            room_bytes = sum(slot.size_bytes for slot in set(lookup.held))
        self._measure_reads(lookup)

    def _await_room(self, lookup: WaitingLookup) -> Generator[Wait, None, bool]:
        """Wait until RAM has room for the hit that was chosen, while that is sooner than computing.

        Returns whether it has. Then that room is claimed.
        """
        if self._admit(lookup):
            return True

        def has_room() -> bool:
            is_last = lookup.room_until is not None and self._now >= lookup.room_until
            return (is_last or waits.is_free(lookup.needed_bytes)) and self._admit(lookup)

        waits = self.room_waits
        room_bytes = waits.room_beside_others(lookup.held, lookup.needs)
        return (yield from self._wait_for_room(lookup, room_bytes, has_room))

    def _admit(self, lookup: WaitingLookup) -> bool:
        """Claim the room of what the lookup reads, if RAM has it. Returns whether it has."""
        waits = self.room_waits
        lookup.needed_bytes = waits.bytes_alone(lookup.needs)
        if not waits.is_free(lookup.needed_bytes):
            self.give_way()
        lookup.is_admitted = waits.is_free(lookup.needed_bytes)
        if lookup.is_admitted:
            waits.claim(lookup.needs)
        return lookup.is_admitted

    def _await_slot(self, lookup: WaitingLookup) -> Generator[Wait, None, bool]:
        """Wait until others have left room, where what is free is in pieces that are too short."""
        freed_bytes = self._store.available_bytes + lookup.needs[0].record.size_bytes
        held_bytes = sum(slot.size_bytes for slot in set(lookup.held))
        return (
            yield from self._wait_for_room(
                lookup, held_bytes, lambda: self._store.available_bytes >= freed_bytes
            )
        )

    def _wait_for_room(
        self, lookup: WaitingLookup, room_bytes: int, has_room: Callable[[], bool]
    ) -> Generator[Wait, None, bool]:
        """Wait until `has_room`, for no longer than the lookup is to wait for room in all.

        Without it, a hit in `room_bytes` is loaded. Returns whether there is room.
        """
        waits = self.room_waits
        if lookup.room_until is None:
            lookup.room_until = self._room_until(lookup, room_bytes)
        if lookup.room_until <= self._now:
            return False
        held, began_at = [*lookup.held], self._now
        waits.begin_waiting(held)
        try:
            while not (is_there := has_room()) and self._now < lookup.room_until:
                yield Wait.ROOM
        finally:
            waits.end_waiting(held)
            lookup.chosen_at += self._now - began_at  # Nothing was read for it meanwhile.
        waits.judge_wait(lookup.request.connection_id, is_there, self._now)
        return is_there

    def _room_until(self, lookup: WaitingLookup, room_bytes: int) -> float:
        """Returns the time until which the lookup is to wait for more than `room_bytes`.

        In the past = not at all.
        """
        request, now = lookup.request, self._now
        objects = lookup.search.present_objects(now)
        chosen = (
            hit
            for hit in loadable_hits(objects, self.reads.room_bytes)
            if hit.hits[-1] == lookup.hits[-1]
        )
        full = next(chosen, None)
        may_come = self.room_waits.may_come(request, lookup.held, lookup.needs, now)
        if full is None or not (may_come and request.token_seconds):
            return now
        node_wait = lookup.node_wait
        return waits_until(
            full,
            resident_tokens=objects.resident.tokens,
            shorter=loadable_hits(objects, room_bytes),
            token_seconds=request.token_seconds,
            now=now,
            deadline=min(request.deadline, node_wait.latest if node_wait else request.deadline),
        )

    def _await_promises(self, lookup: WaitingLookup) -> Generator[Wait, None, float]:
        """Wait for promises, one after the other, while that is sooner than computing.

        Returns the time when computing would be over. Infinity = it did not wait.
        """
        request, promises, latest = lookup.request, self._promises, float("inf")
        if not promises.has_promises(request.namespace):
            return latest
        hit = resident_of(request).hit if lookup.story else request.resident
        while wait := promises.find_wait(request, hit, self._now, latest):
            lookup.promised, latest = wait, wait.latest
            if not lookup.held:
                self._hold(lookup, lookup.search.resident_slots(()))
            while not wait.is_wait_over(self._now):
                yield Wait.PROMISE
            before, hit = hit, resident_of(request).hit
            promises.judge_promise(wait.promise, hit.tokens > before.tokens, self._now)
            if wait.promise.is_open:
                return self._now  # Computing is sooner from now on.
        return latest

    def _await_nodes(self, lookup: WaitingLookup, latest: float) -> Generator[Wait, None, None]:
        """Ask tiers again for what other nodes compute, and read it, while that is sooner.

        `latest` is the time when computing would be over, where it is known from earlier waits.
        """
        if not lookup.may_grow:
            return
        tokens = resident_of(lookup.request).hit.tokens
        missing = len(lookup.search.begin_again())
        wait = self.node_waits.begin_wait(lookup.request, tokens, missing, self._now, latest)
        if wait is None:
            return
        lookup.node_wait = wait
        if not lookup.held:
            self._hold(lookup, lookup.search.resident_slots(()))
        while not wait.is_spent(self._now) and (tiers := self._tiers_of_others()):
            if self._now < wait.asks_at:
                yield Wait.NODES
            else:
                yield from self._ask_again(lookup, wait, tiers)
        has_grown = resident_of(lookup.request).hit.tokens > tokens
        self.node_waits.judge_wait(lookup.request.connection_id, has_grown, self._now)

    def _ask_again(
        self, lookup: WaitingLookup, wait: NodeWait, tiers: Sequence[TierState]
    ) -> Generator[Wait, None, None]:
        """Ask for the first of what is missing. If some has come, find and read all that has."""
        search = lookup.search
        search.ask_first()
        self.node_waits.questions += 1
        yield from self._ask(lookup, tiers)
        has_come = any(map(search.is_there, search.asked))
        if has_come:
            search.begin_again()
            yield from self._find(lookup)
            # Hits are compared with the one that RAM has by now.
            request = lookup.request._replace(resident=resident_of(lookup.request).hit)
            lookup.request = search.request = request
            yield from self._promote(lookup)
            search.begin_again()
        wait.note_answer(len(search.missing), has_come, self._now)

    def _find(self, lookup: WaitingLookup) -> Generator[Wait, None, None]:
        """Ask the tiers that cannot say at once which objects they have, round by round."""
        search, is_again = lookup.search, lookup.node_wait is not None
        tiers_to_ask = self._tiers_of_others if is_again else self._readable_tiers
        while search.next_round(tiers := tiers_to_ask()):
            if not tiers:
                lookup.add_shortfall(ShortfallKind.TIERS_AWAY)
                return
            if not lookup.held:
                self._hold(lookup, search.resident_slots(()))
            while lookup.request.is_prefetch and self._is_tier_wanted():
                yield Wait.ANSWERS
            yield from self._ask(lookup, tiers)

    def _ask(
        self, lookup: WaitingLookup, tiers: Sequence[TierState]
    ) -> Generator[Wait, None, None]:
        """Ask tiers about the objects of this round. In a wait for other nodes, while it lasts."""
        wait = lookup.node_wait
        for tier in tiers:
            self.turns[tier][lookup] = None
            lookup.finds += 1
            self._take_turns(tier)
        while lookup.finds and not (wait is not None and wait.is_spent(self._now)):
            yield Wait.ANSWERS if wait is None else Wait.NODES

    def _choose(self, lookup: WaitingLookup, room_bytes: int) -> bool:
        """Choose the hits that are read into `room_bytes`. Returns whether there is anything new.

        What RAM has of them, and of the hit that RAM had, is held.
        """
        request, search = lookup.request, lookup.search
        objects = search.present_objects(self._now)
        hits, shortfalls = choose_load(
            loadable_hits(objects, room_bytes),
            resident=objects.resident,
            longest=objects.longest,
            token_seconds=request.token_seconds,
            patience_seconds=request.deadline - self._now,
        )
        lookup.shortfalls += shortfalls
        if request.is_prefetch:
            hits = hits[-1:]  # No engine waits, for which a shorter hit could come earlier.
        # The same hit again has no room although it seems to fit, because objects without a slot
        # counted. Choosing it once more would never end.
        is_new = hits != lookup.hits
        lookup.hits = hits
        self._set_needs(lookup, search.needed_objects(hits))
        self._hold(lookup, search.resident_slots(hits))
        return is_new

    def _set_needs(self, lookup: WaitingLookup, needs: Iterable[NeededObject]) -> None:
        """Read these objects, and not those that were needed. Their room is not claimed yet."""
        self._take_needs(lookup, len(lookup.needs))
        lookup.is_admitted = False
        lookup.needs.extend(needs)

    def _take_needs(self, lookup: WaitingLookup, count: int) -> list[NeededObject]:
        """Returns the first of what is to be read for a lookup, which is not to be any more."""
        taken = [lookup.needs.popleft() for _ in range(count)]
        if lookup.is_admitted:
            self.room_waits.end_claim(taken)
        return taken

    def _hold(self, lookup: WaitingLookup, slots: list[Slot]) -> None:
        """Pin these objects until the lookup is answered, instead of those that were pinned."""
        unpinned, lookup.held = lookup.held, slots
        self._store.hold(slots)
        self._store.unpin(unpinned)

    def _read(self, lookup: WaitingLookup) -> Generator[Wait, None, bool]:
        """Read what is needed. Returns False if an object has no slot, and none is on its way."""
        while wait := self._begin_reads(lookup):
            if wait is not Wait.SLOT or lookup.reads or self._store.is_growing:
                yield wait
            elif lookup.request.is_prefetch or not (yield from self._await_slot(lookup)):
                return False
        return True

    def _begin_reads(self, lookup: WaitingLookup) -> Wait | None:
        """Begin to read what is needed, prefix first, as far as that is possible now.

        Returns what the lookup waits for then. None = nothing more can come.
        """
        request, needs, is_prefetch = lookup.request, lookup.needs, lookup.request.is_prefetch
        while needs:
            need = needs[0]
            slot, running = request.slot_of(need.place), self.reads.running.get(need.key)
            tier = need.tier if running is None else running.need.tier
            if slot is not None:
                self._store.hold((slot,))
                lookup.held.append(slot)
                self._take_needs(lookup, 1)
            elif tier.is_hung or not (running or tier.may_read(self._now)):
                lookup.add_shortfall(ShortfallKind.SILENT, tier=tier.name)
                self._set_needs(lookup, ())
            elif running is not None:
                self._take_needs(lookup, 1)
                self.waiters[need.key].append(ReadWaiter(lookup, need))
                lookup.reads += 1
                if not is_prefetch:
                    self.reads.join_read(need.key)
            elif self.reads.is_busy(tier, need.record.size_bytes, is_prefetch) or (
                is_prefetch and self._is_tier_wanted()
            ):
                return Wait.TIER
            else:
                begun = self.reads.begin_job(needs, self._now, is_prefetch)
                if not begun and not is_prefetch and self.give_way():
                    continue
                if not begun:
                    return Wait.SLOT
                for need in self._take_needs(lookup, begun):
                    self.waiters[need.key] = [ReadWaiter(lookup, need)]
                    lookup.begun_bytes[tier] += need.record.size_bytes
                lookup.reads += begun
        return Wait.OBJECTS if lookup.reads else None

    # What comes from tiers

    def _readable_tiers(self) -> list[TierState]:
        return [tier for tier in self._tiers if tier.may_read(self._now)]

    def _tiers_of_others(self) -> list[TierState]:
        """Returns the tiers that can be read, and to which other daemons may write."""
        return [tier for tier in self._readable_tiers() if tier.tier.has_other_writers()]

    def _take_turns(self, tier: TierState) -> None:
        """Ask the tier about lookups in turn while it has threads. Give up all if it is ill."""
        turns = self.turns[tier]
        while turns and (tier.has_thread(JobKind.FIND) or not tier.may_read(self._now)):
            lookup = next(iter(turns))
            del turns[lookup]
            lookup.finds -= 1
            if not tier.may_read(self._now):
                lookup.add_shortfall(ShortfallKind.SILENT, tier=tier.name)
                continue
            items: dict[ObjectPlace, JobItem] = {}
            is_again = lookup.node_wait is not None
            for place in lookup.search.asked:
                record = lookup.search.record_to_find(place)
                is_there = tier.peek(record.name.key)
                if is_there:
                    lookup.search.located.setdefault(place, tier)
                elif is_again or is_there is None:
                    items[place] = JobItem(record)
            if items:
                job = TierJob(JobKind.FIND, tier.number, [*items.values()], is_again=is_again)
                self.questions[job] = TierQuestion(lookup, list(items))
                lookup.finds += 1
                tier.submit_job(job, self._now)

    def on_find_done(self, job: TierJob, outcome: JobOutcome) -> None:
        """A tier has said which of the objects that it was asked about it has."""
        lookup, places = self.questions.pop(job)
        lookup.finds -= 1
        tier = self._tiers[job.tier]
        if outcome.error is not None:
            lookup.add_shortfall(ShortfallKind.FAILED, tier=tier.name, error=str(outcome.error))
        if silent := sum(is_there is None for is_there in outcome.found):
            lookup.add_shortfall(
                ShortfallKind.PARTLY_SILENT, tier=tier.name, objects=silent, asked=len(places)
            )
        for place, is_there in zip(places, outcome.found, strict=False):
            if is_there:
                lookup.search.located.setdefault(place, tier)

    def on_read_done(self, job: TierJob, outcome: JobOutcome, now: float) -> list[Slot]:
        """A tier has read objects, or failed to. Returns the new objects of the index."""
        self._now = now
        tier = self._tiers[job.tier]
        is_awaited, is_prefetched = False, False
        stored: list[Slot] = []
        for at, item in enumerate(job.items):
            error = outcome.error or outcome.errors[at]
            if item.slot is not None and item.slot.is_forgotten:
                error = MissingError("it was forgotten meanwhile")
            slot = self.reads.end_read(item, error, 0 if error else outcome.tenants[at])
            if slot is not None and slot is item.slot:
                stored.append(slot)
            for waiter in self.waiters.pop(item.key):
                lookup = waiter.lookup
                lookup.reads -= 1
                # Few threads read for a prefetch, which says little about the tier's speed.
                is_prefetched |= lookup.request.is_prefetch
                is_open = self.lookups.get(lookup.request.key) is lookup
                if is_open or lookup is self.prefetch:
                    is_awaited = True
                    self._on_object_read(waiter, tier, slot, error)
        if not (is_awaited or is_prefetched) and outcome.error is None:
            # It comes too late for any lookup, but now the tier's speed is known.
            tier.speed = tier.speed.measured(job.size_bytes, now - job.submitted_at, now)
        return stored

    def _on_object_read(
        self, waiter: ReadWaiter, tier: TierState, slot: Slot | None, error: TierError | None
    ) -> None:
        """An object that a lookup waits for has been read into a slot, or not."""
        lookup, need = waiter
        if slot is not None:
            self._store.hold((slot,))
            lookup.held.append(slot)
            lookup.read_bytes[tier] += slot.size_bytes
            lookup.objects_read += 1
            lookup.origins.setdefault(lookup.request.chunk_of(need.place.position), tier.name)
            return
        if isinstance(error, DamagedError):
            # Damage comes in regions, and the lookup ends with the first record that has any. What
            # was to be read next is replaced as well.
            tier.suspect(need.record.name.key for need in lookup.needs if need.tier is tier)
        # A faster tier did not have it when the object was located.
        slower = self._tiers[tier.number + 1 :] if error is not None else ()
        for next_tier in slower:
            if next_tier.may_read(self._now) and next_tier.peek(need.key):
                need = need._replace(tier=next_tier)
                lookup.needs.appendleft(need)
                if lookup.is_admitted:
                    self.room_waits.claim((need,))
                return
        self._set_needs(lookup, ())
        lookup.add_shortfall(ShortfallKind.FAILED, tier=tier.name, error=str(error or "no room"))


def choose_load(
    loadable: Sequence[LoadableHit],
    resident: Hit,
    longest: Hit,
    token_seconds: float,
    patience_seconds: float,
) -> tuple[Sequence[Hit], list[Shortfall]]:
    """Returns the hits that are read, ascending, and why they are not more.

    They are the best of the loadable hits, after one that comes earlier. Empty = nothing is read.
    `resident` is the hit that RAM alone has, `longest` that of RAM and tiers. The times are as in
    `best_load`.
    """
    by_tokens = {hit.tokens: hit for hit in loadable}
    fits = max(by_tokens, default=resident.tokens)
    seconds = {tokens: hit.read_seconds for tokens, hit in by_tokens.items()}
    best = best_load(resident.tokens, seconds, token_seconds, patience_seconds)
    shortfalls: list[Shortfall] = []
    if fits < longest.tokens:
        room_facts = {"fits": fits, "tokens": longest.tokens}
        shortfalls.append(Shortfall(ShortfallKind.NO_ROOM, room_facts))
    if best < fits:
        facts = {"tokens": fits, "read_seconds": seconds[fits]}
        compute_seconds = (fits - resident.tokens) * token_seconds
        if not token_seconds or patience_seconds < seconds[fits] < compute_seconds:
            facts["patience_seconds"] = patience_seconds
            shortfalls.append(Shortfall(ShortfallKind.LATE, facts))
        else:
            facts["compute_seconds"] = compute_seconds
            shortfalls.append(Shortfall(ShortfallKind.SLOWER, facts))
    hits = by_tokens[best].hits if best > resident.tokens else ()
    return hits, shortfalls


def best_load(
    resident: int, read_seconds: Mapping[int, float], token_seconds: float, patience_seconds: float
) -> int:
    """Returns the hit, in tokens, with which a prompt is ready first.

    `resident` is the hit that needs no reading. `read_seconds` has the others, and the seconds of
    reading each. `token_seconds` is the time of computing a token, 0 = not known: the largest hit
    is best. Reading that would outlast `patience_seconds` is not begun.
    """
    best, gain = resident, 0.0
    for tokens, read in sorted(read_seconds.items(), reverse=True):
        if tokens > resident:
            compute = (tokens - resident) * token_seconds
            saved = compute - read if token_seconds else float(tokens)
            if read <= patience_seconds and saved > gain:
                best, gain = tokens, saved
    return best
