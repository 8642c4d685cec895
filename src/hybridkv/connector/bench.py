"""The measurement behind `hybridkv bench path`: the real copier beside a plain copy of the same bytes."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridkv.connector.copier import Copier, HostCopier, PartLayout
from hybridkv.connector.cuda import CudaCopier
from hybridkv.core.errors import HybridKVError
from hybridkv.core.plans import CopyOp, SlotRef
from hybridkv.shm.arena import attach_arena
from hybridkv.wire.messages import Welcome

DONE_SECONDS = 120.0


def measure_path(
    welcome: Welcome,
    slots: Sequence[tuple[int, int]],
    layers: int,
    block_bytes: int,
    checksum: str,
    device: str,
    rounds: int,
) -> dict[str, Any]:
    """GB/s of store, load and a plain copy (best of `rounds`, taken in turns), and the ratios; proves the bytes."""
    objects = len(slots)
    arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
    end = max(offset for offset, _ in slots) + layers * block_bytes + 4096
    # One allocation for all layers, as vLLM has; one block more than objects, for the null block.
    memory = torch.randint(-(2**62), 2**62, (layers, objects + 1, block_bytes // 8), dtype=torch.int64, device=device)
    views = [memory[layer].view(objects + 1, 1, 1, -1) for layer in range(layers)]
    copier: Copier
    if memory.is_cuda:
        copier = cuda = CudaCopier(arena, [views], PartLayout(0, 1, checksum))
        cuda.pin(end)
    else:
        arena.populate(0, end)
        copier = HostCopier(arena, [views], PartLayout(0, 1, checksum))
    ids = (torch.randperm(objects, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    refs = [SlotRef(offset, generation) for offset, generation in slots]
    ops = [CopyOp(ref, 0, chunk, 1, 0, (ids[chunk],)) for chunk, ref in enumerate(refs)]
    plain = _plain_copy(memory)
    best = {"copy": float("inf"), "store": float("inf"), "load": float("inf")}
    before = memory.clone()
    for _ in range(rounds):
        for name, work in (
            ("copy", plain),
            ("store", lambda: _store(copier, ops)),
            ("load", lambda: _load(copier, ops)),
        ):
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
    total = objects * layers * block_bytes
    rate = {name: total / seconds / 1e9 for name, seconds in best.items()}
    return {
        **{f"{name}_GBps": round(value, 2) for name, value in rate.items()},
        "store_ratio": round(rate["store"] / rate["copy"], 2),
        "load_ratio": round(rate["load"] / rate["copy"], 2),
    }


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
    left = [len(ops)]
    done = threading.Event()

    def finished(op: CopyOp, stored: bool) -> None:
        if not stored:
            raise HybridKVError(f"slot {op.slot.offset} was not stored")
        left[0] -= 1
        if not left[0]:
            done.set()

    copier.store(ops, finished)
    _wait(done)


def _load(copier: Copier, ops: Sequence[CopyOp]) -> None:
    errors: list[HybridKVError | None] = []
    done = threading.Event()

    def finished(error: HybridKVError | None) -> None:
        errors.append(error)
        done.set()

    copier.load(ops, finished)
    _wait(done)
    if errors[0] is not None:
        raise errors[0]


def _wait(done: threading.Event) -> None:
    if not done.wait(DONE_SECONDS):
        raise HybridKVError(f"a copy did not end within {DONE_SECONDS:g} s")
