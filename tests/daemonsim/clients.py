"""Schedulers and workers, which do what the connector does."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from hybridkv.client.credits import SlotCredits
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.coverage import SlotShape, slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import SLOT_BYTES, SlotRef, pack_slots, unpack_slots
from hybridkv.core.policies import Advice
from hybridkv.shm.arena import LOCKS_FROM
from hybridkv.wire.messages import (
    GREETING_NEVER,
    PROTOCOL_VERSION,
    Advise,
    AuditOffer,
    Computed,
    Computing,
    Done,
    Drained,
    Found,
    Free,
    Hello,
    Identify,
    Lookup,
    Prefetch,
    Release,
    Reply,
    ReportAudit,
    ReportCorrupt,
    ReportIdentity,
    ReportRequest,
    RequestExplanation,
    Reserve,
    Reserved,
)
from tests.daemonsim.callers import (
    RATES,
    Caller,
    Client,
    NeededSlot,
    Scene,
    WrittenSlot,
    audited_slots,
    commit_of,
    needed_slots,
)
from tests.daemonsim.oracle import (
    CHUNKS,
    PROMPTS,
    Copy,
    Name,
    cut,
    prompt_hashes,
    shape_of,
    signature,
)
from tests.daemonsim.sockets import SimProcess
from tests.daemonsim.system import ArenaFile
from tests.unit.daemon.harness import engine_hello


@dataclass(eq=False)
class Storing:
    """An object that workers are writing."""

    ref: SlotRef
    shape: SlotShape
    group_index: int
    chunk: int
    name: Name
    boot: str
    ranks_done: set[int] = field(default_factory=set)
    is_unstored: bool = False
    is_spoilt: bool = False


@dataclass(eq=False)
class AskedLookup:
    """A lookup that is not answered yet, or whose answer is not needed any more."""

    prompt: int
    identity: bytes
    hashes: tuple[bytes, ...]
    id: int
    commits: int
    """The number of commits that were sent before."""
    is_wanted: bool = True
    audit_lease: int = 0
    """The lease by which the lookup asks for a live audit. 0 = it does not."""


class Audit(NamedTuple):
    """An audit whose lease is open."""

    asked: AskedLookup
    offer: AuditOffer


class LoadItem(NamedTuple):
    """An object that workers are to load."""

    ref: SlotRef
    group_index: int
    chunk: int
    name: Name


class OwnCommit(NamedTuple):
    """A commit of this session."""

    number: int
    losses: tuple[object, ...]  # The `Books.losses` of that moment.


class OldSlot(NamedTuple):
    """A slot that this session had."""

    ref: SlotRef
    group_index: int


class DrainReport(NamedTuple):
    """A Drained message that a worker has sent."""

    greeting: int  # The worker's greeting of the daemon.
    session: int


@dataclass
class Plan:
    """A scheduler's orders to its workers in a step."""

    boot: str
    session: int
    stores: dict[int, Storing]
    loads: dict[int, list[LoadItem]]
    """By lease."""


@dataclass
class StepReport:
    """A worker's report to its scheduler in a step."""

    rank: int
    boot: str
    stores: dict[int, bool] = field(default_factory=dict)
    """By the number of a store: True where this rank wrote its part."""
    loads: dict[int, bool] = field(default_factory=dict)
    """By lease: True where this rank has loaded its parts."""
    condemned: list[SlotRef] = field(default_factory=list)


class Scheduler(Client):
    """One engine's scheduler."""

    def __init__(
        self,
        scene: Scene,
        process: SimProcess,
        engine_id: str,
        geometry: Geometry,
        identity: bytes,
        target: int,
    ) -> None:
        super().__init__(scene, process)
        self.engine_id = engine_id
        self.geometry = geometry
        self.identity = identity
        self._calls = Caller(scene, self._hello(), self._lost)
        targets: Counter[SlotShape] = Counter()
        for group in geometry.groups:
            targets.update(dict.fromkeys(slot_shapes(geometry, group), target))
        self.credits = SlotCredits(targets)
        self.workers: list[Worker] = []
        self.inbox: deque[StepReport] = deque()
        self._boot = ""
        self._workers_on: dict[int, str] = {}
        self._numbers = 0
        self._leases = 0
        self._commits = 0
        self._asked: dict[int, AskedLookup] = {}
        self._given_up: set[int] = set()
        self._promised: list[int] = []  # Leases of answers that the daemon has no end of.
        """Leases of lookups that were released before their answer came."""
        self.loading: dict[int, set[int]] = {}
        """By lease, the ranks that have not reported."""
        self._load_failed: set[int] = set()
        self._held: list[int] = []
        self._audits: dict[int, Audit] = {}
        """Leases that are kept without a load."""
        self._storing: dict[int, Storing] = {}
        self._own_commits: dict[Name, OwnCommit] = {}
        """The objects that this greeting has committed."""
        self._old_slots: deque[OldSlot] = deque(maxlen=12)
        self.new_identity: bytes | None = None

    @property
    def is_idle(self) -> bool:
        """True where the daemon is there, and no work is under way but a reservation."""
        busy = self._asked or self.loading or self._storing or self._held or self._calls.is_due
        return self._calls.link.welcome is not None and not busy

    @property
    def is_settled(self) -> bool:
        """True where its workers know the present daemon as well."""
        link = self._calls.link
        return self.is_idle and all(
            worker.has_drained(link.greetings) for worker in self.workers if worker.is_alive
        )

    def describe(self) -> str:
        """Return the work that is under way, for a failed assertion."""
        return (
            f"{self.engine_id}: asked {len(self._asked)} loading {self.loading} "
            f"storing {len(self._storing)} "
            f"awaited {list(self._calls.awaited)} welcome {self._calls.link.welcome is not None} "
            f"workers {[worker.describe() for worker in self.workers]}"
        )

    def close(self) -> None:
        """Shut the engine's scheduler down."""
        self._calls.link.close()
        self.has_left = True

    def step(self) -> None:
        """Poll the daemon, take the workers' reports, ask for hits, and plan copies."""
        self._poll()
        while self.inbox:
            self._on_report(self.inbox.popleft())
        if self.new_identity is not None:
            self._identify(self.new_identity)
            self.new_identity = None
        plan_loads: dict[int, list[LoadItem]] = {}
        plan_stores: dict[int, Storing] = {}
        if self._calls.link.welcome is not None:
            self._misbehave()
            while self._held and self.rng.random() < 0.4:
                self._release(self._held.pop(self.rng.randrange(len(self._held))))
            for reply in self._answers:
                self._take(reply, plan_loads, plan_stores)
            if self._promised and self.rng.random() < 0.4:
                self._speak_of_promise()
            if self.scene.habits.expects and not self.scene.calm and self.rng.random() < 0.2:
                self._expect_prompt()
            if self._asked and max(self.scene.habits.waits_ms) and self.rng.random() < 0.1:
                self._give_up()
            if (
                not self.scene.calm
                and len(self._asked) < 3
                and len(self.loading) < self.scene.habits.loads
                and self.rng.random() < 0.6
            ):
                self._ask()
            if self.scene.habits.advises and self.rng.random() < 0.3:
                self._advise()
            for shape, count in self.credits.credit_requests(self.scene.system.seconds()):
                size, parts = shape
                self._want(size, parts, count)
        self._answers = []
        link = self._calls.link
        plan = Plan(self._boot, link.greetings, plan_stores, plan_loads)
        for worker in self.workers:
            worker.inbox.append(plan)

    def _want(self, size: int, parts: int, count: int) -> None:
        if not self._calls.ask(lambda number: Reserve(number, size, parts, count), Reserved):
            self.credits.on_granted((size, parts), b"", self.scene.system.seconds())

    def _poll(self) -> None:
        self._answers = self._calls.poll()
        link = self._calls.link
        if link.welcome is None:
            self._answers = []
        elif link.welcome.boot != self._boot:
            self._boot = link.welcome.boot
            self._calls.tell(ReportIdentity({"engine": self.engine_id}))
            self._promised.clear()

    _answers: list[Reply] = []  # noqa: RUF012  # replaced in every step

    def _ask(self) -> None:
        prompt, chunks = self.rng.randrange(PROMPTS), self.rng.randrange(1, CHUNKS + 1)
        hashes = prompt_hashes(prompt)[:chunks]
        self._leases += 1
        lease = self._leases
        audit_lease = 0
        if self.scene.habits.audits and lease % 2:
            self._leases += 1
            audit_lease = self._leases
        wait_ms, rate = self.rng.choice(self.scene.habits.waits_ms), self.rng.choice(RATES)

        def make(number: int) -> Lookup:
            names = b"".join(hashes)
            return Lookup(
                number,
                lease,
                names,
                wait_ms,
                rate,
                audit_lease=audit_lease,
                promises=True,
                computed_elsewhere=self.scene.habits.consumers,
                is_scan=self.scene.habits.advises and lease % 3 == 0,
            )

        if self._calls.ask(make, Found):
            self._asked[lease] = AskedLookup(
                prompt=prompt,
                identity=self.identity,
                hashes=hashes,
                id=self._calls.asked,
                commits=self._commits,
                audit_lease=audit_lease,
            )

    def _advise(self) -> None:
        """A prompt is retained for a time or for none, or its session has ended."""
        hashes = prompt_hashes(self.rng.randrange(PROMPTS))[: self.rng.randrange(1, CHUNKS + 1)]
        advice = self.rng.choice((*[Advice.RETAIN] * 8, Advice.RELEASE, Advice.DEMOTE))
        ttl_ms = self.rng.choice((0, 5, 300, 3000, 3000, 3000))
        self._calls.tell(
            Advise(advice, b"".join(hashes), tenant=self.rng.randrange(3), ttl_ms=ttl_ms)
        )

    def _give_up(self) -> None:
        """A request is aborted before its lookup is answered."""
        lease = self.rng.choice(list(self._asked))
        self._calls.give_up(self._asked.pop(lease).id, lease)
        self._given_up.add(lease)
        self.scene.counts["lookups_given_up"] += 1

    def _expect_prompt(self) -> None:
        """Say that a prompt will come, which may be true."""
        hashes = prompt_hashes(self.rng.randrange(PROMPTS))[: self.rng.randrange(1, CHUNKS + 1)]
        self._calls.tell(Prefetch(b"".join(hashes), self.rng.choice((0, 100, 3000, 4_000_000))))

    def _speak_of_promise(self) -> None:
        """A prompt begins to be computed, or is stored as far as it will be."""
        at = self.rng.randrange(len(self._promised))
        if self.rng.random() < 0.5:
            self._calls.tell(Computing(self._promised[at]))
        else:
            self._calls.tell(Computed(self._promised.pop(at)))
            self.scene.counts["promises_ended"] += 1

    def _take(
        self, reply: Reply, loads: dict[int, list[LoadItem]], stores: dict[int, Storing]
    ) -> None:
        if isinstance(reply, Reserved):
            self._granted(reply)
        elif isinstance(reply, Found):
            if reply.promised:
                self._promised.append(reply.lease)
            if reply.lease in self._given_up:
                self._given_up.remove(reply.lease)
                if reply.audit is not None:
                    self._calls.tell(Release(reply.audit.lease))
                return
            asked = self._asked.pop(reply.lease)
            self.scene.books.found(
                self.geometry, asked.identity, asked.hashes, reply.masks, reply.depth
            )
            self._prove(asked, reply)
            self._take_audit(asked, reply)
            if asked.is_wanted:
                # A lookup that waited while the engine took other weights finds nothing.
                self._check_own(asked, reply)
            if not asked.is_wanted or not self._attached():
                self._calls.tell(Release(reply.lease))
                return
            self._load(asked, reply, loads)
            self._store(asked, reply, stores)

    def _granted(self, granted: Reserved) -> None:
        refs = [*unpack_slots(granted.slots)]
        shape = granted.part_bytes, granted.parts
        self.credits.on_granted(shape, granted.slots, self.scene.system.seconds())
        # In a new arena, under a clock that was set back, the name of a slot may occur again.
        self._old_slots = deque(
            (old for old in self._old_slots if old.ref not in refs), self._old_slots.maxlen
        )
        self.scene.counts["slots_granted"] += len(refs)

    def _prove(self, asked: AskedLookup, found: Found) -> None:
        """Every slot of an answer has exactly the bytes of its name."""
        self.scene.counts["chunks_hit"] += found.depth
        self.scene.counts["chunks_from_tiers"] += sum(found.tiers.values())
        assert sum(found.tiers.values()) <= found.depth
        self._prove_slots(asked, needed_slots(self.geometry, found))
        self.scene.counts["slots_proven"] += len(found.slots) // SLOT_BYTES

    def _prove_slots(self, asked: AskedLookup, slots: list[NeededSlot]) -> None:
        welcome = self._calls.link.welcome
        assert welcome is not None
        file = self.scene.system.paths[welcome.arena_path]
        for ref, index, chunk in slots:
            size, parts = shape_of(self.geometry, index, chunk)
            for part in range(parts):
                self.scene.books.shown(
                    Copy(
                        file=file,
                        offset=ref.offset,
                        generation=ref.generation,
                        name=self._name(asked, index, chunk),
                        part=part,
                        parts=parts,
                        size=size,
                        checksum=self.scene.habits.checksum,
                        boot=welcome.boot,
                    )
                )

    def _take_audit(self, asked: AskedLookup, found: Found) -> None:
        """Objects that an answer offers to compare are the lookup's. Its lease keeps them."""
        offer = found.audit
        if offer is None:
            return
        assert offer.lease == asked.audit_lease, "an audit that nobody asked for"
        assert offer.chunk in (found.depth, found.depth - 1)
        self._audits[offer.lease] = Audit(asked, offer)
        self._prove_slots(asked, audited_slots(self.geometry, offer))
        self._held.append(offer.lease)
        self.scene.counts["audits_offered"] += 1

    def _release(self, lease: int) -> None:
        """End a lease of a hit that is not loaded, or of an audit, and report the latter."""
        audit = self._audits.pop(lease, None)
        if audit is not None:
            self._prove_slots(audit.asked, audited_slots(self.geometry, audit.offer))
            outcome = list(AuditOutcome)[lease % len(AuditOutcome)]
            self._calls.tell(ReportAudit(f"request {lease}", outcome, "layer 0"))
        self._calls.tell(Release(lease))

    def _name(self, asked: AskedLookup, index: int, chunk: int) -> Name:
        return Name(asked.identity, self.geometry.groups[index].gid, asked.hashes[chunk])

    def _check_own(self, asked: AskedLookup, found: Found) -> None:
        """Objects that this session committed before it asked are found, unless any was lost."""
        losses = self.scene.books.losses()
        unknown = OwnCommit(self._commits + 1, ())
        for group, mask in zip(self.geometry.groups, found.masks, strict=True):
            for is_there, chunk_hash in zip(mask, asked.hashes, strict=True):
                name = Name(asked.identity, group.gid, chunk_hash)
                own = self._own_commits.get(name, unknown)
                is_own = own.number <= asked.commits
                if not is_there and is_own and own.losses == losses:
                    raise AssertionError(f"{self.engine_id} does not find what it committed")
                self.scene.counts["own_writes_read"] += is_there and is_own

    def _load(self, asked: AskedLookup, found: Found, loads: dict[int, list[LoadItem]]) -> None:
        if not found.depth:
            return
        if self.rng.random() < 0.15:
            self._held.append(found.lease)
            return
        loads[found.lease] = [
            LoadItem(ref, index, chunk, self._name(asked, index, chunk))
            for ref, index, chunk in needed_slots(self.geometry, found)
        ]
        self.loading[found.lease] = set(range(self.geometry.ranks))
        self.scene.counts["loads"] += 1

    def _store(self, asked: AskedLookup, found: Found, stores: dict[int, Storing]) -> None:
        if self.scene.calm or self.rng.random() < 0.2:
            return
        for chunk, chunk_hash in enumerate(asked.hashes):
            for index, group in enumerate(self.geometry.groups):
                shape = shape_of(self.geometry, index, chunk)
                if (found.masks[index][chunk] and self.rng.random() > 0.05) or not shape[0]:
                    continue
                packed = self.credits.take_slots(shape, 1)
                for ref in [*unpack_slots(packed)]:
                    self._numbers += 1
                    stores[self._numbers] = Storing(
                        ref=ref,
                        shape=shape,
                        group_index=index,
                        chunk=chunk,
                        name=Name(self.identity, group.gid, chunk_hash),
                        boot=self._boot,
                    )
        self._storing.update(stores)
        self.scene.counts["stores"] += len(stores)

    def _on_report(self, report: StepReport) -> None:
        self._workers_on[report.rank] = report.boot
        ready: list[Storing] = []
        spoilt: list[Storing] = []
        for number, is_written in report.stores.items():
            storing = self._storing.get(number)
            if storing is None:
                continue
            storing.ranks_done.add(report.rank)
            storing.is_unstored |= not is_written
            if len(storing.ranks_done) == self.geometry.ranks:
                del self._storing[number]
                (spoilt if storing.is_unstored or storing.is_spoilt else ready).append(storing)
        if report.condemned:
            packed = pack_slots(report.condemned)
            self._calls.tell(ReportCorrupt(packed))
        for lease, is_good in report.loads.items():
            if lease not in self.loading:
                continue
            self.loading[lease].discard(report.rank)
            if not is_good:
                self._load_failed.add(lease)
            if not self.loading[lease]:
                del self.loading[lease]
                failed = lease in self._load_failed
                self._calls.tell(Release(lease, 0 if failed else 1, 1, failed))
                self._calls.tell(ReportRequest(f"request {lease}", RequestExplanation(lease, 0)))
        if spoilt:
            packed = pack_slots(storing.ref for storing in spoilt)
            self._calls.tell(Free(packed))
        if ready:
            self._commit(ready)

    def _commit(self, ready: list[Storing]) -> None:
        commit = commit_of(
            WrittenSlot(storing.ref, storing.group_index, storing.name.chunk_hash)
            for storing in ready
        )
        if self._calls.tell(commit):
            self._commits += 1
            own = OwnCommit(self._commits, self.scene.books.losses())
            for storing in ready:
                self.scene.books.written.add(storing.name)
                self._own_commits[storing.name] = own
                self._old_slots.append(OldSlot(storing.ref, storing.group_index))
            self.scene.counts["commits"] += len(ready)

    def _misbehave(self) -> None:
        """Send messages about slots that are not this session's any more, under other names."""
        habits = self.scene.habits.misbehave
        if not self._old_slots or self.rng.random() > 0.1:
            return
        ref, group_index = self.rng.choice(self._old_slots)
        if "late" in habits and self.rng.random() < 0.5:
            chunk_hash = prompt_hashes(self.rng.randrange(PROMPTS))[-1]
            self._calls.tell(commit_of([WrittenSlot(ref, group_index, chunk_hash)] * 2))
            self.scene.counts["commits_late"] += 1
        if "twice" in habits and self.rng.random() < 0.5:
            packed = pack_slots([ref, ref])
            self._calls.tell(Free(packed))
            lease = self.rng.randrange(self._leases + 2)
            if (
                lease not in self._asked
                and lease not in self.loading
                and lease not in self._given_up
            ):
                self._calls.tell(Release(lease))
            self.scene.counts["abandons_late"] += 1

    def _identify(self, identity: bytes) -> None:
        self.identity = identity
        self._calls.link.greet_with(self._hello())
        self._calls.ask(lambda number: Identify(number, identity), Done)
        for storing in self._storing.values():
            storing.is_spoilt = True
        for asked in self._asked.values():
            asked.is_wanted = False
        self.scene.counts["identified"] += 1

    def _hello(self) -> Hello:
        return engine_hello(self.geometry, self.engine_id, self.identity)

    def _attached(self) -> bool:
        return [self._workers_on.get(rank) for rank in range(self.geometry.ranks)] == [
            self._boot
        ] * self.geometry.ranks

    def _lost(self) -> None:
        self.credits.forget_slots()
        for storing in self._storing.values():
            self._old_slots.append(OldSlot(storing.ref, storing.group_index))
        self._storing.clear()
        self._asked.clear()
        self._given_up.clear()
        self.loading.clear()
        self._held.clear()
        self._audits.clear()
        self._own_commits.clear()


class Worker(Client):
    """One rank. It maps the arena, copies as its scheduler plans, and reports."""

    def __init__(self, scene: Scene, process: SimProcess, scheduler: Scheduler, rank: int) -> None:
        super().__init__(scene, process)
        self._scheduler = scheduler
        self._geometry = scheduler.geometry
        self.rank = rank
        lock = LOCKS_FROM + self.rng.getrandbits(60)
        hello = Hello(1, PROTOCOL_VERSION, "worker", scheduler.engine_id, lock=lock)
        self._calls = Caller(scene, hello, lambda: None)
        self.inbox: deque[Plan] = deque()
        self._boot = ""
        self._files: dict[str, ArenaFile] = {}
        """Arena files by the daemon's boot: the present one, and the previous one for old loads."""
        self.writes: dict[int, Copy] = {}
        self._loads: dict[int, list[Copy]] = {}
        self._session = 0
        self._draining: set[int] = set()
        self._last_drained = DrainReport(0, 0)

    def describe(self) -> str:
        """Return the work that is under way, for a failed assertion."""
        return (
            f"{self.rank}: writes {len(self.writes)} loads {len(self._loads)} "
            f"drained {self._last_drained} boot {self._boot}"
        )

    def has_drained(self, session: int) -> bool:
        """Return True where the daemon knows that copies of earlier sessions have ended."""
        return self._last_drained == DrainReport(self._calls.link.greetings, session)

    def close(self) -> None:
        """Finish the writes that are running, then leave."""
        for number, copy in list(self.writes.items()):
            while not self._write(copy):
                pass
            del self.writes[number]
        self._loads.clear()
        self._calls.link.close(Drained(GREETING_NEVER))
        for file in self._files.values():
            file.locks.pop(self._calls.link.lock, None)
        self.has_left = True

    def step(self) -> None:
        """Begin the plans, copy a few pieces, and report."""
        report = StepReport(self.rank, "")
        self._calls.poll()
        while self.inbox:
            self._begin(self.inbox.popleft(), report)
        for _ in range(
            self.rng.randrange(self.scene.habits.pieces + 1) if not self.scene.calm else 20
        ):
            self._copy(report)
        report.boot = self._boot
        self._scheduler.inbox.append(report)

    def owns_all(self) -> None:
        """No slot that is still written here was taken away."""
        for copy in self.writes.values():
            self.scene.books.owns(copy)

    def _begin(self, plan: Plan, report: StepReport) -> None:
        self._tell_drained(plan.session)
        self._attach()
        for lease, items in plan.loads.items():
            file = self._files.get(plan.boot)
            if file is None:
                report.loads[lease] = False
            else:
                self._loads[lease] = [self._copy_of(file, plan.boot, item) for item in items]
        for number, storing in plan.stores.items():
            group = self._geometry.groups[storing.group_index]
            file = self._files.get(plan.boot)
            if group.replicated and storing.chunk % self._geometry.ranks != self.rank:
                report.stores[number] = True
            elif file is None or (
                "fail" in self.scene.habits.misbehave and self.rng.random() < 0.1
            ):
                report.stores[number] = False
            else:
                copy = self._copy_of(file, plan.boot, storing)
                copy.pieces = cut(self.rng, 0, copy.size)
                self.scene.books.owns(copy)
                self.writes[number] = copy

    def _copy_of(self, file: ArenaFile, boot: str, item: LoadItem | Storing) -> Copy:
        size, parts = shape_of(self._geometry, item.group_index, item.chunk)
        return Copy(
            file=file,
            offset=item.ref.offset,
            generation=item.ref.generation,
            name=item.name,
            part=0 if self._geometry.groups[item.group_index].replicated else self.rank,
            parts=parts,
            size=size,
            checksum=self.scene.habits.checksum,
            boot=boot,
        )

    def _copy(self, report: StepReport) -> None:
        """Copy a piece of a random store or load."""
        count = len(self.writes) + len(self._loads)
        if not count:
            return
        at = self.rng.randrange(count)
        job = next(islice(chain(self.writes, (-lease for lease in self._loads)), at, None))
        if job > 0 and self._write(self.writes[job]):
            del self.writes[job]
            report.stores[job] = True
        elif job < 0:
            self._read(-job, report)

    def _write(self, copy: Copy) -> bool:
        """Write a piece of a part, or sign it. Returns True where the part is whole then."""
        self.scene.books.owns(copy)
        if copy.pieces:
            start, stop = copy.pieces.pop()
            at = copy.start
            copy.file.bytes[at + start : at + stop] = copy.expected[start:stop]
            return False
        if copy.checksum:
            copy.file.bytes[copy.signed] = signature(copy.generation, copy.payload)
        return True

    def _read(self, lease: int, report: StepReport) -> None:
        copies = self._loads[lease]
        if not copies:
            del self._loads[lease]
            report.loads[lease] = True
            return
        load = copies[0]
        if not isinstance(load, Loading):
            copies[0] = load = Loading.of(load, self.rng, self.scene.habits.partial)
        error = load.go_on(self.scene.system.now)
        if error is None and not load.is_over:
            return
        self.scene.counts["parts_loaded" if error is None else f"parts_failed_{error}"] += 1
        if error is None:
            # The end of a part is copied after the proof of the whole part.
            # A bit that flips in between is not seen.
            if not load.first or self.scene.books.flipped_at < load.begun_at:
                self.scene.books.accepted(load, bytes(load.loaded[load.first :]), load.first)
            copies.pop(0)
            return
        server = self.scene.system.server
        is_leased = (
            server is not None
            and server.daemon.welcome.boot == load.boot
            and self.scene.books.is_exact
        )
        assert not is_leased, f"a load under a living lease failed: {error}"
        if error == "bytes" and self.scene.books.is_exact:
            assert not load.is_there(), "other bytes under the generation of what was stored"
        report.condemned.append(SlotRef(load.offset, load.generation))
        report.loads[lease] = False
        del self._loads[lease]

    def _attach(self) -> None:
        """Follow the daemon, as connector.worker.role does."""
        welcome = self._calls.link.welcome
        if welcome is None or welcome.boot == self._boot:
            return
        old = self._files.get(self._boot)
        try:
            file = self.scene.system.attach(
                welcome.arena_path, welcome.arena_bytes, self.process, self._calls.link.lock
            )
        except HybridKVError:
            self.scene.counts["attach_failed"] += 1
            return
        if not self._calls.link.has_connection:
            self.scene.counts["closed_before_lock"] += 1
            if file is not old:
                del file.locks[self._calls.link.lock]
            return
        self._files = (
            {self._boot: old, welcome.boot: file} if old is not None else {welcome.boot: file}
        )
        self._boot = welcome.boot

    def _tell_drained(self, session: int) -> None:
        running = {*self.writes, *(-lease for lease in self._loads)}
        if session != self._session:
            self._session, self._draining = session, running
        self._draining &= running
        drained = DrainReport(self._calls.link.greetings, self._session)
        if (
            not self._draining
            and self._session
            and drained != self._last_drained
            and self._calls.tell(Drained(session))
        ):
            self._last_drained = drained


@dataclass(eq=False)
class Loading(Copy):
    """A load in progress. It checks the generation before and after, and the bytes' checksum."""

    first: int = 0
    """The byte of the part at which it begins."""
    loaded: bytearray = field(default_factory=bytearray)
    begun_at: int = 0
    is_over: bool = False

    @classmethod
    def of(cls, copy: Copy, rng: random.Random, partial: float) -> "Loading":
        """Return a load of all of a part, or of its end."""
        first = rng.randrange(copy.size) if rng.random() < partial else 0
        plain = {name: value for name, value in vars(copy).items() if name != "pieces"}
        return cls(
            **plain, pieces=cut(rng, first, copy.size), first=first, loaded=bytearray(copy.size)
        )

    def go_on(self, now: int) -> str | None:
        """Load a piece, or check. Returns "generation" or "bytes" where the check fails."""
        if not self.begun_at:
            self.begun_at = now
            if not self.is_there():
                return "generation"
            if self.first and self.checksum and not self.is_signed(self.payload):
                return "bytes"
            return None
        if self.pieces:
            start, stop = self.pieces.pop()
            piece = self.payload[start:stop]
            self.loaded[start:stop] = piece
            return None
        if not self.first and self.checksum and not self.is_signed(self.loaded):
            return "bytes"
        self.is_over = True
        return None if self.is_there() else "generation"
