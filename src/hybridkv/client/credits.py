"""Write slots granted ahead of need, so that a store costs the engine's step no round trip."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridkv.core.plans import SlotRef

RETRY_SECONDS = 0.02
"""After a grant of fewer slots than asked for, the next question waits this long."""


@dataclass
class _Pool:
    target: int
    slots: list[SlotRef] = field(default_factory=list)
    asked: bool = False
    retry_at: float = 0.0


class Credits:
    """Pools of write slots by part size. Refilled when half empty."""

    def __init__(self, targets: Mapping[int, int]) -> None:
        self._pools = {size: _Pool(target) for size, target in targets.items()}

    def take(self, part_bytes: int) -> SlotRef | None:
        """A slot whose parts have `part_bytes` bytes, or None: shed the store."""
        pool = self._pools.get(part_bytes)
        return pool.slots.pop() if pool and pool.slots else None

    def give_back(self, part_bytes: int, slots: Iterable[SlotRef]) -> None:
        """Slots that were taken and not written."""
        self._pools[part_bytes].slots.extend(slots)

    def wanted(self, now: float) -> list[tuple[int, int]]:
        """(part_bytes, count) to ask the daemon for now; each is then taken as asked until `granted`."""
        wanted: list[tuple[int, int]] = []
        for size, pool in self._pools.items():
            if not pool.asked and now >= pool.retry_at and len(pool.slots) * 2 <= pool.target:
                pool.asked = True
                wanted.append((size, pool.target - len(pool.slots)))
        return wanted

    def granted(self, part_bytes: int, slots: Iterable[SlotRef], now: float) -> None:
        """The daemon's answer, maybe shorter than asked for."""
        pool = self._pools.get(part_bytes)
        if pool is None:
            return
        pool.slots.extend(slots)
        pool.asked = False
        pool.retry_at = now + RETRY_SECONDS

    def reset(self) -> None:
        """The daemon is gone, and every slot with it."""
        for pool in self._pools.values():
            pool.slots.clear()
            pool.asked = False
            pool.retry_at = 0.0
