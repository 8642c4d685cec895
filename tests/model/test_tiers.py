"""The daemon's core over tiers: any order of stores, waits, jobs that end or fail, and crashes.

tests/model/test_daemon.py foretells every answer of a daemon without tiers. Which objects tiers
give and take cannot be foretold so. The rules here: an answer is right or a miss, byte for byte. It
comes once, and at its deadline at the latest. What threads are at work on stays as it is, and in
the end nothing is held.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.core.coverage import needed_chunks, part_bytes
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.loop import FinishedJob
from hybridkv.shm.slots import (
    SLOT_ALIGN,
    SlotState,
    is_signed,
    part_digests,
    payload_offset,
    sign,
    slot_bytes,
)
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import FullError, TierError
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobItem, JobKind, TierJob, execute
from hybridkv.tiers.record import Record, RecordName, proven_digests, read_head
from hybridkv.wire.messages import (
    Clear,
    Commit,
    Done,
    Found,
    Identify,
    Lookup,
    Pending,
    Release,
    ReportCorrupt,
    Reserve,
    Reserved,
    Welcome,
)
from tests.chance import examples
from tests.invariants import check_daemon
from tests.model.test_daemon import CHUNKS, GEOMETRIES, PARENTS, PROMPTS, prompt_hashes
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine_hello, make_welcome

URLS = (
    "sim://?write=through",
    "sim://?write=through&timeout=0.5",
    "sim://?write=through&hourly=200KiB",
    "sim://?write=back",
    "sim://?write=back&timeout=0.5",
    "sim://?write=off",
)
IDENTITIES = (b"1" * HASH_BYTES, b"2" * HASH_BYTES)
PICK = st.integers(0, 99)


class ObjectName(NamedTuple):
    """The name of an object."""

    identity: bytes
    group_index: int
    chunk_hash: bytes


@dataclass(eq=False)
class Engine:
    """The connection of an engine, with its leases and its lookups that wait."""

    number: int
    identity: bytes
    signs: bool
    leases: set[int] = field(default_factory=set)
    waits: dict[int, "Wait"] = field(default_factory=dict)
    """By lease."""


@dataclass(eq=False)
class Wait:
    """A lookup that was answered with Pending."""

    id: int
    identity: bytes
    hashes: list[bytes]
    deadline: float


def content(identity: bytes, group_index: int, chunk_hash: bytes, size: int) -> bytes:
    """The bytes of an object, all of its parts."""
    seed = bytes([identity[0], group_index]) + chunk_hash
    return (seed * (size // len(seed) + 1))[:size]


class TiersMachine(RuleBasedStateMachine):
    """A daemon with two engines and one to three tiers."""

    @initialize(
        name=st.sampled_from(sorted(GEOMETRIES)),
        pages=st.sampled_from((24, 40, 96)),
        urls=st.lists(st.tuples(st.sampled_from(URLS), st.booleans()), min_size=1, max_size=3),
        signs=st.booleans(),
        stocked=st.integers(0, PROMPTS),
    )
    def begin(
        self, name: str, pages: int, urls: list[tuple[str, bool]], signs: bool, stocked: int
    ) -> None:
        self.geometry: Geometry = GEOMETRIES[name]
        self.arena = pages * SLOT_ALIGN
        self.urls = urls
        self.vaults: list[dict[bytes, bytes]] = [{} for _ in urls]
        self.signs = signs
        self.now = 100.0
        self.clock = 1 << 40
        self.numbers = 0
        self.written: set[ObjectName] = set()
        """Every object that was ever stored."""
        self.spoilt: set[SlotRef] = set()
        """Objects whose bytes were changed in RAM."""
        self.promoted = 0
        for prompt in range(stocked):
            self.other_node(prompt, prompt, prompt)
        self.live(fresh=True)

    # The daemon's lives

    def live(self, fresh: bool) -> None:
        if fresh:
            self.memory = memoryview(bytearray(self.arena))
            self.trailer = Trailer(memoryview(bytearray(trailer_bytes(self.arena))), self.arena)
            self.trailer.write_fresh()
        self.clock += 1 << 20
        self.jobs: list[TierJob] = []
        self.done: list[FinishedJob] = []
        """Jobs that threads have ended, and that the loop has not taken yet."""
        store = Store(self.memory, self.clock, self.trailer)
        specs = [
            parse_tier(url.replace("sim://", f"sim://{at}"), "tier")
            for at, (url, _) in enumerate(self.urls)
        ]
        self.tiers = [
            DictTier(vault, is_remote)
            for vault, (_, is_remote) in zip(self.vaults, self.urls, strict=True)
        ]
        lines = [
            TierState(at, f"sim{at}", tier, spec, self.jobs.append)
            for at, (tier, spec) in enumerate(zip(self.tiers, specs, strict=True))
        ]
        self.daemon = Daemon(store, make_welcome(self.arena), lines)
        if not fresh:
            self.daemon.sessions.recover_sessions(())
        store.grow_arena(self.arena)
        self.tick()
        for job in list(self.jobs):
            self.run(job)
            self.deliver(0)
        self.engines = [self.connect(identity) for identity in IDENTITIES]

    @precondition(lambda self: self.written)
    @rule(fresh=st.booleans())
    def crash(self, fresh: bool) -> None:
        """The jobs of threads are gone with the process, and with `fresh` RAM too."""
        self.live(fresh)

    @rule(pick=PICK, vault=PICK, prompt=st.integers(0, PROMPTS - 1))
    def other_node(self, pick: int, vault: int, prompt: int) -> None:
        """Another daemon stores a prompt in a tier that both use."""
        identity = IDENTITIES[pick % len(IDENTITIES)]
        tier = DictTier(self.vaults[vault % len(self.vaults)], is_remote=True)
        for index, group in enumerate(self.geometry.groups):
            for chunk, chunk_hash in enumerate(prompt_hashes(prompt, CHUNKS)):
                size, parts = part_bytes(self.geometry, group, chunk), self.geometry.parts(group)
                if size:
                    memory = memoryview(bytearray(slot_bytes(size, parts)))
                    whole = content(identity, index, chunk_hash, size * parts)
                    memory[payload_offset(parts) : payload_offset(parts) + len(whole)] = whole
                    record = Record(
                        RecordName(identity, group.gid, chunk_hash), size, parts, prompt + 1
                    )
                    write = TierJob(
                        JobKind.WRITE, 0, [JobItem(record, Slot(0, size, parts, prompt + 1))]
                    )
                    assert execute(tier, write, memory).errors == [None]
                    self.written.add(ObjectName(identity, index, chunk_hash))

    @rule(pick=PICK, prompt=st.integers(0, PROMPTS - 1), fresh=st.booleans())
    def come_up(self, pick: int, prompt: int, fresh: bool) -> None:
        """A lookup that waits until all jobs are done."""
        if fresh:
            self.live(fresh=True)
        self.ask(pick, prompt, chunks=CHUNKS, lease=4, wait_ms=30_000, rate=0)
        self.go_on()
        assert not any(engine.waits for engine in self.engines), (
            "nothing more can come, and somebody waits"
        )
        self.release(pick, 4)

    def tick(self) -> None:
        """The part of the loop that follows every event."""
        self.daemon.tick(self.now)
        while self.daemon.outgoing:
            number, found = self.daemon.outgoing.popleft()
            (engine,) = [engine for engine in self.engines if engine.number == number]
            assert isinstance(found, Found)
            wait = engine.waits.pop(found.lease, None)
            assert wait is not None, "a lookup is answered twice, or for nobody"
            assert wait.id == found.id
            self.prove(engine, wait.identity, wait.hashes, found)

    # Clients

    def connect(self, identity: bytes) -> Engine:
        self.numbers += 1
        self.daemon.sessions.on_connect(self.numbers)
        hello = engine_hello(self.geometry, f"e{self.numbers}", identity)
        assert isinstance(self.daemon.handle(self.numbers, hello, self.now), Welcome)
        return Engine(self.numbers, identity, self.signs)

    @rule(pick=PICK)
    def hang_up(self, pick: int) -> None:
        at = pick % len(self.engines)
        self.daemon.on_disconnect(self.engines[at].number)
        self.engines[at] = self.connect(self.engines[at].identity)
        self.tick()

    @rule(pick=PICK, to=PICK)
    def identify(self, pick: int, to: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        engine.identity = IDENTITIES[to % len(IDENTITIES)]
        assert self.daemon.handle(engine.number, Identify(3, engine.identity), self.now) == Done(
            3, 0
        )
        self.tick()

    @rule(
        pick=PICK,
        prompt=st.integers(0, PROMPTS - 1),
        chunks=st.integers(1, CHUNKS),
        tenant=st.integers(0, 1),
    )
    def store(self, pick: int, prompt: int, chunks: int, tenant: int) -> None:
        """Reserve, write and commit slots, as a connector does."""
        engine = self.engines[pick % len(self.engines)]
        for index, group in enumerate(self.geometry.groups):
            for chunk, chunk_hash in enumerate(prompt_hashes(prompt, chunks)):
                size, parts = part_bytes(self.geometry, group, chunk), self.geometry.parts(group)
                if not size:
                    continue
                granted = self.daemon.handle(engine.number, Reserve(9, size, parts, 1), self.now)
                assert isinstance(granted, Reserved)
                if not granted.slots:
                    continue
                ((offset, generation),) = [*unpack_slots(granted.slots)]
                slot = self.memory[offset : offset + slot_bytes(size, parts)]
                whole = content(engine.identity, index, chunk_hash, size * parts)
                slot[payload_offset(parts) : payload_offset(parts) + len(whole)] = whole
                if engine.signs:
                    sign(slot, part_digests(slot, size, parts), generation)
                self.written.add(ObjectName(engine.identity, index, chunk_hash))
                commit = Commit(
                    granted.slots,
                    pack_u64([index]),
                    chunk_hash,
                    parents=PARENTS[chunk_hash],
                    tenants=pack_u64([tenant]),
                )
                assert self.daemon.handle(engine.number, commit, self.now) is None
        self.tick()

    @rule(
        pick=PICK,
        prompt=st.integers(0, PROMPTS - 1),
        chunks=st.integers(1, CHUNKS),
        lease=st.integers(1, 4),
        wait_ms=st.sampled_from((0, 1, 300, 3000, 30_000)),
        rate=st.sampled_from((0, 0, 1, 1000, 1 << 40)),
    )
    def ask(self, pick: int, prompt: int, chunks: int, lease: int, wait_ms: int, rate: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        if lease in engine.leases or lease in engine.waits:
            return
        hashes = prompt_hashes(prompt, chunks)
        self.numbers += 1
        reply = self.daemon.handle(
            engine.number, Lookup(self.numbers, lease, b"".join(hashes), wait_ms, rate), self.now
        )
        if isinstance(reply, Pending):
            assert wait_ms
            engine.waits[lease] = Wait(
                self.numbers, engine.identity, hashes, self.now + wait_ms / 1e3
            )
        else:
            assert isinstance(reply, Found)
            assert not reply.tiers
            self.prove(engine, engine.identity, hashes, reply)
        self.tick()

    def prove(self, engine: Engine, identity: bytes, hashes: list[bytes], found: Found) -> None:
        """An answer is right or a miss."""
        assert not found.chunks or identity == engine.identity, "other weights' bytes are found"
        self.promoted += sum(found.tiers.values())
        for index, mask in enumerate(found.masks):
            assert all(
                ObjectName(identity, index, chunk_hash) in self.written
                for is_there, chunk_hash in zip(mask, hashes, strict=True)
                if is_there
            ), "what nobody stored is found"
        names = [
            (index, chunk)
            for index, group in enumerate(self.geometry.groups)
            for chunk in (needed_chunks(self.geometry, group, found.chunks) if found.chunks else ())
        ]
        refs = [*unpack_slots(found.slots)]
        if found.chunks:
            assert found.lease not in engine.leases
            engine.leases.add(found.lease)
        for ref, (index, chunk) in zip(refs, names, strict=True):
            slot = self.daemon.store.slot_at(ref.offset, ref.generation)
            assert slot is not None
            assert slot.pins, "what is found may go"
            if ref not in self.spoilt:
                self.prove_slot(slot, identity, index, hashes[chunk])

    def prove_slot(self, slot: Slot, identity: bytes, index: int, chunk_hash: bytes) -> None:
        memory = self.memory[slot.offset : slot.offset + slot.size_bytes]
        digests = part_digests(memory, slot.part_bytes, slot.parts)
        signed = is_signed(memory, digests, slot.generation)
        assert signed or (signed is None and not self.signs), "an answer is not signed"
        start, size = payload_offset(slot.parts), slot.part_bytes * slot.parts
        assert memory[start : start + size] == content(identity, index, chunk_hash, size), "LIE"

    @rule(pick=PICK, lease=st.integers(1, 4))
    def release(self, pick: int, lease: int) -> None:
        """The end of a load, or of a request that still waits."""
        engine = self.engines[pick % len(self.engines)]
        assert self.daemon.handle(engine.number, Release(lease), self.now) is None
        engine.leases.discard(lease)
        engine.waits.pop(lease, None)
        self.tick()

    # Threads

    def run(self, job: TierJob) -> None:
        self.jobs.remove(job)
        self.done.append(FinishedJob(job, execute(self.tiers[job.tier], job, self.memory)))

    def deliver(self, at: int) -> None:
        job, outcome = self.done.pop(at)
        self.daemon.on_job_done(job, outcome, self.now)
        self.tick()

    @precondition(lambda self: self.jobs)
    @rule(
        pick=PICK,
        ill=st.sampled_from((None, None, None, TierError, FullError)),
        seconds=st.sampled_from((0, 0.01)),
    )
    def work(self, pick: int, ill: type[TierError] | None, seconds: float) -> None:
        """A thread does its job, or fails, perhaps in the middle."""
        job = self.jobs[pick % len(self.jobs)]
        self.tiers[job.tier].ill = ill
        self.run(job)
        self.tiers[job.tier].ill = None
        self.now += seconds

    @precondition(lambda self: self.done)
    @rule(pick=PICK)
    def hear(self, pick: int) -> None:
        """The loop takes a job's outcome, perhaps long after its end."""
        self.deliver(pick % len(self.done))

    @rule()
    def go_on(self) -> None:
        """Threads do all jobs, and those that follow, until nothing is left."""
        while self.jobs or self.done:
            for job in list(self.jobs):
                self.run(job)
            while self.done:
                self.deliver(0)

    # Time and losses

    @rule(seconds=st.sampled_from((0.001, 0.3, 1.0, 6.0, 40.0)))
    def pass_time(self, seconds: float) -> None:
        """The loop sleeps, perhaps longer than it wants to."""
        self.now += seconds
        self.tick()

    @rule(
        pick=PICK,
        key=PICK,
        how=st.sampled_from(("lose", "flip", "cut", "swap")),
        at=st.integers(0, 1 << 20),
    )
    def spoil(self, pick: int, key: int, how: str, at: int) -> None:
        records = self.vaults[pick % len(self.vaults)]
        if not records:
            return
        name = sorted(records)[key % len(records)]
        image = bytearray(records.pop(name))
        if how == "flip" and image:
            image[at % len(image)] ^= 1
        elif how == "cut" and image:
            del image[at % len(image) :]
        elif how == "swap" and records:
            image = bytearray(records[sorted(records)[at % len(records)]])
        if how != "lose":
            records[name] = bytes(image)

    @precondition(lambda self: self.signs)
    @rule(pick=PICK, at=st.integers(0, 1 << 20))
    def flip(self, pick: int, at: int) -> None:
        """A bit of an object changes in RAM. Its reader sees it, and tiers never get the object."""
        slots = [
            slot for slot in self.daemon.store.slots.values() if slot.state is SlotState.COMMITTED
        ]
        if slots:
            slot = slots[pick % len(slots)]
            start = payload_offset(slot.parts)
            self.memory[slot.offset + start + at % (slot.part_bytes * slot.parts)] ^= 1
            self.spoilt.add(SlotRef(slot.offset, slot.generation))

    @rule(pick=PICK, which=PICK)
    def condemn(self, pick: int, which: int) -> None:
        slots = list(self.daemon.store.slots.values())
        if slots:
            slot = slots[which % len(slots)]
            condemn = ReportCorrupt(pack_slots([(slot.offset, slot.generation)]))
            assert (
                self.daemon.handle(self.engines[pick % len(self.engines)].number, condemn, self.now)
                is None
            )
            self.tick()

    @precondition(lambda self: len(self.written) > 12)
    @rule()
    def clear(self) -> None:
        assert isinstance(self.daemon.handle(self.engines[0].number, Clear(4), self.now), Done)
        self.tick()

    # Always

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "daemon"):
            return
        check_daemon(self.daemon)
        waits = {
            (engine.number, lease): wait
            for engine in self.engines
            for lease, wait in engine.waits.items()
        }
        assert self.daemon.view.metric_values().named()["lookups_waiting"] == len(waits)
        assert all(wait.deadline > self.now - 0.02 for wait in waits.values()), "STALL"
        wakes_at = self.daemon.wakes_at()
        assert all(wakes_at <= wait.deadline for wait in waits.values()), "nobody wakes the loop"
        for job in [*self.jobs, *(finished.job for finished in self.done)]:
            if job.kind in (JobKind.READ, JobKind.WRITE):
                for item in job.items:
                    assert item.slot is not None
                    assert (
                        self.daemon.store.slot_at(item.slot.offset, item.record.seed) is item.slot
                    )
                    is_read = job.kind is JobKind.READ
                    assert item.slot.state is (
                        SlotState.WRITING if is_read else SlotState.COMMITTED
                    )
                    assert is_read or item.slot.pins
        for tier in self.tiers:
            for key, image in tier.records.items():
                record = read_head(memoryview(image))
                if (
                    record is not None
                    and record.name.key == key
                    and proven_digests(record, memoryview(image))
                ):
                    index = [group.gid for group in self.geometry.groups].index(record.name.gid)
                    start, size = payload_offset(record.parts), record.part_bytes * record.parts
                    whole = content(record.name.namespace, index, record.name.chunk_hash, size)
                    assert image[start : start + size] == whole, (
                        "LIE: a record with other bytes is sound"
                    )

    def teardown(self) -> None:
        """All jobs end and all connections too. Nothing is held any more."""
        if not hasattr(self, "daemon"):
            return
        event("chunks came up" if self.promoted else "nothing came up")
        for engine in self.engines:
            self.daemon.on_disconnect(engine.number)
            engine.waits.clear()
        self.go_on()
        self.now += 100.0
        self.tick()
        self.go_on()
        self.holds()
        values = self.daemon.view.metric_values().named()
        assert not any(
            values[name] for name in ("sessions", "leases", "bytes_writing", "lookups_waiting")
        )
        assert all(not slot.pins for slot in self.daemon.store.slots.values())
        assert not self.daemon.promotion.reads.running
        assert not any(self.daemon.promotion.turns.values())
        assert not any(self.daemon.promotion.reads.damaged.values())
        assert not +self.daemon.demotion.held_bytes


TiersMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=60)
TestTiers = TiersMachine.TestCase
