"""The rate of loads beside a busy interpreter, on a simulated link: `python -m benchmarks.copies`.

The lanes are real threads, and the device is a model in real time: a link of 55 GB/s, kernels, and
calls that let go of the interpreter's lock for as long as CUDA's do. Another thread, as the
engine's, holds the lock for a share of each 10 ms. No byte is copied.
"""

import argparse
import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.rows import print_rows
from hybridkv.connector.copy.cuda_device import drive
from hybridkv.connector.copy.device import CopyList, Lane, Stream, Waitable
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.tables import KernelLaunch
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import SlotRef
from hybridkv.core.sizes import parse_size
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes

LINK_BYTES_SECOND = 55e9  # PCIe 5, pinned.
MEMORY_BYTES_SECOND = 1.5e12  # Of a kernel that reads and writes.
KERNEL_SECONDS = 15e-6
CALL_US, LAUNCH_US, PIECE_US = 3, 5, 0.5
"""What a call of CUDA takes without the interpreter's lock, and each piece of a call for many."""
CALL_BYTES_MAX = 1 << 20  # What a model of a call writes to memory.
PERIOD_SECONDS = 0.01
LAYERS, BLOCKS = 32, 8
SHARES = (0.0, 0.3, 0.5, 0.8)
OBJECT_MIB = (1, 5, 16, 32)
ROUNDS = 11
DONE_SECONDS = 60.0


class LinkEvent:
    """An event that is over at a time of the clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def is_over(self) -> bool:
        return time.perf_counter() >= self.at

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


class LinkDevice:
    """A Device and its Kernels. A stream is the time at which it has done its work."""

    can_digest = True

    def __init__(self, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._streams: list[float] = [0.0]
        self._link = 0.0  # The time at which the link is free.
        self._launching = Stream(0)
        # It lets go of the interpreter's lock.
        self._memset = ctypes.CDLL(None).memset
        self._memory = ctypes.create_string_buffer(CALL_BYTES_MAX)
        started = time.perf_counter()
        for _ in range(100):
            self._memset(self._memory, 0, ctypes.c_size_t(CALL_BYTES_MAX))
        self._us_bytes = 100 * CALL_BYTES_MAX / (time.perf_counter() - started) / 1e6

    def _call(self, us: float) -> None:
        size = min(CALL_BYTES_MAX, round(us * self._us_bytes))
        self._memset(self._memory, 0, ctypes.c_size_t(size))

    def _advance(self, stream: Stream, seconds: float) -> None:
        now = time.perf_counter()
        self._streams[stream] = max(now, self._streams[stream]) + seconds

    def free_bytes(self) -> int:
        return 64 << 30

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """Allocate pinned memory. Device memory is not there."""
        return torch.zeros(size if pinned else 0, dtype=torch.uint8)

    def current_stream(self) -> Stream:
        return Stream(0)

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        self._streams.append(0.0)
        return Stream(len(self._streams) - 1)

    def record(self, stream: Stream) -> LinkEvent:
        self._call(CALL_US)
        return LinkEvent(self._streams[stream])

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        assert isinstance(event, LinkEvent)
        self._call(CALL_US)
        self._streams[stream] = max(self._streams[stream], event.at)

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        self._call(CALL_US)
        self._copy(size, stream)

    def copy_all(self, copies: CopyList, stream: Stream) -> None:
        self._call(CALL_US + PIECE_US * len(copies.sizes))
        self._copy(sum(copies.sizes), stream)

    def _copy(self, size: int, stream: Stream) -> None:
        start = max(time.perf_counter(), self._streams[stream], self._link)
        self._link = self._streams[stream] = start + size / LINK_BYTES_SECOND

    def make_kernels(self, *_: Any) -> Any:
        return self

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        self._run(len(launch.ops))

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        self._run(objects)

    def _run(self, objects: int) -> None:
        seconds = KERNEL_SECONDS + objects * self._object_bytes / MEMORY_BYTES_SECOND
        self._advance(self._launching, seconds)

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        self._call(LAUNCH_US)
        self._launching = stream
        work()

    def register(self, address: int, size: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass

    def clear_error(self) -> None:
        pass

    def submit(self, work: Callable[[], bytes]) -> Any:
        raise AssertionError("the device hashes")

    def start_lane(self, name: str, lane: Lane) -> None:
        threading.Thread(target=drive, args=(lane,), name=name, daemon=True).start()

    def enter_thread(self) -> None:
        pass

    def wait_for(self, waitable: Waitable) -> None:
        while not waitable.is_over():
            waitable.wait()


class BusyInterpreter:
    """A thread that holds the interpreter's lock for a share of each period."""

    def __init__(self, share: float) -> None:
        self._share, self._is_over = share, False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over:
            until = time.perf_counter() + self._share * PERIOD_SECONDS
            while time.perf_counter() < until:
                pass
            time.sleep((1 - self._share) * PERIOD_SECONDS)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


class Loads:
    """A pipeline, and a load of one stored object, again and again."""

    def __init__(self, object_bytes: int, total_bytes: int) -> None:
        device = LinkDevice(object_bytes)
        self.size = object_bytes
        block = object_bytes // LAYERS // BLOCKS
        view = torch.zeros(block, dtype=torch.uint8).expand(4096, block)
        demand = Demand(object_bytes, BLOCKS, object_bytes)
        self.pipeline = CopyPipeline(device, [[view] * LAYERS], demand)
        memory = bytearray(slot_bytes(object_bytes, 1))
        memory[:HEADER_BYTES] = SlotHeader(SlotState.WRITING, 1, 1, object_bytes).pack()
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        arena: Any = SimpleNamespace(memory=memoryview(memory), address=address)
        self.attached = self.pipeline.attach(arena, PartLayout(0, 1, "on"))
        self.pipeline.pin_arena(self.attached, len(memory))
        op = CopyOp(SlotRef(0, 1), 0, 0, BLOCKS, 0, tuple(range(BLOCKS)))
        self.ops = [op] * (total_bytes // object_bytes)
        stored = threading.Event()
        self.pipeline.queue_store(self.attached, [op], lambda op, is_stored: stored.set())
        if not stored.wait(DONE_SECONDS):
            raise HybridKVError("the object was not stored")

    def measure(self) -> float:
        """Bytes in a second."""
        ended = threading.Event()
        errors: list[HybridKVError | None] = []

        def done(error: HybridKVError | None) -> None:
            errors.append(error)
            ended.set()

        started = time.perf_counter()
        self.pipeline.queue_load(self.attached, self.ops, done)
        if not ended.wait(DONE_SECONDS) or errors[0] is not None:
            raise HybridKVError(f"a load failed: {errors}")
        return len(self.ops) * self.size / (time.perf_counter() - started)


def main() -> int:
    """Measure loads of each size of objects beside each share, and print the rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=__doc__)
    parser.add_argument("--bytes", default="6GiB", help="what one load has (default: 6GiB)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for size in OBJECT_MIB:
        loads = Loads(size << 20, parse_size(arguments.bytes, "--bytes"))
        row: dict[str, object] = {"object": f"{size} MiB"}
        for share in SHARES:
            with BusyInterpreter(share):
                rates = sorted(loads.measure() / 1e9 for _ in range(ROUNDS))
            row[f"GB/s, {share:.0%} busy: least"] = round(rates[0], 1)
            row[f"{share:.0%}: median"] = round(statistics.median(rates), 1)
        loads.pipeline.close()
        rows.append(row)
        print(f"objects of {size} MiB done", file=sys.stderr)
    print_rows(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
