"""Processes that store, look up and load the same few objects in an arena that is too small.

`python -m tests.fault.races --seeds A:B` runs it, each seed for SECONDS with PROCESSES. Slots
change hands all the time, and processes are killed with -9 or stopped for a while. The name of an
object determines its bytes, so every load is checked byte by byte. Under a lease a load never fails
and is never wrong. A load that begins after its lease has ended may fail.
"""

import contextlib
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridkv.client.control import ControlClient
from hybridkv.client.credits import SlotCredits
from hybridkv.client.link import Link
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.core.copies import CopyOp, CopyRun, plan_load, storable_spans
from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import SLOT_BYTES, SlotRef, pack_slots, pack_u64
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SlotHeader,
    SlotState,
    committed_slots,
    slot_bytes,
    unpack_header,
)
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Done,
    Found,
    Free,
    Hello,
    Lookup,
    Release,
    ReportCorrupt,
    Reserve,
    Reserved,
    geometry_to_wire,
)
from tests.layouts import K, make, wide
from tests.seeds import Options, Program, RunSeed, main
from tests.waiting import DEADLINE_SECONDS

SECONDS = 5.0
PROCESSES = 4
PR_SET_PDEATHSIG = 1  # prctl(2) sets the signal that comes when the parent ends.
RAM = "1MiB"
PROMPTS = 8
CHUNKS = 4
BLOCKS = 32
SLOTS_AHEAD = 2
LATE_SHARE = 0.1
LATE_LOOKUPS = 100
"""How many lookups at most pass between the end of a lease and a load that begins after it."""
IDENTITIES = (b"\1" * 32, b"\2" * 32)
RANKS = 2
GEOMETRY = wide(
    make(
        64,
        64,
        (K.FULL, 64, 0),
        (K.SLIDING, 32, 96),
        (K.RECURRENT, 128, 0),
        ranks=RANKS,
        replicated=(0,),
    ),
    40,
    16,
    8,
)
"""Shared attention, a window and a state: slots of three sizes, written by one rank or two."""
GROUPS = GEOMETRY.groups
REPLICATED = frozenset(index for index, group in enumerate(GROUPS) if group.replicated)
PARTS = [PartLayout(rank, RANKS, "on", REPLICATED) for rank in range(RANKS)]

COUNTS = (
    "lookups",
    "hits",
    "loads",
    "late_loads",
    "lost",
    "failed",
    "wrong",
    "stored",
    "abandoned",
)
"""`lost`: loads without a lease that said so. `failed`: loads under a lease that failed (a bug)."""
U64 = 8


class Counts:
    """Counters in memory that outlives the process which counts."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, (len(COUNTS) + 1) * U64)).cast("Q")

    def __getitem__(self, name: str) -> int:
        return self._memory[COUNTS.index(name)]

    def add(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self._memory[COUNTS.index(name)] += number

    @property
    def stopped(self) -> bool:
        """Whether the process is to end by itself."""
        return bool(self._memory[len(COUNTS)])

    def stop(self) -> None:
        """Ask the process to end by itself."""
        self._memory[len(COUNTS)] = 1


class PartName(NamedTuple):
    """One rank's part of an object."""

    identity: bytes
    gid: int
    chunk_hash: bytes
    part: int


@lru_cache(maxsize=1 << 14)
def content(part: PartName, layer: int, block: int, size: int) -> torch.Tensor:
    """Returns the bytes that one block of one layer of a part must have."""
    place = bytes([part.gid, part.part, layer, block])
    name = b"".join([part.identity, part.chunk_hash, place])
    return torch.frombuffer(bytearray(hashlib.shake_128(name).digest(size)), dtype=torch.int8)


class CheckedBlock(NamedTuple):
    """A block of a layer's view, and the bytes that it must have."""

    view: torch.Tensor
    block: int
    expected: torch.Tensor


def prompt_hashes(prompt: int) -> list[bytes]:
    """Returns the chunk hashes of a prompt, of which the first two are those of every prompt."""
    return [
        hashlib.sha256(f"{prompt if at >= 2 else 0} {at}".encode()).digest() for at in range(CHUNKS)
    ]


class Engine:
    """The client's own parts of an engine with its ranks, in one process without a model."""

    def __init__(self, socket_path: str, name: str, rng: random.Random, counts: Counts) -> None:
        self.rng = rng
        self.counts = counts
        self.identity = rng.choice(IDENTITIES)
        self.credits = SlotCredits(
            {shape: SLOTS_AHEAD for group in GROUPS for shape in slot_shapes(GEOMETRY, group)}
        )
        hello = Hello(
            id=1,
            version=PROTOCOL_VERSION,
            role="engine",
            engine_id=name,
            namespace=self.identity,
            geometry=geometry_to_wire(GEOMETRY),
        )
        self.links = [
            Link(socket_path, hello, self._lost),
            Link(socket_path, Hello(1, PROTOCOL_VERSION, "worker", name), self._lost),
        ]
        self.found: dict[int, Found] = {}
        self.leases = count(1)
        self.closing = False
        self._until(lambda: all(link.welcome is not None for link in self.links))
        welcome = self.links[0].welcome
        assert welcome is not None
        self.arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
        self.views = [
            [
                [torch.zeros((BLOCKS, size), dtype=torch.int8) for size in group.layer_bytes]
                for group in GEOMETRY.groups
            ]
            for _ in range(RANKS)
        ]
        self.copiers = [
            HostCopier(self.arena, views, part)
            for views, part in zip(self.views, PARTS, strict=True)
        ]

    def close(self) -> None:
        """Leave as a process does that ends."""
        self.closing = True
        for link in self.links:
            link.close()
        for copier in self.copiers:
            copier.close()
        self.copiers.clear()
        self.arena.close()

    def request(self) -> None:
        """Look up a prompt, load what is there, store what is not."""
        hashes = prompt_hashes(self.rng.randrange(PROMPTS))[: self.rng.randint(1, CHUNKS)]
        tables = [
            self.rng.sample(range(1, BLOCKS), len(hashes) * GEOMETRY.blocks_per_chunk(group))
            for group in GROUPS
        ]
        found = self._look_up(hashes)
        if found.depth:
            local = self.rng.choice((0, 0, self.rng.randrange(found.depth * 2) * 64))
            runs = plan_load(GEOMETRY, found.depth, local, tables, found.slots)
            late = self.rng.random() < LATE_SHARE
            if late:
                self._send(Release(found.lease))
                for _ in range(self.rng.randrange(LATE_LOOKUPS)):
                    self._release(self._look_up(prompt_hashes(self.rng.randrange(PROMPTS))))
            self._load([op for run in runs for op in run.ops()], hashes, late)
            if self.rng.random() < 0.02:
                self._send(ReportCorrupt(found.slots[:SLOT_BYTES]))
            if not late:
                self._release(found)
        self._store(hashes, found.masks, tables)
        self._refill()

    def _load(self, ops: Sequence[CopyOp], hashes: Sequence[bytes], late: bool) -> None:
        for rank, copier in enumerate(self.copiers):
            for op in ops:
                for view in self.views[rank][op.group_index]:
                    view[list(op.blocks)] = 0x55
            outcome: list[HybridKVError | None] = []
            copier.load(ops, outcome.append)
            (error,) = outcome
            self.counts.add("late_loads" if late else "loads")
            if error is not None:
                assert isinstance(error, BadSlotError)
                self.counts.add("lost" if late else "failed")
                if not late:
                    print(f"under a lease: {error}", flush=True)
                continue
            for op in ops:
                for checked in self._blocks(rank, op, hashes[op.chunk]):
                    if not torch.equal(checked.view[checked.block], checked.expected):
                        self.counts.add("wrong")
                        print(f"wrong bytes: {op} of rank {rank}, late {late}", flush=True)

    def _store(
        self, hashes: Sequence[bytes], masks: Sequence[bytes], tables: Sequence[Sequence[int]]
    ) -> None:
        runs: list[CopyRun] = []
        for index, group in enumerate(GROUPS):
            spans, _ = storable_spans(
                GEOMETRY, index, range(len(hashes)), masks[index], tables[index]
            )
            for span in spans:
                shape = span.count * group.block_bytes, GEOMETRY.parts(group)
                if slots := self.credits.take_slots(shape, span.objects):
                    runs.append(CopyRun(span.part(0, len(slots) // SLOT_BYTES), slots))
        ops = [op for run in runs for op in run.ops()]
        for op in ops:
            self._poison(op)
        for rank, copier in enumerate(self.copiers):
            for op in ops:
                for checked in self._blocks(rank, op, hashes[op.chunk]):
                    checked.view[checked.block] = checked.expected
            stored: list[bool] = []
            copier.store(
                [op for op in ops if PARTS[rank].writes(op)],
                lambda _, ok: stored.append(ok),  # noqa: B023  # it is called within `store`
            )
            assert all(stored)
        cut = self.rng.randrange(len(ops) + 1) if self.rng.random() < 0.1 else len(ops)
        self._commit(ops[:cut], hashes)
        if ops[cut:]:
            self._send(Free(pack_slots(op.slot for op in ops[cut:])))
            self.counts.add("abandoned", len(ops) - cut)

    def _commit(self, ops: Sequence[CopyOp], hashes: Sequence[bytes]) -> None:
        self._send(
            Commit(
                pack_slots(op.slot for op in ops),
                pack_u64([op.group_index for op in ops]),
                b"".join(hashes[op.chunk] for op in ops),
            )
        )
        self.counts.add("stored", len(ops))

    def _poison(self, op: CopyOp) -> None:
        """Fill a slot with random bytes after its header, which must say that the slot is ours."""
        at = op.slot.offset
        header = unpack_header(bytes(self.arena.memory[at : at + HEADER_BYTES]))
        assert header is not None
        assert (header.state, header.generation) == (SlotState.WRITING, op.slot.generation), (
            "a slot of somebody else"
        )
        size = slot_bytes(header.part_bytes, header.parts) - HEADER_BYTES
        self.arena.memory[at + HEADER_BYTES : at + HEADER_BYTES + size] = self.rng.randbytes(size)

    def _blocks(self, rank: int, op: CopyOp, chunk_hash: bytes) -> Iterator[CheckedBlock]:
        """Yields every block that an op copies, of each layer."""
        group = GROUPS[op.group_index]
        part = PartName(self.identity, group.gid, chunk_hash, 0 if group.replicated else rank)
        for layer, view in enumerate(self.views[rank][op.group_index]):
            for number, block in enumerate(op.blocks, op.first):
                expected = content(part, layer, number, group.layer_bytes[layer])
                yield CheckedBlock(view, block, expected)

    def _look_up(self, hashes: Sequence[bytes]) -> Found:
        lease = next(self.leases)
        self._send(Lookup(lease, lease, b"".join(hashes)))
        self._until(lambda: lease in self.found)
        found = self.found.pop(lease)
        self.counts.add("lookups")
        self.counts.add("hits", found.depth > 0)
        return found

    def _release(self, found: Found) -> None:
        if found.depth:
            self._send(Release(found.lease))

    def _refill(self) -> None:
        for (size, parts), wanted in self.credits.credit_requests(time.monotonic()):
            self._send(Reserve(size, size, parts, wanted))

    def _send(self, message: Any) -> None:
        assert self.links[0].send(message, time.monotonic()), "the daemon left"

    def _until(self, done: Any) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            now = time.monotonic()
            for reply in [reply for link in self.links for reply in link.poll(now)]:
                if isinstance(reply, Found):
                    self.found[reply.lease] = reply
                else:
                    assert isinstance(reply, Reserved), reply
                    self.credits.on_granted((reply.part_bytes, reply.parts), reply.slots, now)
            if done():
                return
            assert now < deadline, "no answer"
            select.select([link.fd for link in self.links if link.fd is not None], [], [], 0.1)

    def _lost(self, why: str) -> None:
        assert self.closing, why


def run_engine(socket_path: str, name: str, seed: int, counts: Counts) -> None:
    """Run engine after engine in a process, each for some requests, until it is stopped."""
    # It may be stopped by a signal when the process ends that would kill it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rng = random.Random(seed)
    for life in count():
        engine = Engine(socket_path, f"{name}.{life}", rng, counts)
        for _ in range(rng.randrange(20, 200)):
            if counts.stopped:
                break
            engine.request()
        engine.close()
        if counts.stopped:
            return


class Race:
    """The daemon and the processes of a race, some of which are killed or stopped."""

    def __init__(self, daemon: DaemonProcess, processes: int, seed: int) -> None:
        self.daemon = daemon
        self.rng = random.Random(seed)
        self.counts = [Counts() for _ in range(processes)]
        self.started = count()
        self.kills = 0
        self.stops = 0
        self.faults: list[str] = []
        self.processes = [self._start(number) for number in range(processes)]

    def run(self, seconds: float) -> None:
        """Kill, stop and start again until the time is over or a fault is found."""
        deadline = time.monotonic() + seconds
        with ControlClient(self.daemon.socket_path) as control:
            while time.monotonic() < deadline and not self.faults:
                victim = self.rng.randrange(len(self.processes))
                process = self.processes[victim]
                assert process.pid is not None
                stop = self.rng.random() < 0.5
                if stop:
                    os.kill(process.pid, signal.SIGSTOP)
                    self.stops += 1
                if self._ended(self.rng.uniform(0.02, 0.4)):
                    break
                if stop and self.rng.random() < 0.5:
                    os.kill(process.pid, signal.SIGCONT)
                else:
                    process.kill()
                    process.join()
                    self.kills += 1
                    self.processes[victim] = self._start(victim)
                if self.rng.random() < 0.02:
                    assert isinstance(control.call(Clear(9)), Done)
            self._end()
            self._audit(control)

    def _start(self, number: int) -> ForkProcess:
        name = f"{number}.{next(self.started)}"
        process = multiprocessing.get_context("fork").Process(
            target=run_engine,
            args=(self.daemon.socket_path, name, self.rng.getrandbits(32), self.counts[number]),
        )
        process.start()
        return process

    def _ended(self, seconds: float) -> bool:
        """Whether a process ends by itself, or counts a fault, within the time."""
        for sentinel in wait([process.sentinel for process in self.processes], seconds):
            (ended,) = [process for process in self.processes if process.sentinel == sentinel]
            self.faults.append(f"{ended.name} ended: {ended.exitcode}")
        return bool(self.faults)

    def _end(self) -> None:
        for process, counts in zip(self.processes, self.counts, strict=True):
            counts.stop()
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
        for process in self.processes:
            process.join(DEADLINE_SECONDS)
            if process.exitcode != 0:
                self.faults.append(f"{process.name} did not end well: {process.exitcode}")
                process.kill()
        self.faults += [
            f"{name}: {self.total(name)}" for name in ("wrong", "failed") if self.total(name)
        ]

    def total(self, name: str) -> int:
        """Returns a count over all processes."""
        return sum(counts[name] for counts in self.counts)

    def _audit(self, control: ControlClient) -> None:
        """Check that nothing is held, and that every object has the bytes of its name."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        self.values = control.stats().values
        while self.values["connections"] > 1:
            assert time.monotonic() < deadline, "the daemon still waits for somebody"
            self.values = control.stats().values
        self.faults += [
            f"{name} is left"
            for name in ("sessions", "leases", "bytes_writing")
            if self.values[name]
        ]
        self.faults += [
            f"{name} was counted" for name in self.values if name.startswith("refused_")
        ]
        arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        self.objects = 0
        for offset, header in committed_slots(arena.memory):
            self.objects += 1
            self.faults += [f"in the arena: {error}" for error in _untrue(arena, offset, header)]
        arena.close()


def _untrue(arena: Arena, offset: int, header: SlotHeader) -> Iterator[str]:
    """Yields what of an object is not as its header says."""
    group, size = GROUPS[header.gid], header.part_bytes
    blocks = range(size // group.block_bytes)
    op = CopyOp(SlotRef(offset, header.generation), header.gid, 0, len(blocks), 0, tuple(blocks))
    for rank in range(GEOMETRY.parts(group)):
        start = PARTS[rank].part_offset(op, size)
        part = PartName(header.namespace, header.gid, header.chunk_hash, rank)
        expected = b"".join(
            content(part, layer, block, layer_bytes).numpy().tobytes()
            for layer, layer_bytes in enumerate(group.layer_bytes)
            for block in blocks
        )
        if bytes(arena.memory[start : start + size]) != expected:
            yield f"part {rank} at {offset} is not what its name says"
        try:
            PARTS[rank].check_part(arena, op, size)
        except BadSlotError as error:
            yield str(error)


@contextlib.contextmanager
def races() -> Iterator[RunSeed]:
    """Returns a function that runs a seed, each with an empty daemon."""
    torch.set_num_threads(1)
    yield run_seed


def run_seed(seed: int, options: Options) -> dict[str, int]:
    """Run a race of SECONDS. Raises AssertionError with its faults."""
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-races-") as directory,
        DaemonProcess(f"{directory}/d.sock", RAM) as daemon,
    ):
        race = Race(daemon, PROCESSES, seed)
        race.run(SECONDS)
    counts = {name: race.total(name) for name in COUNTS}
    race.faults += [f"{name}: 0" for name in ("loads", "stored") if not counts[name]]
    assert not race.faults, "; ".join(race.faults)
    counts |= {name: int(race.values.get(name, 0)) for name in ("evicted", "duplicates")}
    return {**counts, "killed": race.kills, "stopped": race.stops, "objects": race.objects}


PROGRAM = Program("tests.fault.races", races)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
