"""`python -m tests.engine.flipped detect|blind ...`: `hybridkv verify ...`, with a wrong byte.

One byte of a stored object is changed before the warm arm, as by bad memory. With `detect` every
byte is proven when it is loaded, with `blind` nothing is: then the answers must differ.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hybridkv.cli import main, verify
from hybridkv.cli.verify import Verification
from hybridkv.client.control import ControlClient
from hybridkv.core.geometry import GroupKind
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.judging import Measured
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.slots import SlotHeader, committed_slots, payload_offset

FLIP_BITS = 0x41


class FlippedVerification(Verification):
    """The proof, which has to fail."""

    _others: frozenset[int] = frozenset()
    """Slots of the prompt that warms up."""

    def _warm_up(self, engine: EngineProcess) -> None:
        super()._warm_up(engine)
        self._others = self._others or frozenset(self._slots())

    def _measure(
        self, engine: EngineProcess, arm: str, prompts: Sequence[list[int]], *chunks: int
    ) -> Measured:
        if arm == "warm":
            self._flip_one_byte()
        return super()._measure(engine, arm, prompts, *chunks)

    def _slots(self) -> dict[int, SlotHeader]:
        """Header of every committed slot by offset, read from the arena itself."""
        reserved = int(self._stats()["bytes_reserved"])
        with self._arena() as arena:
            return dict(committed_slots(arena.memory[:reserved]))

    def _flip_one_byte(self) -> None:
        """One wrong byte in one stored object.

        The object is one of a full attention group, since every hit needs all of those; without
        such a group, one byte in every object is flipped. It stands in the middle, since a payload
        may begin with what an answer does not depend on (an indexer's cache, while every token is
        selected anyway), and it is the high byte of a float32 and of a bfloat16 alike.
        """
        slots = self._slots()
        slots = {offset: slots[offset] for offset in slots.keys() - self._others}
        with ControlClient(self._socket_path) as control:
            groups = [group for engine in control.engines() for group in engine.geometry.groups]
        full = {group.gid for group in groups if group.kind is GroupKind.FULL}
        wanted = [offset for offset in sorted(slots) if slots[offset].gid in full][:1] or [*slots]
        with self._arena() as arena:
            for offset in wanted:
                at = slots[offset].part_bytes // 16 * 8 + 3
                arena.memory[offset + payload_offset(slots[offset].parts) + at] ^= FLIP_BITS
        self._say(f"flipped one byte in {len(wanted)} of {len(slots)} stored objects")

    def _arena(self) -> closing[Arena]:
        with ControlClient(self._socket_path) as control:
            arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        return closing(arena)


if __name__ == "__main__":
    FlippedVerification.checksum = {"detect": "paranoid", "blind": "off"}[sys.argv[1]]
    setattr(verify, Verification.__name__, FlippedVerification)
    sys.exit(main.main(["verify", *sys.argv[2:]]))
