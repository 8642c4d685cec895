"""What every copier of the engine's blocks offers.

A part of an object is ``[layer][stored block][bytes of the block]`` (core.copies). A store fills a
part and writes its checksum. A load proves a part by its checksum and its slot's generation.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError


class BadSlotError(HybridKVError):
    """A slot does not hold the bytes it should."""

    def __init__(self, op: CopyOp, why: str) -> None:
        super().__init__(f"slot {op.slot.offset} (group {op.group_index}, chunk {op.chunk}): {why}")
        self.op = op


class Copier(Protocol):
    """One rank's copies. `done` may be called from another thread."""

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Copy blocks out. Once this returns, work that the engine submits may reuse the blocks."""

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Copy blocks in; `done` is called once, when the blocks have the bytes or never will."""

    def close(self) -> None:
        """Finish what is running."""
