"""`python -m tests.gpu.checks.registration`: launches of a kernel while memory is pinned."""

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch

from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.shm.arena import Arena
from tests.arenas import unnamed_arena

ARENA_BYTES, PIN_BYTES = 4 << 30, 64 << 20
LAUNCHES_ALONE = 20_000
SYNCHRONISED = 64  # Launches between two waits for the device.


def launch_microseconds(is_over: Callable[[int], bool]) -> dict[str, float]:
    """Launch a small kernel until `is_over(launches)`. Returns quantiles of what a launch takes."""
    tensor = torch.zeros(1024, device="cuda")
    seconds: list[float] = []
    while not seconds or not is_over(len(seconds)):
        started = time.perf_counter()
        tensor.add_(1)
        seconds.append(time.perf_counter() - started)
        if len(seconds) % SYNCHRONISED == 0:
            torch.cuda.synchronize()
    seconds.sort()
    last = len(seconds) - 1
    quantiles = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    rows = {name: round(1e6 * seconds[int(last * at)], 1) for name, at in quantiles.items()}
    return {"launches": len(seconds), **rows}


def _is_over(thread: threading.Thread) -> Callable[[int], bool]:
    return lambda _: not thread.is_alive()


def main() -> int:
    """Print the figures as one JSON document."""
    with unnamed_arena(ARENA_BYTES) as arena:
        return measure(arena)


def measure(arena: Arena) -> int:
    """Print the figures; 1 where not all of the arena was pinned."""
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    launch_microseconds(LAUNCHES_ALONE.__le__)
    free = torch.cuda.mem_get_info()[0]
    alone = launch_microseconds(LAUNCHES_ALONE.__le__)
    seconds: list[float] = []
    pinned: list[int] = []

    def pin(pauses: bool) -> None:
        torch.cuda.set_device(0)
        for at in range(0, ARENA_BYTES, PIN_BYTES):
            started = time.perf_counter()
            if not device.register(arena.address + at, PIN_BYTES):
                return
            pinned.append(arena.address + at)
            seconds.append(time.perf_counter() - started)
            if pauses:
                time.sleep(seconds[-1])

    beside: dict[str, dict[str, float]] = {}
    for name, pauses in (("back to back", False), ("with pauses", True)):
        thread = threading.Thread(target=pin, args=(pauses,))
        thread.start()
        beside[name] = launch_microseconds(_is_over(thread))
        thread.join()
        held = free - torch.cuda.mem_get_info()[0]
        while pinned:
            device.unregister(pinned.pop())
    facts = {
        "launch_us_alone": alone,
        "launch_us_beside": beside,
        "piece_ms": round(1e3 * statistics.median(seconds), 2),
        "piece_ms_max": round(1e3 * max(seconds), 2),
        "device_mib_for_4_gib": held >> 20,
    }
    print(json.dumps(facts))
    return int(len(seconds) != 2 * ARENA_BYTES // PIN_BYTES)


if __name__ == "__main__":
    sys.exit(main())
