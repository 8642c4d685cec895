"""The connector for vLLM to load by this module's path, with stores that end late, as on a GPU."""

import threading
from collections.abc import Callable, Sequence

import hybridkv.connector.worker.copier_factory
from hybridkv.connector import HybridKVConnector
from hybridkv.connector.copy.host import HostCopier
from hybridkv.core.copies import CopyOp

__all__ = ["HybridKVConnector"]
LATE_SECONDS = 0.5


class LateCopier(HostCopier):
    """Stores at once, and says so some time later."""

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Store, and call `done` from another thread, when the engine has nothing left to do."""

        def later(op: CopyOp, stored: bool) -> None:
            timer = threading.Timer(LATE_SECONDS, done, (op, stored))
            timer.daemon = True
            timer.start()

        super().store(ops, later)


vars(hybridkv.connector.worker.copier_factory).update(HostCopier=LateCopier)
