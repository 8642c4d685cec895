"""What comes up: lookups that wait while tiers below give what RAM does not have.

A waiting lookup goes through three steps, and is answered from what RAM has as soon as nothing more can come, at its
deadline at the latest::

    find    tiers that cannot say at once what they have are asked
    plan    up to which boundary it is worth reading (core.worth), and what is missing there
    read    prefix first, into slots that become objects like any other
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit, needed_chunks, part_bytes, stored_counts
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.worth import best_cut
from hybridkv.shm.slots import slot_bytes
from hybridkv.storage.line import JOB_ITEMS_MAX, Line
from hybridkv.storage.record import Record, RecordName
from hybridkv.storage.store import Namespace, Slot, Store
from hybridkv.storage.tiers.base import DamagedError
from hybridkv.storage.transfer import Item, Job, Outcome, Work

WAITING_MAX = 1024
"""Lookups that wait at the same time; more are answered from RAM."""
READING_SHARE = 8
"""At most 1/8 of the arena is being read into from one tier."""
FIND_KEYS_MAX = 4096
"""Objects that one lookup asks a tier about."""
DAMAGED_MAX = 1024
"""Damaged objects of one tier that wait to be put aside; of more the oldest are left for whoever reads them next."""
CUTS = 8
"""Boundaries that are weighed against each other."""


class Need(NamedTuple):
    """An object that a waiting lookup wants, and the tier that has it."""

    line: Line
    group_index: int
    chunk: int


@dataclass(eq=False)
class Waiting:
    """A lookup that is not answered yet."""

    connection_id: int
    id: int
    lease: int
    namespace: Namespace
    geometry: Geometry
    hashes: bytes
    """Of the chunks, HASH_BYTES each, as many as may be hit."""
    deadline: float
    tokens_per_second: int
    resident: int = 0
    """Chunks that RAM alone had when it was asked."""
    target: int = 0
    """Chunks that it may become, as far as is known."""
    located: dict[tuple[int, int], Line] = field(default_factory=dict)
    """By (group index, chunk)."""
    asked: dict[tuple[int, int], None] = field(default_factory=dict)
    """Those of which some tier must say whether it has them."""
    finding: int = 0
    """Tiers that look for some, or will when it is its turn."""
    todo: deque[Need] = field(default_factory=deque)
    reading: int = 0
    """Objects that are on their way up."""
    held: list[Slot] = field(default_factory=list)
    asked_at: float = 0.0
    started_at: float = 0.0
    """When the plan was made."""
    begun_bytes: Counter[Line] = field(default_factory=Counter)
    read_bytes: Counter[Line] = field(default_factory=Counter)
    origins: dict[int, str] = field(default_factory=dict)
    """The tier that gave (a part of) a chunk."""
    why: str = ""
    """Why no more was read, for people."""
    is_over: bool = False

    @property
    def chunks(self) -> int:
        """Of the prompt."""
        return len(self.hashes) // HASH_BYTES

    def hash_of(self, chunk: int) -> bytes:
        """The name of the prefix that ends with `chunk`; empty before the first one."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES] if chunk >= 0 else b""

    def name_of(self, group_index: int, chunk: int) -> RecordName:
        """Of one object."""
        return RecordName(self.namespace.identity, self.namespace.gids[group_index], self.hash_of(chunk))


@dataclass(eq=False)
class Reading:
    """An object on its way up, and who waits for it."""

    need: Need
    namespace: Namespace
    chunk_hash: bytes
    parent: bytes
    waiting: list[Waiting] = field(default_factory=list)


class Promotion:
    """All lookups that wait."""

    def __init__(
        self,
        store: Store,
        lines: Sequence[Line],
        answer: Callable[[Waiting], None],
        is_current: Callable[[Namespace], bool],
        stored: Callable[[Iterable[Slot]], None],
    ) -> None:
        """`answer` is told of each lookup when its wait is over, `stored` of each object that came up."""
        self._store = store
        self._lines = lines
        self._answer = answer
        self._is_current = is_current
        self._stored = stored
        self._waiting: dict[tuple[int, int], Waiting] = {}
        """By (connection, lease)."""
        self._reading: dict[bytes, Reading] = {}
        """By the object's key."""
        self._finding: dict[Job, tuple[Waiting, list[tuple[int, int]]]] = {}
        self._turns: dict[Line, dict[Waiting, None]] = {line: {} for line in lines}
        """Those of which a tier is asked as soon as it has a thread for it, in order."""
        self._damaged: dict[Line, deque[Item]] = {line: deque(maxlen=DAMAGED_MAX) for line in lines}
        self._slots: dict[bytes, Slot] = {}
        """Where it goes, by key."""
        self._reading_bytes: Counter[Line] = Counter()
        self.counters: Counter[str] = Counter()
        """How lookups that would have waited, or did, fared; each that got less than tiers have by its reason."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, waiting: Waiting, masks: Sequence[bytes], now: float) -> bool:
        """Whether the lookup is to wait; if not, `waiting.why` may say why. `masks` is what RAM has, per group."""
        lines = [line for line in self._lines if line.reads(now)]
        if not lines or len(self._waiting) >= WAITING_MAX:
            reason = "crowded" if lines else "tiers_away"
            self.counters[f"promotions_{reason}"] += 1
            waiting.why = "too many lookups wait for tiers" if lines else "no tier can be asked at the moment"
            return False
        waiting.target = waiting.chunks
        self._locate(waiting, masks, lines)
        for line in lines if waiting.asked else ():
            if self._turns[line] or not line.has_thread(Work.FIND):
                self._turns[line][waiting] = None
                waiting.finding += 1
            else:
                self._find(waiting, line, now)
        if not waiting.finding and not self._plan(waiting, now):
            self._let_go(waiting)
            return False
        self._waiting[waiting.connection_id, waiting.lease] = waiting
        return True

    def is_waiting(self, connection_id: int, lease: int) -> bool:
        """Whether a lookup of that name waits."""
        return (connection_id, lease) in self._waiting

    def cancel(self, connection_id: int, lease: int | None = None) -> None:
        """Nobody waits for the answer any more: to one lookup, or to any of a connection."""
        keys = [key for key in self._waiting if key[0] == connection_id] if lease is None else [(connection_id, lease)]
        for key in keys:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._forget(waiting)
                self._let_go(waiting)

    def found(self, job: Job, outcome: Outcome, now: float) -> None:
        """A tier has said what it has."""
        waiting, places = self._finding.pop(job)
        waiting.finding -= 1
        line = self._lines[job.line]
        for place, there in zip(places, outcome.found, strict=False):
            if there:
                waiting.located.setdefault(place, line)
        if not waiting.is_over and not waiting.finding and not self._plan(waiting, now):
            self._end(waiting, now)
        self._take_turns(line, now)

    def read(self, job: Job, outcome: Outcome, now: float) -> None:
        """Objects came up, or will not come."""
        line = self._lines[job.line]
        touched: dict[Waiting, None] = {}
        for at, item in enumerate(job.items):
            assert item.slot is not None, "what is read has a slot"
            reading = self._reading.pop(item.key)
            del self._slots[item.key]
            self._reading_bytes[line] -= item.record.size_bytes
            error = outcome.error or outcome.errors[at]
            if isinstance(error, DamagedError):
                self._damaged[line].append(item._replace(slot=None))
            slot = None
            if error is None:
                slot = self._enter(reading, item.slot, line, outcome.tenants[at])
            else:
                self._store.free(item.slot)
            for waiting in reading.waiting:
                touched[waiting] = None
                waiting.reading -= 1
                elsewhere = None
                if error is not None and not waiting.is_over:
                    elsewhere = self._elsewhere(waiting, reading.need, now)
                if elsewhere is not None:
                    waiting.todo.appendleft(elsewhere)
                elif slot is None:
                    self.counters["promotions_failed"] += not waiting.is_over and not waiting.why
                    waiting.todo.clear()
                    waiting.why = f"{line.name}: {error or 'no room'}"
                elif not waiting.is_over:
                    self._hold(waiting, slot)
                    waiting.read_bytes[line] += item.record.size_bytes
                    waiting.origins.setdefault(reading.need.chunk, line.name)
        if touched and all(waiting.is_over for waiting in touched) and outcome.error is None:
            # Too late for anybody; but now it is known how slow the tier is.
            line.speed = line.speed.measured(job.size_bytes, now - job.submitted_at, now)
        self._put_aside(line, now)
        for waiting in touched:
            if not waiting.is_over:
                self._go_on(waiting, now)

    def tick(self, now: float) -> None:
        """Go on where there is room or a thread again, and answer what is due."""
        for waiting in list(self._waiting.values()):
            if waiting.deadline <= now:
                self.counters["deadlines_missed"] += 1
                asked = not any(waiting in turns for turns in self._turns.values())
                waiting.why = "it was not read in time" if asked else "no tier had a thread to look for it in time"
                self._end(waiting, now)
            elif waiting.todo:
                self._go_on(waiting, now)
        for line in self._lines:
            self._take_turns(line, now)
            self._put_aside(line, now)

    def wakes_at(self) -> float:
        """When the next answer is due."""
        return min((waiting.deadline for waiting in self._waiting.values()), default=float("inf"))

    def held(self) -> Iterator[Slot]:
        """Slots that are held, once for each time."""
        for waiting in self._waiting.values():
            yield from waiting.held

    def slots(self) -> Iterator[Slot]:
        """Slots that are being read into."""
        return iter(self._slots.values())

    # Find

    def _locate(self, waiting: Waiting, masks: Sequence[bytes], lines: list[Line]) -> None:
        """What tiers say at once, as far as the prefix of a group of which every hit needs all may reach."""
        reach = waiting.chunks
        groups = waiting.geometry.groups
        for index in sorted(range(len(groups)), key=lambda index: groups[index].kind is not Kind.FULL):
            mask, group = masks[index], groups[index]
            counts = stored_counts(waiting.geometry, group)
            chunk = mask.find(0, 0, reach)
            while chunk >= 0:
                if counts[chunk % len(counts)]:
                    known = self._peek(waiting, index, chunk, lines)
                    if not known and group.kind is Kind.FULL:
                        reach = chunk
                        break
                chunk = mask.find(0, chunk + 1, reach)

    def _peek(self, waiting: Waiting, index: int, chunk: int, lines: list[Line]) -> bool:
        key = waiting.name_of(index, chunk).key
        maybe = False
        for line in lines:
            there = line.tier.peek(key)
            if there:
                waiting.located[index, chunk] = line
                return True
            maybe = maybe or there is None
        if maybe:
            waiting.asked[index, chunk] = None
        return maybe

    def _find(self, waiting: Waiting, line: Line, now: float) -> None:
        places = sorted(waiting.asked, key=lambda place: (place[1], place[0]))[:FIND_KEYS_MAX]
        wanted: list[tuple[tuple[int, int], RecordName]] = []
        for place in places:
            name = waiting.name_of(*place)
            there = line.tier.peek(name.key)
            if there:
                waiting.located.setdefault(place, line)
            elif there is None:
                wanted.append((place, name))
        if wanted:
            job = Job(Work.FIND, line.number, [Item(Record(name, 0, 0, 0)) for _, name in wanted])
            self._finding[job] = waiting, [place for place, _ in wanted]
            waiting.finding += 1
            line.submit(job, now)

    def _take_turns(self, line: Line, now: float) -> None:
        """Ask `line` about those that wait for it, as long as it has threads; about none while it is not well."""
        turns = self._turns[line]
        while turns and (line.has_thread(Work.FIND) or not line.reads(now)):
            waiting = next(iter(turns))
            del turns[waiting]
            waiting.finding -= 1
            if line.reads(now):
                self._find(waiting, line, now)
            else:
                self.counters["promotions_tiers_away"] += 1
                waiting.why = f"{line.name} does not answer"
            if not waiting.finding and not self._plan(waiting, now):
                self._end(waiting, now)

    # Plan

    def _plan(self, waiting: Waiting, now: float) -> bool:
        """Decide what is read; whether it is anything."""
        geometry, namespace = waiting.geometry, waiting.namespace
        entries = [namespace.entries.get(waiting.hash_of(chunk)) for chunk in range(waiting.chunks)]
        there = [
            bytearray(entry is not None and entry.slots[index] is not None for entry in entries)
            for index in range(len(geometry.groups))
        ]
        for index, chunk in waiting.located:
            there[index][chunk] = 1
        masks = [bytes(mask) for mask in there]
        reach = largest_hit(geometry, masks, waiting.chunks)
        if reach <= waiting.resident:
            return False
        boundaries = {largest_hit(geometry, masks, -(-reach * part // CUTS)) for part in range(1, CUTS + 1)}
        costs = self._costs(waiting, reach, now)

        def read_seconds(chunks: int) -> float:
            needs = (
                (cost, needed_chunks(geometry, group, chunks))
                for cost, group in zip(costs, geometry.groups, strict=True)
            )
            return sum(cost[need.stop] - cost[need.start] for cost, need in needs)

        rate = waiting.tokens_per_second
        chunk_seconds = geometry.chunk_tokens / rate if rate else 0.0
        cut = best_cut(waiting.resident, boundaries, read_seconds, chunk_seconds, waiting.deadline - now)
        if cut.chunks < reach:
            self.counters["promotions_slower"] += 1
            waiting.why = (
                f"reading {reach * geometry.chunk_tokens} tokens would take {read_seconds(reach):.2g} s, "
                f"computing them {(reach - waiting.resident) * chunk_seconds:.2g} s"
            )
        if cut.chunks <= waiting.resident:
            return False
        waiting.started_at, waiting.target = now, cut.chunks
        waiting.todo.extend(self._needs(waiting, masks, cut.chunks))
        # What is hit already is held as well: room for more must not cost it.
        hits = (waiting.resident, cut.chunks)
        for slot in dict.fromkeys(slot for chunks in hits for slot in self._resident(waiting, chunks)):
            self._hold(waiting, slot)
        self._go_on(waiting, now, may_end=False)
        return bool(waiting.todo or waiting.reading)

    def _costs(self, waiting: Waiting, reach: int, now: float) -> list[list[float]]:
        """Per group the seconds for reading what is below RAM of the first chunks, for each number of chunks."""
        geometry = waiting.geometry
        seconds = [[0.0] * reach for _ in geometry.groups]
        sizes = [
            [slot_bytes(count * group.block_bytes, geometry.parts(group)) for count in stored_counts(geometry, group)]
            for group in geometry.groups
        ]
        for (index, chunk), line in waiting.located.items():
            if chunk < reach:
                seconds[index][chunk] = line.speed.seconds(sizes[index][chunk % len(sizes[index])], now)
        return [list(accumulate(each, initial=0.0)) for each in seconds]

    def _needs(self, waiting: Waiting, masks: Sequence[bytes], chunks: int) -> list[Need]:
        """What is missing for a hit of so many chunks, in the order of reading.

        What a shorter hit needs comes first where it adds little, so that a deadline does not make all of it useless.
        """
        geometry = waiting.geometry
        needs: dict[Need, None] = {}
        half = largest_hit(geometry, masks, chunks // 2)
        for boundary in (half, chunks) if half > waiting.resident else (chunks,):
            places = [
                (chunk, index)
                for index, group in enumerate(geometry.groups)
                for chunk in needed_chunks(geometry, group, boundary)
                if (index, chunk) in waiting.located
            ]
            needs.update((Need(waiting.located[index, chunk], index, chunk), None) for chunk, index in sorted(places))
        return list(needs)

    def _resident(self, waiting: Waiting, chunks: int) -> Iterator[Slot]:
        """What RAM has of a hit of so many chunks."""
        entries = waiting.namespace.entries
        for index, group in enumerate(waiting.geometry.groups):
            for chunk in needed_chunks(waiting.geometry, group, chunks):
                entry = entries.get(waiting.hash_of(chunk))
                slot = entry.slots[index] if entry is not None else None
                if slot is not None:
                    yield slot

    # Read

    def _go_on(self, waiting: Waiting, now: float, may_end: bool = True) -> None:
        """Start reading what can be started; answer where nothing more will come."""
        while waiting.todo:
            need = waiting.todo[0]
            name = waiting.name_of(need.group_index, need.chunk)
            entry = waiting.namespace.entries.get(name.chunk_hash)
            slot = entry.slots[need.group_index] if entry is not None else None
            known = self._reading.get(name.key)
            line = need.line if known is None else known.need.line
            if slot is not None:
                self._hold(waiting, slot)
            elif line.is_hung or (known is None and not line.reads(now)):
                self.counters["promotions_tiers_away"] += 1
                waiting.why = f"{line.name} does not answer"
                waiting.todo.clear()
                break
            elif known is not None:
                known.waiting.append(waiting)
                waiting.reading += 1
            elif not line.has_thread(Work.READ) or not self._start(waiting, line, now):
                break
            else:
                continue
            waiting.todo.popleft()
        if may_end and not waiting.todo and not waiting.reading:
            self._end(waiting, now)

    def _start(self, waiting: Waiting, line: Line, now: float) -> bool:
        """Read the next few objects from `line`; whether any."""
        items: list[Item] = []
        size, most = 0, line.job_bytes(Work.READ, now)
        while waiting.todo and waiting.todo[0].line is line and len(items) < JOB_ITEMS_MAX:
            need = waiting.todo[0]
            group = waiting.geometry.groups[need.group_index]
            name = waiting.name_of(need.group_index, need.chunk)
            shape = part_bytes(waiting.geometry, group, need.chunk), waiting.geometry.parts(group)
            size += slot_bytes(*shape)
            taken = self._reading_bytes[line]
            busy = taken and taken + slot_bytes(*shape) > len(self._store) // READING_SHARE
            if (items and size > most) or busy or name.key in self._reading:
                break
            slots = self._store.grant(shape, 1)
            if not slots:
                if not self._store.is_growing:
                    self.counters["promotions_no_room"] += 1
                    waiting.why = "RAM has no room for it"
                    waiting.todo.clear()
                break
            parent = waiting.hash_of(need.chunk - 1)
            self._reading[name.key] = Reading(need, waiting.namespace, name.chunk_hash, parent, [waiting])
            self._slots[name.key] = slots[0]
            items.append(Item(Record(name, *shape, slots[0].generation), slots[0]))
            self._reading_bytes[line] += slot_bytes(*shape)
            waiting.begun_bytes[line] += slot_bytes(*shape)
            waiting.reading += 1
            waiting.todo.popleft()
        if items:
            line.submit(Job(Work.READ, line.number, items), now)
        return bool(items)

    def _put_aside(self, line: Line, now: float) -> None:
        """Of what is damaged as much as one job takes, if none is on its way."""
        damaged = self._damaged[line]
        if damaged and line.has_thread(Work.DISCARD):
            items = [damaged.popleft() for _ in range(min(len(damaged), JOB_ITEMS_MAX))]
            line.submit(Job(Work.DISCARD, line.number, items, damaged=True), now)

    def _enter(self, reading: Reading, slot: Slot, line: Line, tenant: int) -> Slot | None:
        """Make what was read an object; the slot that has it."""
        if not self._is_current(reading.namespace):
            self._store.free(slot)
            return None
        group = reading.need.group_index
        if self._store.commit(slot, reading.namespace, group, reading.chunk_hash, reading.parent, False, tenant):
            slot.kept |= line.bit
            self._stored((slot,))
            return slot
        entry = reading.namespace.entries.get(reading.chunk_hash)
        return entry.slots[group] if entry is not None else None

    def _elsewhere(self, waiting: Waiting, need: Need, now: float) -> Need | None:
        """Where else an object is that did not come. Only tiers behind that one, so that it comes to an end."""
        key = waiting.name_of(need.group_index, need.chunk).key
        behind = self._lines[need.line.number + 1 :]
        line = next((line for line in behind if line.reads(now) and line.tier.peek(key)), None)
        return None if line is None else need._replace(line=line)

    def _hold(self, waiting: Waiting, slot: Slot) -> None:
        self._store.hold((slot,))
        waiting.held.append(slot)

    def _end(self, waiting: Waiting, now: float) -> None:
        del self._waiting[waiting.connection_id, waiting.lease]
        self._forget(waiting)
        waiting.todo.clear()
        for line, begun in waiting.begun_bytes.items():
            read = waiting.read_bytes[line]
            if read or waiting.reading:
                # Of a tier from which nothing came in time all that is known is that it is slower than that.
                line.speed = line.speed.measured(read or begun / 2, now - waiting.started_at, now)
        self._answer(waiting)
        self._let_go(waiting)

    def _forget(self, waiting: Waiting) -> None:
        waiting.is_over = True
        for turns in self._turns.values():
            turns.pop(waiting, None)

    def _let_go(self, waiting: Waiting) -> None:
        held, waiting.held = waiting.held, []
        self._store.unpin(held)
