"""Write slots reserved ahead of need, so that a store costs the engine's step no round trip."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridkv.core.coverage import SlotShape
from hybridkv.core.packed import U64
from hybridkv.wire.messages import CHANGES_MAX

RETRY_SECONDS = 0.02
"""How long the next request waits after the daemon granted fewer slots than it was asked for."""


@dataclass
class _SlotPool:
    target: int
    offsets: bytes = b""
    generations: bytes = b""
    asked: deque[int] = field(default_factory=deque)
    """The slots of each request that the daemon has not answered yet."""
    retry_at: float = 0.0


class SlotCredits:
    """Pools of write slots by shape, as packed arrays (core.packed), refilled when half empty."""

    def __init__(self, targets: Mapping[SlotShape, int]) -> None:
        self._pools = {shape: _SlotPool(target) for shape, target in targets.items()}

    def take(self, shape: SlotShape, count: int) -> tuple[bytes, bytes]:
        """(offsets, generations) of at most `count` slots of `shape`, which leave the pool."""
        pool = self._pools.get(shape)
        if pool is None:
            return b"", b""
        cut = count * U64
        taken = pool.offsets[:cut], pool.generations[:cut]
        pool.offsets, pool.generations = pool.offsets[cut:], pool.generations[cut:]
        return taken

    def wanted(self, now: float) -> list[tuple[SlotShape, int]]:
        """(shape, count) of each request to send to the daemon now; `granted` takes the answers."""
        wanted: list[tuple[SlotShape, int]] = []
        for shape, pool in self._pools.items():
            count = len(pool.offsets) // U64
            if not pool.asked and now >= pool.retry_at and count * 2 <= pool.target:
                whole, rest = divmod(pool.target - count, CHANGES_MAX)
                pool.asked.extend([CHANGES_MAX] * whole + [rest] * (rest > 0))
                wanted += [(shape, asked) for asked in pool.asked]
        return wanted

    def granted(self, shape: SlotShape, offsets: bytes, generations: bytes, now: float) -> None:
        """The daemon's next answer, maybe with fewer slots than it was asked for."""
        pool = self._pools.get(shape)
        if pool is None:
            return
        pool.offsets += offsets
        pool.generations += generations
        asked = pool.asked.popleft() if pool.asked else 0
        if len(offsets) < asked * U64:
            pool.retry_at = now + RETRY_SECONDS

    @property
    def awaited(self) -> bool:
        """Whether a request to the daemon is not answered yet."""
        return any(pool.asked for pool in self._pools.values())

    def reset(self) -> None:
        """The daemon is gone, and every slot with it."""
        self._pools = {shape: _SlotPool(pool.target) for shape, pool in self._pools.items()}
