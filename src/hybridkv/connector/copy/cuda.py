"""Copies between one arena's slots and the engine's blocks on a device."""

from collections.abc import Callable, Sequence

from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena


class CudaCopier(Copier):
    """The Copier of one arena on a device. All of a rank's copiers share its pipeline."""

    def __init__(self, pipeline: CopyPipeline, arena: Arena, part: PartLayout) -> None:
        self._pipeline = pipeline  # It outlives its copiers.
        self.attached = pipeline.attach(arena, part)

    def pin_below(self, reserved_bytes: int) -> None:
        """Pin the arena's memory below `reserved_bytes`, as CopyPipeline.pin_arena does."""
        self._pipeline.pin_arena(self.attached, reserved_bytes)

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Gather on the engine's stream. `done` is called in the store lane."""
        self._pipeline.queue_store(self.attached, ops, done)

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Copy after the engine's present work. `done` is called in the load lane."""
        self._pipeline.queue_load(self.attached, ops, done)

    def retire(self) -> None:
        """Finish this arena's copies by and by, then unpin it."""
        self._pipeline.detach(self.attached)

    def close(self) -> None:
        """As `retire`, and wait for it. Any thread may call it."""
        self._pipeline.wait_for_latch(self._pipeline.detach(self.attached))
