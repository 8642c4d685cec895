"""One rank's part of a slot: where it is, and how its bytes are signed and proven."""

from dataclasses import dataclass

import xxhash

from hybridkv.connector.copy.contract import BadSlotError
from hybridkv.core.copies import CopyOp
from hybridkv.shm.arena import Arena
from hybridkv.shm.signature import hasher, signature
from hybridkv.shm.slots import CHECKSUM_BYTES, checksum_offset, payload_offset, read_generation


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Which part of a slot is one rank's, and where it is."""

    rank: int
    ranks: int
    checksum: str
    """The value of `Settings.checksum`."""
    replicated: frozenset[int] = frozenset()
    """Indices of the groups whose objects have one part that all ranks share."""

    def writes(self, op: CopyOp) -> bool:
        """Whether this rank stores its part of the object; ranks take turns with shared parts."""
        return op.group_index not in self.replicated or op.chunk % self.ranks == self.rank

    def payload(self, op: CopyOp, part_bytes: int) -> int:
        """The byte offset of this rank's part in the arena."""
        if op.group_index in self.replicated:
            return op.slot.offset + payload_offset(1)
        return op.slot.offset + payload_offset(self.ranks) + self.rank * part_bytes

    def sign(self, arena: Arena, op: CopyOp, part_bytes: int) -> None:
        """Write the checksum of this rank's part."""
        if self.checksum != "off":
            self.write_signature(arena, op, self._hash_part(arena, op, part_bytes))

    def prove(self, arena: Arena, op: CopyOp, part_bytes: int) -> None:
        """Raise BadSlotError unless the slot has the op's generation and its part its checksum."""
        self.recheck(arena, op)
        if self.checksum != "off":
            self.check_signature(arena, op, self._hash_part(arena, op, part_bytes))

    def hasher(self, op: CopyOp) -> "xxhash.xxh3_64":
        """A hasher for callers that hash a part piece by piece, while it is in the cache."""
        return hasher(op.slot.generation)

    def write_signature(self, arena: Arena, op: CopyOp, digest: int) -> None:
        """Write `digest` as the checksum of this rank's part."""
        at = self._checksum(op)
        arena.memory[at : at + CHECKSUM_BYTES] = signature(digest)

    def check_signature(self, arena: Arena, op: CopyOp, digest: int) -> None:
        """Raise BadSlotError unless `digest` is what the writer of the part signed."""
        at = self._checksum(op)
        if bytes(arena.memory[at : at + CHECKSUM_BYTES]) != signature(digest):
            raise BadSlotError(op, "its bytes are not those that were stored")

    def recheck(self, arena: Arena, op: CopyOp) -> None:
        """Raise BadSlotError where the slot is another object's; called before and after a copy."""
        if read_generation(arena.memory, op.slot.offset) != op.slot.generation:
            raise BadSlotError(op, "it was given to another object")

    def _checksum(self, op: CopyOp) -> int:
        return op.slot.offset + checksum_offset(
            0 if op.group_index in self.replicated else self.rank
        )

    def _hash_part(self, arena: Arena, op: CopyOp, part_bytes: int) -> int:
        start = self.payload(op, part_bytes)
        hasher = self.hasher(op)
        hasher.update(arena.memory[start : start + part_bytes])
        return hasher.intdigest()
