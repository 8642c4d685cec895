"""`hybridkv bench path`: the worker's own copier beside a plain copy of the same bytes."""

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from hybridkv.client.control import ControlClient
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.geometry import Group, GroupKind
from hybridkv.core.packed import unpack_u64
from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.shm.arena import RAM_BYTES_MIN, Arena, attach_arena

DONE_SECONDS = 120.0
ROUNDS = 5
_BLOCK_TOKENS = 128


def measure_path(
    socket_path: str, total_bytes: int, layers: int, block_bytes: int, checksum: str, device: str
) -> dict[str, Any]:
    """GB/s between engine-like blocks and a daemon's slots; raises ConfigError for bad options.

    As many objects of one group are moved as `total_bytes` hold, with `block_bytes` in each layer.
    """
    if layers < 1:
        raise ConfigError(f"--layers {layers} is no number of layers", "32 works")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this machine has no CUDA device", "cpu works")
    part_bytes = block_bytes * layers
    objects = total_bytes // part_bytes
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
            SlotRef(*slot)
            for granted in reserve(control, part_bytes, objects)
            for slot in zip(*map(unpack_u64, (granted.offsets, granted.generations)), strict=True)
        ]
        arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        # One allocation for all layers, as vLLM has; one block more, for the null block.
        shape = layers, objects + 1, block_bytes // 8
        memory = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device=device)
        seconds = _measure(arena, refs, memory, PartLayout(0, 1, checksum))
    rates = {name: objects * part_bytes / best for name, best in seconds.items()}
    return {
        "bytes": format_size(objects * part_bytes),
        "object": format_size(part_bytes),
        "block in a layer": format_size(block_bytes),
        "device": device,
        "checksum": checksum,
        **{f"{name}_GBps": round(rate / 1e9, 2) for name, rate in rates.items()},
        **{f"{name}_ratio": round(rates[name] / rates["copy"], 2) for name in ("store", "load")},
    }


def _measure(
    arena: Arena, refs: Sequence[SlotRef], memory: torch.Tensor, part: PartLayout
) -> dict[str, float]:
    """Seconds of store, load and a plain copy, the best of ROUNDS; proves the bytes."""
    layers, blocks, words = memory.shape
    end = max(ref.offset for ref in refs) + layers * words * 8 + 4096
    views = [layer.view(blocks, 1, 1, -1) for layer in memory]
    copier: Copier
    if memory.is_cuda:
        copier = cuda = CudaCopier(arena, [views], part)
        cuda.pin(end)
    else:
        arena.populate(0, end)
        copier = HostCopier(arena, [views], part)
    ids = (torch.randperm(len(refs), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    ops = [CopyOp(ref, 0, chunk, 1, 0, (ids[chunk],)) for chunk, ref in enumerate(refs)]
    done: Queue[HybridKVError | None] = Queue()

    def stored(op: CopyOp, is_stored: bool) -> None:
        wrong = None if is_stored else HybridKVError(f"slot {op.slot.offset} was not stored")
        done.put(wrong)

    def store() -> None:
        copier.store(ops, stored)
        _wait(done, len(ops))

    def load() -> None:
        copier.load(ops, done.put)
        _wait(done, 1)

    works = {"copy": _plain_copy(memory), "store": store, "load": load}
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
    return best


def _wait(done: "Queue[HybridKVError | None]", count: int) -> None:
    for _ in range(count):
        try:
            wrong = done.get(timeout=DONE_SECONDS)
        except Empty as error:
            raise HybridKVError(f"a copy did not end within {DONE_SECONDS:g} s") from error
        if wrong is not None:
            raise wrong


def _plain_copy(memory: torch.Tensor) -> Callable[[], None]:
    """One copy of all the bytes: memmove on a CPU; pinned host memory to the device on CUDA."""
    source = memory[:, 1:].contiguous()
    other = torch.zeros(source.shape, dtype=source.dtype, pin_memory=memory.is_cuda)
    size = source.numel() * source.element_size()

    def copy() -> None:
        if memory.is_cuda:
            source.copy_(other, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(other.data_ptr(), source.data_ptr(), size)

    return copy
