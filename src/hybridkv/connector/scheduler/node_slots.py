"""Which slots of several nodes' arenas belong together: those of one object's parts."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.wire.messages import PackedSlots

_WORD = np.dtype("<u8")  # As core.packed has it.


class NodeSlots:
    """The slots of all nodes, by that of the first node.

    The tables have a row for each place of the first node's arena where a slot may begin. The
    system gives them memory where slots are: 24 bytes for two nodes, 16 more for each further one.
    """

    def __init__(self, arena_bytes: int, nodes: int) -> None:
        """`arena_bytes` is the size of the first node's arena."""
        places = -(-arena_bytes // SLOT_ALIGN)
        self._generations = [np.zeros(places, _WORD) for _ in range(nodes)]
        self._offsets = [np.zeros(places if node else 0, _WORD) for node in range(nodes)]

    def match_slots(self, slots: Sequence[PackedSlots]) -> None:
        """Note slots of each node that belong together: the i-th of each."""
        places = _places(slots[0].offsets)
        for node, own in enumerate(slots):
            self._generations[node][places] = np.frombuffer(own.generations, _WORD)
            if node:
                self._offsets[node][places] = np.frombuffer(own.offsets, _WORD)

    def on_node(self, node: int, slots: PackedSlots) -> PackedSlots:
        """Return a node's slots for those of the first node.

        One that is another object's by now gets generation 0, which no slot has.
        """
        if not node:
            return slots
        places = _places(slots.offsets)
        own_generations = self._generations[node][places]
        is_stale = self._generations[0][places] != np.frombuffer(slots.generations, _WORD)
        own_generations[is_stale] = 0
        return PackedSlots(self._offsets[node][places].tobytes(), own_generations.tobytes())


def _places(offsets: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(offsets, np.dtype("<i8")) // SLOT_ALIGN
