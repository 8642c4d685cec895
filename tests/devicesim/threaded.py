"""The simulated device with lanes in real threads, for what a simulation in one thread misses."""

import random
import threading
from collections.abc import Callable
from typing import Any

from hybridkv.connector.copy.cuda_device import drive
from hybridkv.connector.copy.device import Lane
from tests.devicesim.device import SimulatedDevice


class ThreadedDevice(SimulatedDevice):
    """Lanes in real threads, as on CUDA; a lock lets one of them call at a time."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.lock = threading.RLock()
        self.threads: list[threading.Thread] = []

    def start_lane(self, name: str, lane: Lane) -> None:
        thread = threading.Thread(target=drive, args=(lane,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def make_kernels(self, tables: Any, device_rows: Any, groups: Any, staging: Any) -> Any:
        """Adopt the views, because the tests adopt no memory, and make the kernels."""
        for views in groups:
            for view in views:
                self.adopt(view)
        return super().make_kernels(tables, device_rows, groups, staging)

    def launch(self, work: Callable[[], None], stream: Any) -> None:
        """Queue the work, and run all that is queued, as the calls below do."""
        with self.lock:
            super().launch(work, stream)
            self.settle()

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        with self.lock:
            super().copy(to, source, size, stream)
            self.settle()

    def copy_all(self, copies: Any, stream: Any) -> None:
        with self.lock:
            super().copy_all(copies, stream)

    def record(self, stream: Any) -> Any:
        with self.lock:
            event = super().record(stream)
            self.settle()
            return event

    def wait_event(self, stream: Any, event: Any) -> None:
        with self.lock:
            super().wait_event(stream, event)
            self.settle()

    def submit(self, work: Callable[[], bytes]) -> Any:
        with self.lock:
            result = super().submit(work)
            self.settle()
            return result

    def wait_for(self, waitable: Any) -> None:
        while not waitable.is_over():
            waitable.wait()
