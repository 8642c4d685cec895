"""The daemon's core over tiers whose jobs are done by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hybridkv.core.coverage import part_bytes
from hybridkv.core.eviction_classes import eviction_classes
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.policies import EvictionClass
from hybridkv.core.tier_urls import TierSpec, parse_tier
from hybridkv.daemon.handlers import Daemon
from hybridkv.shm.slots import is_signed, part_digests, payload_offset, sign, slot_bytes
from hybridkv.store.store import Store
from hybridkv.tiers.contract import Tier
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import LIMITS, JobKind, JobOutcome, TierJob, execute
from hybridkv.wire.messages import Commit, Found, Lookup, Pending, Reply
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_welcome

ARENA = 1 << 20
WAIT_MS = 1000
FIRST_GENERATION = 1 << 20
FINDS_MAX, READS_MAX = LIMITS[JobKind.FIND], LIMITS[JobKind.READ]
FULL = LAYOUTS["qwen3next"]


class Node:
    """A daemon over tiers. `work` does what their threads would."""

    def __init__(
        self,
        *urls: str,
        arena: int = ARENA,
        name: str = "here",
        make: Callable[[TierSpec], Tier] = DiskTier,
    ) -> None:
        self.memory = memoryview(bytearray(arena))
        self.jobs: list[TierJob] = []
        self.now = 100.0
        self.checks = True
        store = Store(self.memory, first_generation=FIRST_GENERATION)
        specs = [parse_tier(url, "tier", name) for url in urls]
        lines = [
            TierState(number, f"disk{number or ''}", make(spec), spec, self.jobs.append)
            for number, spec in enumerate(specs)
        ]
        self.daemon = Daemon(store, make_welcome(arena), lines)
        store.grow_arena(arena)
        self.tick()
        self.work()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.daemon.tick(self.now)

    def work(self, kinds: tuple[JobKind, ...] = tuple(JobKind), seconds: float = 0.0) -> None:
        """Do all jobs of these kinds, and what follows from them, each in so many seconds."""
        while chosen := [job for job in self.jobs if job.kind in kinds]:
            for job in chosen:
                self.jobs.remove(job)
                self.now += seconds
                self.finish(job, execute(self.daemon.tiers[job.tier].tier, job, self.memory))

    def finish(self, job: TierJob, outcome: JobOutcome) -> None:
        self.daemon.on_job_done(job, outcome, self.now)
        self.tick()
        if self.checks:
            check_daemon(self.daemon)

    def store(
        self,
        geometry: Geometry,
        numbers: list[int],
        connection: int = 1,
        eviction_class: EvictionClass | None = EvictionClass.PROMPT,
        states: Sequence[int] | None = None,
    ) -> None:
        """Store whole chunks of a prompt, with bytes that their names tell.

        With `states`, the engine has recurrent states after these chunks alone, and says which
        chunk comes before another, so that prefixes are evicted last. Without an eviction class,
        each object has its own, as of a prompt of these chunks alone.
        """
        for index, group in enumerate(geometry.groups):
            classes = eviction_classes(geometry, group, range(len(numbers)), len(numbers))
            is_state = group.kind is GroupKind.RECURRENT
            for chunk, number in enumerate(numbers):
                size = part_bytes(geometry, group, chunk)
                if size and not (is_state and states is not None and number not in states):
                    (slot,) = grant(self.daemon, connection, size, 1, geometry.parts(group))
                    self.fill(slot, size, geometry.parts(group), content(index, number))
                    parents = b"" if states is None or not chunk else hashes(numbers[chunk - 1])
                    packed = pack_slots([slot])
                    new = Commit(
                        slots=packed,
                        groups=pack_u64([index]),
                        hashes=hashes(number),
                        parents=parents,
                        classes=bytes(
                            [classes[chunk] if eviction_class is None else eviction_class]
                        ),
                    )
                    self.daemon.handle(connection, new)
        self.tick()

    def store_if_room(self, geometry: Geometry, numbers: list[int], works: bool = True) -> None:
        """Store objects as far as there is room. With `works` tiers' threads work after it."""
        for index, group in enumerate(geometry.groups):
            for chunk, number in enumerate(numbers):
                size = part_bytes(geometry, group, chunk)
                slots = grant(self.daemon, 1, size, 1, geometry.parts(group)) if size else []
                self.tick()
                for slot in slots:
                    self.fill(slot, size, geometry.parts(group), content(index, number))
                    commit(self.daemon, 1, [slot], index, [number])
        if works:
            self.work()

    def fill(self, slot: SlotRef, size: int, parts: int, value: int) -> None:
        memory = self.memory[slot.offset : slot.offset + slot_bytes(size, parts)]
        memory[payload_offset(parts) :] = bytes([value]) * (len(memory) - payload_offset(parts))
        sign(memory, part_digests(memory, size, parts), slot.generation)

    def ask(
        self,
        *numbers: int,
        lease: int = 7,
        wait_ms: int = WAIT_MS,
        rate: int = 0,
        computed_elsewhere: bool = False,
    ) -> Reply | None:
        lookup = Lookup(
            5, lease, hashes(*numbers), wait_ms, rate, computed_elsewhere=computed_elsewhere
        )
        return self.daemon.handle(1, lookup, self.now)

    def answer(self) -> Found:
        ((_, found),) = self.daemon.outgoing
        self.daemon.outgoing.clear()
        assert isinstance(found, Found)
        return found

    def prove(self, geometry: Geometry, found: Found, numbers: list[int]) -> None:
        """Every slot of an answer has the bytes of its name, signed."""
        for offset, generation in [*unpack_slots(found.slots)]:
            slot = self.daemon.store.slot_at(offset, generation)
            assert slot is not None
            assert slot.entry is not None
            memory = self.memory[offset : offset + slot.size_bytes]
            digests = part_digests(memory, slot.part_bytes, slot.parts)
            assert is_signed(memory, digests, generation)
            value = content(slot.group_index, slot.entry.chunk_hash[0])
            start = payload_offset(slot.parts)
            assert set(memory[start : start + slot.part_bytes * slot.parts]) == {value}


def content(group_index: int, number: int) -> int:
    return (number * 7 + group_index * 31) % 255 + 1


def is_found(reply: Reply | None) -> Found:
    assert isinstance(reply, Found), reply
    return reply


def remote(records: dict[bytes, bytes], *urls: str, arena: int = ARENA) -> Node:
    """A node over tiers that all have these records, and must be asked for what they have."""
    node = Node(*urls, arena=arena, make=lambda spec: DictTier(records, is_remote=True))
    engine(node.daemon, 1, FULL)
    return node


def crowd(*urls: str) -> tuple[Node, list[list[int]]]:
    """A node with more lookups at once than a tier has threads for them, and their prompts."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    prompts = [[10 * first + 1, 10 * first + 2] for first in range(FINDS_MAX + 4)]
    for prompt in prompts:
        node.store(FULL, prompt)
        node.work()
    node = remote(records, *urls)
    for lease, prompt in enumerate(prompts):
        assert isinstance(node.ask(*prompt, lease=lease), Pending)
    assert [job.kind for job in node.jobs] == [JobKind.FIND] * FINDS_MAX * len(urls)
    return node, prompts


def stored(
    tmp_path: Path, numbers: list[int], geometry: Geometry = FULL, arena: int = ARENA
) -> Node:
    """A node with an empty RAM whose directory has the prompt."""
    url = f"disk://{tmp_path}?bytes=64MiB"
    node = Node(url, arena=arena)
    engine(node.daemon, 1, geometry)
    node.store(geometry, numbers)
    node.work()
    node = Node(url, arena=arena)
    engine(node.daemon, 1, geometry)
    return node
