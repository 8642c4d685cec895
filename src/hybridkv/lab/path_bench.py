"""`hybridkv bench path`: the worker's own copier beside a plain copy of the same bytes."""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from queue import Empty, Queue
from statistics import median
from typing import Any

import torch

from hybridkv.client.control import ControlClient
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.device import Device
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import Group, GroupKind
from hybridkv.core.packed import SlotRef, unpack_slots
from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.shm.arena import RAM_BYTES_MIN, Arena, arena_seen, attach_arena
from hybridkv.shm.slots import slot_bytes

DONE_SECONDS = 120.0
ROUNDS = 9
WORD_BYTES = 8
_BLOCK_TOKENS = 128
RoundTimes = dict[str, list[float]]
"""The seconds of each round, by the name of what was done: store, load and plain copies."""


@dataclass(frozen=True, slots=True)
class PathOptions:
    """The options of `hybridkv bench path`: what is copied, and how."""

    total_bytes: int
    """As many objects of one group are moved as this holds."""
    layers: int
    block_bytes: int
    """Bytes of a block in each layer."""
    checksum: str = "on"
    device: str = "cpu"
    """The torch device that has the engine's blocks."""


def measure_path(
    socket_path: str, options: PathOptions, copies: Device | None = None
) -> dict[str, Any]:
    """Return GB/s between engine-like blocks and a daemon's slots.

    Rates are of the best round. Ratios compare with the plain copy of the same round, because a
    busy machine changes its speed from round to round: their median, the least and the most.
    `_cpu` is the processor time of both threads beside that of the plain copy, the median too.
    `copies` is the device that copies, for tests. Raises ConfigError for bad options.
    """
    layers, block_bytes, device = options.layers, options.block_bytes, options.device
    if layers < 1:
        raise ConfigError(f"--layers {layers} is no number of layers", "32 works")
    if device != "cpu":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {device}: this machine has no CUDA device", "cpu works")
        copies = CudaDevice(torch.device(device))
    part_bytes = block_bytes * layers
    objects = options.total_bytes // part_bytes
    if objects < 1:
        what = f"--bytes is less than one object of {format_size(part_bytes)}"
        raise ConfigError(what, "512MiB works")
    group = Group(0, GroupKind.FULL, _BLOCK_TOKENS, (block_bytes,) * layers)
    hello = engine_hello((group,), _BLOCK_TOKENS)
    ram_bytes = max(RAM_BYTES_MIN, (objects + 1) * (part_bytes + 8192) * 4)
    with (
        DaemonProcess(socket_path, str(ram_bytes)),
        ControlClient(socket_path, 60.0, hello=hello) as control,
    ):
        refs = [
            slot
            for granted in reserve(control, part_bytes, objects)
            for slot in unpack_slots(granted.slots)
        ]
        arena = attach_arena(arena_seen(control.welcome.arena_path), control.welcome.arena_bytes)
        # One allocation for all layers, as vLLM has; one block more, for the null block.
        shape = layers, objects + 1, block_bytes // 8
        memory = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device=device)
        part = PartLayout(0, 1, options.checksum)
        bench: HostBench | DeviceBench
        if copies is None:
            bench = HostBench(arena, refs, memory, part)
        else:
            bench = DeviceBench(arena, refs, memory, part, copies)
        seconds, processor_seconds = _measure(bench, refs, memory)
    facts = {
        "bytes": format_size(objects * part_bytes),
        "object": format_size(part_bytes),
        "block in a layer": format_size(block_bytes),
        "device": device,
        "checksum": options.checksum,
    }
    return facts | _figures(objects * part_bytes, seconds, processor_seconds)


def _figures(moved_bytes: int, seconds: RoundTimes, processor: RoundTimes) -> dict[str, Any]:
    """Return the rates and ratios of `measure_path`, from the times of `_measure`.

    Stores and loads of a device are compared with plain copies from it and to it.
    """
    is_host = "copy" in seconds
    plain_copies = {
        "store": "copy" if is_host else "copy_out",
        "load": "copy" if is_host else "copy_in",
    }
    rates = {name: moved_bytes / min(rounds) for name, rounds in seconds.items()}
    ratios = {
        name: sorted(map(truediv, seconds[copy], seconds[name]))
        for name, copy in plain_copies.items()
    }
    return {
        **{f"{name}_GBps": round(rate / 1e9, 2) for name, rate in rates.items()},
        **{f"{name}_ratio": round(median(rounds), 2) for name, rounds in ratios.items()},
        **{f"{name}_ratio_min": round(rounds[0], 2) for name, rounds in ratios.items()},
        **{f"{name}_ratio_max": round(rounds[-1], 2) for name, rounds in ratios.items()},
        **{
            f"{name}_cpu": round(median(map(truediv, processor[name], processor[copy])), 2)
            for name, copy in plain_copies.items()
        },
    }


class HostBench:
    """The processor's copier, beside one memmove of all the bytes."""

    batch_bytes = sys.maxsize  # The most bytes that are stored at once.

    def __init__(
        self, arena: Arena, refs: Sequence[SlotRef], memory: torch.Tensor, part: PartLayout
    ) -> None:
        arena.populate(0, _end(refs, memory))
        self.copier: Copier = HostCopier(arena, [_views(memory)], part)
        self._source = memory[:, 1:].contiguous()
        self._target = torch.zeros_like(self._source)

    def plain_copies(self) -> dict[str, Callable[[], None]]:
        """Return the functions that copy all the bytes once, by name."""
        target, source = self._target.data_ptr(), self._source.data_ptr()
        size = self._source.numel() * self._source.element_size()

        def copy() -> None:
            ctypes.memmove(target, source, size)

        return {"copy": copy}

    def close(self) -> None:
        """End the copier's threads. Copy nothing afterwards."""
        self.copier.close()


class DeviceBench:
    """A device's copier, beside one copy of all the bytes from and to pinned memory of the host."""

    def __init__(
        self,
        arena: Arena,
        refs: Sequence[SlotRef],
        memory: torch.Tensor,
        part: PartLayout,
        device: Device,
    ) -> None:
        layers, _, words = memory.shape
        part_bytes = layers * words * WORD_BYTES
        self._bytes = part_bytes * len(refs)
        self._device = device
        # Before the staging takes its share of what is free.
        self._on_device = device.allocate(self._bytes)
        self._on_host = device.allocate(self._bytes, pinned=True)
        self._pipeline = CopyPipeline(device, [_views(memory)], Demand(part_bytes, 1, self._bytes))
        self.batch_bytes = self._pipeline.staging_bytes
        self.copier = copier = CudaCopier(self._pipeline, arena, part)
        copier.pin_below(_end(refs, memory))

    def plain_copies(self) -> dict[str, Callable[[], None]]:
        """Return the functions that copy all the bytes once, from the device and to it, by name."""
        stream = self._device.new_stream()

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            self._device.copy(target.data_ptr(), source.data_ptr(), self._bytes, stream)
            self._device.wait_for(self._device.record(stream))

        return {
            "copy_out": partial(copy, self._on_host, self._on_device),
            "copy_in": partial(copy, self._on_device, self._on_host),
        }

    def close(self) -> None:
        """End the copier and its pipeline. Copy nothing afterwards."""
        self.copier.close()
        self._pipeline.close()


def _measure(
    bench: HostBench | DeviceBench, refs: Sequence[SlotRef], memory: torch.Tensor
) -> tuple[RoundTimes, RoundTimes]:
    """Return the times of store, load and plain copies, in turns, ROUNDS of each.

    The second ones are the processor time of all threads of this process.

    Raises HybridKVError where other bytes come back than were stored.
    """
    layers, _, words = memory.shape
    ids = (torch.randperm(len(refs), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    ops = [
        CopyOp(slot=ref, group_index=0, chunk=chunk, count=1, first=0, blocks=(ids[chunk],))
        for chunk, ref in enumerate(refs)
    ]
    done: Queue[HybridKVError | None] = Queue()

    def on_stored(op: CopyOp, is_stored: bool) -> None:
        failure = None if is_stored else HybridKVError(f"slot {op.slot.offset} was not stored")
        done.put(failure)

    def store() -> None:
        batch = max(1, bench.batch_bytes // (layers * words * WORD_BYTES))
        for start in range(0, len(ops), batch):
            batch_ops = ops[start : start + batch]
            bench.copier.store(batch_ops, on_stored)
            _wait(done, len(batch_ops))

    def load() -> None:
        bench.copier.load(ops, done.put)
        _wait(done, 1)

    works = {**bench.plain_copies(), "store": store, "load": load}
    seconds: RoundTimes = {name: [] for name in works}
    processor: RoundTimes = {name: [] for name in works}
    before = memory.clone()
    for _ in range(ROUNDS):
        for name, work in works.items():
            if name == "load":
                memory[:, 1:].zero_()
            if memory.is_cuda:
                torch.cuda.synchronize()
            started, used = time.perf_counter(), time.process_time()
            work()
            seconds[name].append(time.perf_counter() - started)
            # A copy by a device may take less processor time than the clock can tell.
            processor[name].append(max(time.process_time() - used, 1e-6))
        if not torch.equal(memory, before):
            raise HybridKVError("the bytes that came back are not those that were stored")
    bench.close()
    return seconds, processor


def _end(refs: Sequence[SlotRef], memory: torch.Tensor) -> int:
    """Return the end of the last slot in the arena."""
    layers, _, words = memory.shape
    return max(ref.offset for ref in refs) + slot_bytes(layers * words * WORD_BYTES, 1)


def _views(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return the physical blocks of each layer."""
    return [layer.view(len(layer), -1) for layer in memory]


def _wait(done: "Queue[HybridKVError | None]", count: int) -> None:
    """Wait for the ends of so many copies. Raises the error of one that failed."""
    for _ in range(count):
        try:
            failure = done.get(timeout=DONE_SECONDS)
        except Empty as error:
            raise HybridKVError(f"a copy did not end within {DONE_SECONDS:g} s") from error
        if failure is not None:
            raise failure
