"""What every copier of the engine's blocks shares.

A part of an object is ``[layer][stored block][bytes of the block]`` (core.copies). A store fills a
part and writes its checksum. A load proves a part by its checksum and its slot's generation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import (
    CHECKSUM_BYTES,
    checksum_offset,
    payload_offset,
    piece_digests,
    read_generation,
    signature,
)


class BadSlotError(HybridKVError):
    """Slots do not hold the bytes they should. The message names the first of them."""

    def __init__(self, op: CopyOp, why: str) -> None:
        super().__init__(f"slot {op.slot.offset} (group {op.group_index}, chunk {op.chunk}): {why}")
        self.slots = [op.slot]


def load_error(errors: Sequence[HybridKVError]) -> HybridKVError | None:
    """Return the error of a load whose objects had these errors, or None.

    Faults often damage neighbouring slots together, and each that stays fails another load. So the
    error is a BadSlotError with all bad slots where there is one. Other errors name no slot.
    """
    first = min(errors, key=lambda error: not isinstance(error, BadSlotError), default=None)
    if isinstance(first, BadSlotError):
        bad = (error for error in errors if isinstance(error, BadSlotError))
        first.slots = list(dict.fromkeys(slot for error in bad for slot in error.slots))
    return first


class Copier(Protocol):
    """The copies of one rank between its blocks and one arena.

    `done` may be called from another thread.
    """

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Copy blocks out. Once this returns, work that the engine submits may reuse the blocks.

        `done` is called once for each op, with True if its slot is written. Where this method
        raises instead, no slot is written any more.
        """

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Copy blocks in. `done` is called once, when the blocks have the bytes or never will.

        It gets None if they have them. A BadSlotError has every slot of the load that was found
        bad, not the first alone.
        """

    def close(self) -> None:
        """Finish the copies that run. Nothing is copied any more."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One rank's part of each slot: where it is, and how its bytes are signed and proven.

    With `Settings.share_tp` it is the part of a shard, and `rank` and `ranks` count shards.

    The parts of an object are those of its ranks, or of its stages where a stage's ranks share one.
    With two stages of two ranks::

        groups that are not replicated      |rank 0|rank 1|rank 2|rank 3|
        replicated groups                   |ranks 0 and 1|ranks 2 and 3|
    """

    rank: int
    ranks: int
    checksum: str  # The value of `Settings.checksum`.
    replicated: frozenset[int] = frozenset()
    """Indices of the groups whose objects have one part that all ranks of a stage share."""
    stages: int = 1

    def writes(self, op: CopyOp) -> bool:
        """Return True if this rank stores its part of the object.

        Ranks take turns with shared parts: of a stage's two ranks, one stores chunks 0, 2, 4, ...
        """
        sharers = self.ranks // self.stages
        return op.group_index not in self.replicated or op.chunk % sharers == self.rank % sharers

    def part_offset(self, op: CopyOp, part_bytes: int) -> int:
        """Return the byte offset of this rank's part in the arena."""
        parts = self.stages if op.group_index in self.replicated else self.ranks
        return op.slot.offset + payload_offset(parts) + self._part(op) * part_bytes

    def sign(self, arena: Arena, op: CopyOp, part_bytes: int) -> None:
        """Write the checksum of this rank's part."""
        if self.checksum != "off":
            self.write_signature(arena, op, self._digests(arena, op, part_bytes))

    def check_part(self, arena: Arena, op: CopyOp, part_bytes: int) -> None:
        """Raise BadSlotError unless the slot has the op's generation and its part its checksum."""
        self.check_generation(arena, op)
        if self.checksum != "off":
            self.check_signature(arena, op, self._digests(arena, op, part_bytes))

    def write_signature(self, arena: Arena, op: CopyOp, digests: bytes) -> None:
        """Write the checksum of this rank's part, whose pieces have these digests (shm.slots)."""
        self._checksum(arena, op)[:] = signature(digests, op.slot.generation)

    def check_signature(self, arena: Arena, op: CopyOp, digests: bytes) -> None:
        """Raise BadSlotError unless pieces with these digests are what the writer signed."""
        if bytes(self._checksum(arena, op)) != signature(digests, op.slot.generation):
            raise BadSlotError(op, "its bytes are not those that were stored")

    def check_generation(self, arena: Arena, op: CopyOp) -> None:
        """Raise BadSlotError where the slot is another object's. Called before and after a copy."""
        if read_generation(arena.memory, op.slot.offset) != op.slot.generation:
            raise BadSlotError(op, "it was given to another object")

    def _part(self, op: CopyOp) -> int:
        """Return the number of this rank's part of the object."""
        if op.group_index in self.replicated:
            return self.rank * self.stages // self.ranks
        return self.rank

    def _checksum(self, arena: Arena, op: CopyOp) -> memoryview:
        at = op.slot.offset + checksum_offset(self._part(op))
        return arena.memory[at : at + CHECKSUM_BYTES]

    def _digests(self, arena: Arena, op: CopyOp, part_bytes: int) -> bytes:
        start = self.part_offset(op, part_bytes)
        return piece_digests(arena.memory[start : start + part_bytes])
