"""Pieces of pinned memory, while another thread pins more of it."""

import random

from hybridkv.connector.copy.pins import Pins
from tests.arenas import unnamed_arena
from tests.devicesim.device import SimulatedDevice

PIN = 1 << 16
ARENA = 8 * PIN


def test_no_piece_is_in_two_registrations_that_come_meanwhile() -> None:
    """CUDA refuses such a copy, and that ends the copier."""
    with unnamed_arena(ARENA) as arena:
        pins = Pins(arena, PIN)
        lane = pins.pin_pages(SimulatedDevice(random.Random(1)), ARENA)

        class Starts(list[int]):
            """Lets the pinning thread go on after the last time that `cut` reads the length."""

            reads = 0

            def __len__(self) -> int:
                self.reads += 1  # By `bisect_right`, then by `cut`.
                length = super().__len__()
                if self.reads % 2 == 0:
                    next(lane, None)
                return length

        next(lane)
        pins.starts = Starts(pins.starts)
        for start, size, is_pinned in pins.cut(0, ARENA, ARENA):
            assert not is_pinned or start // PIN == (start + size - 1) // PIN
