"""One seed: an engine without a model, a copier on a simulated device, and all bytes known."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.device import DeviceError
from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.staging import CopySizes
from hybridkv.connector.metrics import COPIES_UNPINNED, Shed, stores_shed
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import SlotRef
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes
from tests.devicesim.device import COMPUTE, ENGINE, MODEL, STRANGER, Habits, SimulatedDevice

ARENA_BYTES = 8 << 20
BLOCKS = 13
POISON = 0x5A
FREE = 0xA5
"""The byte with which free slots are filled."""
COSTLY = ("launch", "copy")
"""Calls that the engine's thread makes once in a step, however many objects there are."""
COUNTED = {
    "copies_unpinned": COPIES_UNPINNED,
    "stores_device_failed": stores_shed(Shed.DEVICE_FAILED),
    "stores_not_equal": stores_shed(Shed.NOT_EQUAL),
    "stores_staging_full": stores_shed(Shed.STAGING_FULL),
}
"""The copier's counters among the counts of a seed."""
Bytes = npt.NDArray[np.uint8]


class LayerShape(NamedTuple):
    """A block of one layer: several runs of equal length, which are apart in memory."""

    runs: int
    run_bytes: int


class LayerMemory(NamedTuple):
    """The memory of one layer on the device, and the physical view of its blocks."""

    memory: torch.Tensor
    view: torch.Tensor


class BlockWrite(NamedTuple):
    """Bytes that a kernel of the engine writes into a block."""

    block: Bytes
    content: Bytes


@dataclass(frozen=True)
class Shape:
    """The blocks of one group, and the bytes between them."""

    layers: tuple[LayerShape, ...]
    padding: int
    """Bytes after each block, or after each run where a block has several."""
    counts: tuple[int, ...]
    """Stored blocks that objects may have."""
    start: int
    """Bytes between an aligned address and the first block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(layer.runs * layer.run_bytes for layer in self.layers)


@dataclass
class Slot:
    """A slot, and what it must hold."""

    offset: int
    state: str = "free"  # free, writing, committed
    op: CopyOp | None = None
    content: bytes = b""
    readers: int = 0
    flipped: bool = False


@dataclass
class Loading:
    """A load that is not over."""

    ops: list[CopyOp]
    contents: list[bytes]
    may_fail: bool = False
    must_fail: bool = False


class Life:
    """One life of the daemon: its arena, the slots in it, and the engine's copier."""

    def __init__(self, world: "World", arena: Arena) -> None:
        self.arena = arena
        self.copier = CudaCopier(world.pipeline, arena, world.part)
        self.slots = [Slot(at) for at in world.offsets]
        self.reserved = 0
        np.frombuffer(arena.memory, np.uint8)[:] = FREE


class World:
    """An engine, its copier and the daemon's slots, for one seed.

    `arenas` are the memory of the daemon's lives, which all seeds use.
    """

    def __init__(self, seed: int, arenas: list[Arena]) -> None:
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.groups = [_shape(rng) for _ in range(rng.choice((1, 1, 2)))]
        self.checksum = rng.choice(("on", "on", "on", "off", "paranoid"))
        ranks = rng.choice((1, 1, 2))
        self.part = PartLayout(rng.randrange(ranks), ranks, self.checksum)
        largest = max(max(shape.counts) * shape.block_bytes for shape in self.groups)
        self.slot = max(slot_bytes(largest, ranks), 4096)
        self.habits = Habits(
            can_digest=rng.random() < 0.7,
            torch_kernels=rng.random() < 0.2,
            registers=rng.choice((0, 2, 1 << 30, 1 << 30, 1 << 30)),
            slow_registration=rng.random() < 0.3,
            breaks_at=rng.randrange(600) if rng.random() < 0.15 else -1,
            refuses_at=rng.randrange(30, 600) if rng.random() < 0.2 else -1,
            pinned_refused_at=rng.randrange(1, 10) if rng.random() < 0.05 else -1,
            unregister_fails_at=rng.randrange(1, 20) if rng.random() < 0.2 else -1,
            interrupts=rng.choice((0, 0, 0.02, 0.2)),
        )
        room = range(0, ARENA_BYTES - self.slot, self.slot)
        self.offsets = sorted(rng.sample(room, min(len(room), rng.choice((4, 12, 30)))))
        self._credit = rng.random() < 0.6
        """True if stores are planned as far as the staging has room, as the scheduler does."""
        demand = Demand(largest, max(max(shape.counts) for shape in self.groups), 3 * largest)
        if rng.random() < 0.2:
            self.habits.free_bytes = 16 * largest
        self.device = SimulatedDevice(rng, self.habits)
        self.layers = [self._allocate(shape) for shape in self.groups]
        sizes = CopySizes(
            copy_bytes=rng.choice((4096, 16384)),
            pin_bytes=1 << 18,
            bounce_bytes=rng.choice((16384, 65536)),
            descriptor_bytes=1 << 20 if self._credit else 1024,
            load_ring_bytes=largest * rng.choice((1, 3)),
            batch_bytes=largest * rng.choice((1, 4)),
            batch_objects=rng.choice((1, 2, 64)),
            depth=rng.choice((1, 3, 8)),
        )
        self.refusal = ""
        try:
            views = [[layer.view for layer in group] for group in self.layers]
            self.pipeline = CopyPipeline(self.device, views, demand, sizes)
        except DeviceError as error:
            self.refusal = str(error)
            return
        self.model = [[layer.memory.numpy().copy() for layer in group] for group in self.layers]
        self._arenas = arenas
        self._is_busy = [set[int]() for _ in self.groups]
        """Blocks that a load writes, by group."""
        self.loads: list[Loading] = []
        self._wrongs: list[str] = []
        """Errors of callbacks, which the copier may have caught."""
        self._generation = 0
        self._planned = 0
        self.lives = [self._begin_life(arenas[0])]

    def run(self) -> Counter[str]:
        """Run the seed. Returns how often each behaviour was seen."""
        rng = self.rng
        if self.refusal:
            assert self.device.failed or self.habits.free_bytes < 1 << 40, self.refusal
            self.counts["refused_at_start"] += 1
            return self.counts
        for _ in range(rng.choice((5, 20, 40))):
            self._step()
            for _ in range(rng.choice((0, 3, 30, 300))):
                if not self._turn():
                    break
            if rng.random() < 0.03 and len(self.lives) == 1:
                self._move_on()
            if rng.random() < 0.03:
                self._sleep()
        if rng.random() < 0.3:
            self.counts["closed_in_flight"] += 1
        else:
            self._settle()
        self._close()
        assert not self.device.held, f"the engine's thread waited for {self.device.held}"
        assert not self.device.wrongs, self.device.wrongs
        assert not self._wrongs, self._wrongs
        assert self.pipeline.can_copy or self._has_failed(), "the copier ended without a reason"
        assert self.device.refusals <= len(self.lives), "a refused registration is tried again"
        assert not self.device.registered_twice, "memory is pinned twice"
        self.counts["seeds"] += 1
        self.counts["broken"] += bool(self.device.broken)
        self.counts["dead"] += not self.pipeline.can_copy
        self.counts["unpinning_failed"] += bool(self.device.stuck)
        counters = self.pipeline.take_counters()
        for name, metric in COUNTED.items():
            self.counts[name] += int(counters.get(metric, 0))
        assert not self._credit or not self.counts["stores_staging_full"], "credits do not fit"
        self.counts["operations"] += self.device.ran
        return self.counts

    def _begin_life(self, arena: Arena) -> Life:
        """Take an arena in which other engines may have stored objects before."""
        rng, life = self.rng, Life(self, arena)
        for slot in life.slots[: rng.choice((0, 0, 6))]:
            index = rng.randrange(len(self.groups))
            count = rng.choice(self.groups[index].counts)
            slot.content = rng.randbytes(count * self.groups[index].block_bytes)
            slot.op = self._write_header(life, slot, index, tuple(range(count)))
            start = self.part.part_offset(slot.op, len(slot.content))
            life.arena.memory[start : start + len(slot.content)] = slot.content
            self.part.sign(life.arena, slot.op, len(slot.content))
            slot.state = "committed"
        return life

    def _write_header(self, life: Life, slot: Slot, index: int, blocks: tuple[int, ...]) -> CopyOp:
        """Give the slot to a new object with these blocks of a group. Returns its store."""
        self._generation += 1
        ref = SlotRef(slot.offset, self._generation)
        size = len(blocks) * self.groups[index].block_bytes
        header = SlotHeader(SlotState.WRITING, ref.generation, self.part.ranks, size)
        life.arena.memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()
        return CopyOp(ref, index, chunk=0, count=len(blocks), first=0, blocks=blocks)

    def _turn(self) -> bool:
        """Let the device or a lane do one thing, within which the engine may do a step."""
        self.device.engine_step = self._step_within
        try:
            return self.device.turn()
        finally:
            self.device.engine_step = None

    def _step_within(self) -> None:
        self.device.engine_step = None
        self._step()
        self.device.engine_step = self._step_within
        self.counts["steps_within_calls"] += 1

    # The engine

    def _step(self) -> None:
        rng, life = self.rng, self.lives[-1]
        grown = min(ARENA_BYTES, life.reserved + rng.choice((0, 1 << 18, 1 << 21)))
        loads = [load for _ in range(rng.choice((0, 1, 1, 2))) if (load := self._plan_load(life))]
        for load in loads:
            for op in load.ops:
                self._write(op.group_index, op.blocks, lambda size: bytes([POISON]) * size)
        for index, busy in enumerate(self._is_busy):
            free = [block for block in range(1, BLOCKS) if block not in busy]
            written = rng.sample(free, min(len(free), rng.randrange(5)))
            self._write(index, written, rng.randbytes)
        before = dict(self.device.counts)
        with self.device.hook():
            if grown > life.reserved:
                life.reserved = grown
                life.copier.pin_below(grown)
            for load in loads:
                self._load(life, load)
            stores = self._plan_stores(life)
            if stores:
                self._store(life, stores)
        for what in COSTLY:
            calls = self.device.counts[ENGINE, what] - before.get((ENGINE, what), 0)
            assert calls <= 1, f"{calls} times {what} in one hook"
        # The blocks are the engine's again: the next step overwrites them at once.
        for slot in stores:
            assert slot.op is not None
            if not set(slot.op.blocks) & self._is_busy[slot.op.group_index]:
                self._write(slot.op.group_index, slot.op.blocks, rng.randbytes)
        self._harm(life)

    def _write(self, index: int, blocks: Any, content: Callable[[int], bytes]) -> None:
        """Let the engine's kernels write blocks, when their turn comes."""
        writes: list[BlockWrite] = []
        for layer, model in zip(self.layers[index], self.model[index], strict=True):
            memory = layer.view.numpy()
            for block in blocks:
                expected = _same(layer.view, model)[block]
                fresh = np.frombuffer(content(expected.size), np.uint8).reshape(expected.shape)
                expected[...] = fresh
                writes.append(BlockWrite(memory[block], fresh))

        def run() -> None:
            for write in writes:
                write.block[...] = write.content

        if writes:
            try:
                with self.device.acting(MODEL):
                    self.device.launch(run, COMPUTE)
            except DeviceError:
                self._lose_device()

    def _lose_device(self) -> None:
        """End the device. The engine's own call failed, so nobody knows its memory any more."""
        assert self._has_failed()
        self.device.fail("the engine's own call failed")

    def _plan_stores(self, life: Life) -> list[Slot]:
        rng, planned = self.rng, list[Slot]()
        for _ in range(rng.choice((0, 1, 2, 4))):
            index = rng.randrange(len(self.groups))
            shape = self.groups[index]
            count = rng.choice(shape.counts)
            free = [slot for slot in life.slots if slot.state == "free"]
            free = [slot for slot in free if slot.offset + self.slot <= life.reserved]
            blocks = [block for block in range(1, BLOCKS) if block not in self._is_busy[index]]
            size = count * shape.block_bytes
            if self._credit and self._planned + size > self.pipeline.staging_bytes:
                self.counts["stores_put_off"] += 1
                continue
            if not free or len(blocks) < count:
                continue
            slot = rng.choice(free)
            slot.op = self._write_header(life, slot, index, tuple(rng.sample(blocks, count)))
            slot.state, slot.flipped = "writing", False
            slot.content = self._content(slot.op)
            self._planned += size
            planned.append(slot)
        return planned

    def _store(self, life: Life, slots: list[Slot]) -> None:
        by_op = {slot.op: slot for slot in slots}

        def done(op: CopyOp, stored: bool) -> None:
            with self._noting():
                end(op, stored)

        def end(op: CopyOp, stored: bool) -> None:
            slot = by_op.pop(op)  # A second call raises.
            assert slot.state == "writing"
            start = self.part.part_offset(op, len(slot.content))
            self._planned -= len(slot.content)
            if stored:
                found = life.arena.memory[start : start + len(slot.content)]
                assert found == slot.content, "a slot has not the bytes of its step"
                self.part.check_part(life.arena, op, len(slot.content))
                slot.state = "committed"
            else:
                self._vacate(life, slot)
            self.counts["stored" if stored else "unstored"] += 1

        ops = [slot.op for slot in slots if slot.op is not None]
        try:
            life.copier.store(ops, done)
        except DeviceError:
            assert self._has_failed()

    def _vacate(self, life: Life, slot: Slot) -> None:
        """Free the slot, as the daemon does before it gives it to another object.

        `_audit` finds copies that write it afterwards.
        """
        size = len(slot.content)
        assert slot.op is not None
        start = self.part.part_offset(slot.op, size)
        life.arena.memory[start : start + size] = bytes([FREE]) * size
        life.arena.memory[slot.offset : slot.offset + HEADER_BYTES] = SlotHeader(
            SlotState.FREE, 0, self.part.ranks, size
        ).pack()
        slot.state = "free"

    def _plan_load(self, life: Life) -> Loading | None:
        rng, load = self.rng, Loading([], [])
        for slot in rng.sample(life.slots, len(life.slots))[: rng.choice((1, 2, 6))]:
            if slot.state != "committed":
                continue
            op = slot.op
            assert op is not None
            first = rng.choice((0, 0, rng.randrange(op.count)))
            busy = self._is_busy[op.group_index]
            free = [block for block in range(1, BLOCKS) if block not in busy]
            if len(free) < op.count - first:
                continue
            blocks = tuple(rng.sample(free, op.count - first))
            busy.update(blocks)
            load.ops.append(replace(op, first=first, blocks=blocks))
            load.contents.append(slot.content)
            load.must_fail |= slot.flipped
        return load if load.ops else None

    def _load(self, life: Life, load: Loading) -> None:
        self.loads.append(load)

        def done(error: HybridKVError | None) -> None:
            with self._noting():
                end(error)

        def end(error: HybridKVError | None) -> None:
            self.loads.remove(load)  # A second call raises.
            for op in load.ops:
                self._is_busy[op.group_index] -= set(op.blocks)
            if error is not None:
                may = load.may_fail or load.must_fail
                expected = may if isinstance(error, BadSlotError) else self._has_failed()
                assert expected, f"a load failed: {error}"
                self.counts["loads_failed"] += 1
                for op in load.ops:
                    self._write(op.group_index, op.blocks, self.rng.randbytes)
                return
            assert not load.must_fail, "wrong bytes were loaded"
            for op, content in zip(load.ops, load.contents, strict=True):
                self._restore(op, content)
                assert self._holds(op), "a load is told done, and its blocks are not restored"
            self.counts["loaded"] += len(load.ops)

        try:
            life.copier.load(load.ops, done)
        except DeviceError as error:
            done(error)

    def _restore(self, op: CopyOp, content: bytes) -> None:
        """Do in the model what a load must have done."""
        at, all_bytes = 0, np.frombuffer(content, np.uint8)
        for layer, model in self._layers_of(op):
            blocks = _same(layer.view, model)
            size = blocks[0].size
            for number, block in enumerate(op.blocks, op.first):
                start = at + number * size
                blocks[block] = all_bytes[start : start + size].reshape(blocks[0].shape)
            at += op.count * size

    def _holds(self, op: CopyOp) -> bool:
        """Return True if the engine's memory has what the model has in the blocks of the op."""
        return all(
            np.array_equal(layer.view.numpy()[block], _same(layer.view, model)[block])
            for layer, model in self._layers_of(op)
            for block in op.blocks
        )

    def _content(self, op: CopyOp) -> bytes:
        """Return the part of an object as the model has it now."""
        pieces: list[bytes] = []
        for layer, model in self._layers_of(op):
            blocks = _same(layer.view, model)
            pieces += [np.ascontiguousarray(blocks[block]).tobytes() for block in op.blocks]
        return b"".join(pieces)

    def _layers_of(self, op: CopyOp) -> Iterator[tuple[LayerMemory, Bytes]]:
        """Iterate over the layers of the op's group, each with its model."""
        return zip(self.layers[op.group_index], self.model[op.group_index], strict=True)

    # What goes wrong

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._wrongs.append(repr(error))
            raise

    def _has_failed(self) -> bool:
        return bool(self.device.broken) or self.device.failed > 0

    def _harm(self, life: Life) -> None:
        rng = self.rng
        committed = [slot for slot in life.slots if slot.state == "committed"]
        if not committed or rng.random() > 0.15:
            return
        loaded = {op.slot for load in self.loads for op in load.ops}
        in_use = [slot for slot in committed if slot.op is not None and slot.op.slot in loaded]
        slot = rng.choice(in_use if in_use and rng.random() < 0.5 else committed)
        assert slot.op is not None
        users = [load for load in self.loads if slot.op.slot in [op.slot for op in load.ops]]
        for load in users:
            load.may_fail = True
        if rng.random() < 0.5 and not users:
            # The daemon evicts nothing that is being loaded, but a life of it may end.
            self._vacate(life, slot)
            self.counts["evicted"] += 1
        elif self.checksum != "off" and not users:
            start = self.part.part_offset(slot.op, len(slot.content))
            life.arena.memory[start + rng.randrange(len(slot.content))] ^= 1 << rng.randrange(8)
            slot.flipped = True
            self.counts["flipped"] += 1
        else:
            number = life.arena.memory[slot.offset + 16] ^ 0xFF
            life.arena.memory[slot.offset + 16] = number
            size = len(slot.content)
            start = self.part.part_offset(slot.op, size)
            life.arena.memory[start : start + size] = rng.randbytes(size)
            slot.state = "lost"
            self.counts["taken_over"] += 1

    def _move_on(self) -> None:
        """Begin another life of the daemon with another arena. Copies in the old one go on."""
        self.lives.append(self._begin_life(self._arenas[1]))
        self.counts["lives"] += 1

    def _sleep(self) -> None:
        """Let the engine give its memory away, with all its cached blocks, and get other bytes."""
        self.pipeline.drain()
        assert not self.loads, "a load is not over after a drain"
        with self.device.unmapped():
            self.device.turn_some(self.rng.choice((10, 300)))
        for group, models in zip(self.layers, self.model, strict=True):
            for layer, model in zip(group, models, strict=True):
                model[...] = np.frombuffer(self.rng.randbytes(model.size), np.uint8)
                layer.memory.numpy()[...] = model
        self.counts["sleeps"] += 1

    def _settle(self) -> None:
        """Let all that is queued end, except for registrations that take long."""
        self.device.settle()
        assert not self.loads, "a load waits for ever, or for a registration"
        for life in self.lives:
            assert all(slot.state != "writing" for slot in life.slots), "a store waits for ever"
        self.pipeline.check()
        self._audit()

    def _close(self) -> None:
        for life in self.lives:
            with self.device.acting(STRANGER):
                life.copier.close()
        with self.device.acting(STRANGER):
            self.pipeline.close()
        assert not self.loads, "a load is never told"
        for life in self.lives:
            assert all(slot.state != "writing" for slot in life.slots), "a store is never told"
        self.device.settle()
        assert self.device.is_idle, "something is left"
        self.pipeline.check()
        self._audit()

    def _audit(self) -> None:
        """Check all of the engine's memory, and all slots that nobody uses."""
        if self.device.broken:
            return
        for group, models in zip(self.layers, self.model, strict=True):
            for layer, model in zip(group, models, strict=True):
                assert np.array_equal(layer.memory.numpy(), model), "a block was written by nobody"
        for life in self.lives:
            for slot in life.slots:
                if slot.state == "free" and slot.op is not None:
                    start = self.part.part_offset(slot.op, len(slot.content))
                    found = life.arena.memory[start : start + len(slot.content)]
                    assert found == bytes([FREE]) * len(found), "a slot was written by nobody"
        self.counts["audits"] += 1

    def _allocate(self, shape: Shape) -> list[LayerMemory]:
        """Return the memory of each layer, which the device has from now on."""
        layers: list[LayerMemory] = []
        for runs, size in shape.layers:
            if runs == 1:
                stride = size + shape.padding
                memory = _memory(BLOCKS * stride, shape.start)
                view = memory.as_strided((BLOCKS, size), (stride, 1))
            else:
                memory = _memory(runs * BLOCKS * size, shape.start)
                view = memory.as_strided((BLOCKS, runs, size), (size, BLOCKS * size, 1))
            self.device.adopt(memory)
            layers.append(LayerMemory(memory, view))
        return layers


def _memory(size: int, start: int) -> torch.Tensor:
    """Return bytes that begin `start` bytes after an aligned address."""
    return torch.full((start + size,), POISON, dtype=torch.uint8)[start:]


def _same(view: torch.Tensor, model: Bytes) -> Bytes:
    """Return the blocks of the model, shaped as the view."""
    return np.lib.stride_tricks.as_strided(model, tuple(view.shape), tuple(view.stride()))


def _shape(rng: random.Random) -> Shape:
    word = rng.choice((8, 8, 8, 8, 4, 1))
    large = rng.random() < 0.25
    layers: list[LayerShape] = []
    for _ in range(rng.choice((1, 2, 3))):
        size = rng.choice((4096, 20000, 49152)) if large else word * rng.randrange(1, 200)
        layers.append(LayerShape(rng.choice((1, 1, 2)), size))
    padding = rng.choice((0, 0, 8 * rng.randrange(5), word))
    counts = rng.choice(((1,), (2,), (1, 2, 3))) if large else rng.choice(((1,), (4,), (1, 3, 5)))
    return Shape(tuple(layers), padding, counts, rng.choice((0, 0, 0, 8, 4, 1)))
