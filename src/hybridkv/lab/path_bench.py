"""`hybridkv bench path`: the worker's own copier beside a plain copy of the same bytes."""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeVar

import torch

from hybridkv.client.control import ControlClient
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.packed import unpack_u64
from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.shm.arena import RAM_BYTES_MIN, attach_arena
from hybridkv.wire.messages import Welcome

DONE_SECONDS = 120.0
ROUNDS = 5
_BLOCK_TOKENS = 128
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PathOptions:
    """What is measured: as many objects of one group as `total_bytes` hold."""

    total_bytes: int
    layers: int
    block_bytes: int
    """Bytes of a block in a layer."""
    checksum: str
    device: str


def measure_path(options: PathOptions, socket_path: str) -> dict[str, Any]:
    """GB/s between engine-like blocks and a daemon's slots; raises ConfigError for bad options."""
    if options.layers < 1:
        raise ConfigError(f"--layers {options.layers} is no number of layers", "32 works")
    if options.device != "cpu" and not torch.cuda.is_available():
        what = f"--device {options.device}: this machine has no CUDA device"
        raise ConfigError(what, "cpu works")
    part_bytes = options.block_bytes * options.layers
    objects = options.total_bytes // part_bytes
    if objects < 1:
        what = f"--bytes is less than one object of {format_size(part_bytes)}"
        raise ConfigError(what, "512MiB works")
    group = Group(0, GroupKind.FULL, _BLOCK_TOKENS, (options.block_bytes,) * options.layers)
    hello = engine_hello(Geometry((group,), _BLOCK_TOKENS, _BLOCK_TOKENS, _BLOCK_TOKENS))
    ram_bytes = max(RAM_BYTES_MIN, (objects + 1) * (part_bytes + 8192) * 4)
    with (
        DaemonProcess(socket_path, str(ram_bytes)),
        ControlClient(socket_path, 60.0, hello=hello) as control,
    ):
        slots = [
            slot
            for granted in reserve(control, part_bytes, objects)
            for slot in zip(
                unpack_u64(granted.offsets), unpack_u64(granted.generations), strict=True
            )
        ]
        rates = _measure(options, control.welcome, slots)
    return {
        "bytes": format_size(objects * part_bytes),
        "object": format_size(part_bytes),
        "block in a layer": format_size(options.block_bytes),
        "device": options.device,
        "checksum": options.checksum,
        **{f"{name}_GBps": round(rate / 1e9, 2) for name, rate in rates.items()},
        **{f"{name}_ratio": round(rates[name] / rates["copy"], 2) for name in ("store", "load")},
    }


def _measure(
    options: PathOptions, welcome: Welcome, slots: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Bytes a second of store, load and a plain copy, the best of ROUNDS; proves the bytes."""
    objects, layers = len(slots), options.layers
    arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
    end = max(offset for offset, _ in slots) + layers * options.block_bytes + 4096
    # One allocation for all layers, as vLLM has; one block more than objects, for the null block.
    shape = layers, objects + 1, options.block_bytes // 8
    memory = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device=options.device)
    views = [memory[layer].view(objects + 1, 1, 1, -1) for layer in range(layers)]
    copier: Copier
    part = PartLayout(0, 1, options.checksum)
    if memory.is_cuda:
        copier = cuda = CudaCopier(arena, [views], part)
        cuda.pin(end)
    else:
        arena.populate(0, end)
        copier = HostCopier(arena, [views], part)
    ids = (torch.randperm(objects, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    refs = [SlotRef(offset, generation) for offset, generation in slots]
    ops = [CopyOp(ref, 0, chunk, 1, 0, (ids[chunk],)) for chunk, ref in enumerate(refs)]
    works: dict[str, Callable[[], None]] = {
        "copy": _plain_copy(memory),
        "store": lambda: _store(copier, ops),
        "load": lambda: _load(copier, ops),
    }
    best = dict.fromkeys(works, float("inf"))
    before = memory.clone()
    for _ in range(ROUNDS):
        for name, work in works.items():
            if name == "load":
                memory[:, 1:].zero_()
            if memory.is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - started)
        if not torch.equal(memory, before):
            raise HybridKVError("the bytes that came back are not those that were stored")
    copier.close()
    total = objects * layers * options.block_bytes
    return {name: total / seconds for name, seconds in best.items()}


def _plain_copy(memory: torch.Tensor) -> Callable[[], None]:
    """One copy of all the bytes: memmove on a CPU; pinned host memory to the device on CUDA."""
    source = memory[:, 1:].contiguous()
    if memory.is_cuda:
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)

        def copy() -> None:
            source.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        return copy
    target = torch.zeros_like(source)
    size = source.numel() * source.element_size()

    def move() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    return move


def _store(copier: Copier, ops: Sequence[CopyOp]) -> None:
    done: Queue[tuple[CopyOp, bool]] = Queue()
    copier.store(ops, lambda op, stored: done.put((op, stored)))
    for _ in ops:
        op, stored = _next(done)
        if not stored:
            raise HybridKVError(f"slot {op.slot.offset} was not stored")


def _load(copier: Copier, ops: Sequence[CopyOp]) -> None:
    done: Queue[HybridKVError | None] = Queue()
    copier.load(ops, done.put)
    if (error := _next(done)) is not None:
        raise error


def _next(done: Queue[_Result]) -> _Result:
    try:
        return done.get(timeout=DONE_SECONDS)
    except Empty as error:
        raise HybridKVError(f"a copy did not end within {DONE_SECONDS:g} s") from error
