"""Which slots of several nodes' arenas belong together: those of one object's parts."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridkv.shm.slots import SLOT_ALIGN

_SLOT = np.dtype([("offset", "<u8"), ("generation", "<u8")])  # As core.packed has it.


class NodeSlots:
    """The slots of all nodes, by that of the first node.

    The tables have a row for each place of the first node's arena where a slot may begin. The
    system gives them memory where slots are: 16 bytes for each node.
    """

    def __init__(self, arena_bytes: int, nodes: int) -> None:
        """`arena_bytes` is the size of the first node's arena."""
        places = -(-arena_bytes // SLOT_ALIGN)
        self._slots = [np.zeros(places, _SLOT) for _ in range(nodes)]

    def match_slots(self, slots: Sequence[bytes]) -> None:
        """Note packed slots of each node (core.packed) that belong together: the i-th of each."""
        places = _places(slots[0])
        for table, own in zip(self._slots, slots, strict=True):
            table[places] = np.frombuffer(own, _SLOT)

    def on_node(self, node: int, slots: bytes) -> bytes:
        """Return a node's packed slots for those of the first node.

        One that is another object's by now gets generation 0, which no slot has.
        """
        if not node:
            return slots
        places = _places(slots)
        own = self._slots[node][places]
        is_stale = self._slots[0][places] != np.frombuffer(slots, _SLOT)
        own["generation"][is_stale] = 0
        return own.tobytes()


def _places(slots: bytes) -> npt.NDArray[np.int64]:
    offsets = np.frombuffer(slots, _SLOT)["offset"]
    return (offsets // SLOT_ALIGN).astype(np.int64)
