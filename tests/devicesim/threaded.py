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

    def start(self, name: str, lane: Lane) -> None:
        """See Device."""
        thread = threading.Thread(target=drive, args=(lane,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def kernels(self, tables: Any, table: Any, groups: Any, staging: Any) -> Any:
        """See Device. The views are the engine's memory, which nobody else has told it."""
        for views in groups:
            for view in views:
                self.adopt(view)
        return super().kernels(tables, table, groups, staging)

    def launch(self, work: Callable[[], None], stream: Any) -> None:
        """Run at once, as all that is queued."""
        with self.lock:
            super().launch(work, stream)
            self.settle()

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        """Run at once."""
        with self.lock:
            super().copy(to, source, size, stream)
            self.settle()

    def copy_all(self, pieces: Any, stream: Any) -> None:
        """Run at once."""
        with self.lock:
            super().copy_all(pieces, stream)

    def record(self, stream: Any) -> Any:
        """Over at once."""
        with self.lock:
            event = super().record(stream)
            self.settle()
            return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """Over at once."""
        with self.lock:
            super().wait_event(stream, event)
            self.settle()

    def call(self, work: Callable[[], bytes]) -> Any:
        """Hash at once."""
        with self.lock:
            result = super().call(work)
            self.settle()
            return result

    def wait(self, waitable: Any) -> None:
        """As CUDA's."""
        while not waitable.ready():
            waitable.wait()
