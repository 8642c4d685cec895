"""Write slots reserved ahead of need, so that a store costs the engine's step no round trip."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.core.coverage import SlotShape
from hybridkv.core.packed import SLOT_BYTES
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import CHANGES_MAX, SESSION_SHARE

RETRY_SECONDS = 0.02
"""The next request waits this long after the daemon granted fewer slots than it was asked for."""


class CreditRequest(NamedTuple):
    """A request for slots that is to be sent to the daemon."""

    shape: SlotShape
    slots: int  # The number of slots.


@dataclass
class _SlotPool:
    """The slots of one shape that are granted and not taken yet."""

    target: int
    tickets: bytes = b""
    asked: deque[int] = field(default_factory=deque)
    """The slots of each request that the daemon has not answered yet."""
    retry_at: float = 0.0


class SlotCredits:
    """Pools of write slots by shape, as packed arrays (core.packed), refilled when half empty."""

    def __init__(self, targets: Mapping[SlotShape, int], ticket_bytes: int = SLOT_BYTES) -> None:
        """`targets` are the slots that each pool should have, where the arena has room for all.

        `ticket_bytes` is the size of a ticket (core.packed).
        """
        self._ticket_bytes = ticket_bytes
        self._wanted = dict(targets)
        self._fitted_bytes = 0  # The arena's size that the targets fit.
        self.pools = {shape: _SlotPool(target) for shape, target in targets.items()}

    def fit_arena(self, slots_bytes: int) -> None:
        """Lower the targets alike, so that all pools fit into a session's share of the arena.

        Otherwise the first pools would take the share, and no object of another shape had a slot.
        Each pool keeps a target of at least one slot. `slots_bytes` is the arena's size.
        """
        if slots_bytes == self._fitted_bytes:
            return
        self._fitted_bytes, share_bytes = slots_bytes, slots_bytes // SESSION_SHARE
        wanted_bytes = sum(slot_bytes(*shape) * count for shape, count in self._wanted.items())
        for shape, count in self._wanted.items():
            fitting = count * share_bytes // max(wanted_bytes, share_bytes)
            self.pools[shape].target = max(1, fitting)

    def take_slots(self, shape: SlotShape, count: int) -> bytes:
        """Take at most `count` slots of `shape` out of their pool, and return their tickets."""
        pool = self.pools.get(shape)
        if pool is None:
            return b""
        cut = count * self._ticket_bytes
        taken, pool.tickets = pool.tickets[:cut], pool.tickets[cut:]
        return taken

    def credit_requests(self, now: float) -> list[CreditRequest]:
        """Return the requests to send to the daemon now. `on_granted` takes the answers."""
        requests: list[CreditRequest] = []
        for shape, pool in self.pools.items():
            count = len(pool.tickets) // self._ticket_bytes
            if not pool.asked and now >= pool.retry_at and count * 2 <= pool.target:
                whole, rest = divmod(pool.target - count, CHANGES_MAX)
                pool.asked.extend([CHANGES_MAX] * whole + [rest] * (rest > 0))
                requests += [CreditRequest(shape, asked) for asked in pool.asked]
        return requests

    def on_granted(self, shape: SlotShape, tickets: bytes, now: float) -> None:
        """Add the slots of the daemon's next answer, perhaps fewer than it was asked for."""
        pool = self.pools.get(shape)
        if pool is None:
            return
        pool.tickets += tickets
        asked = pool.asked.popleft() if pool.asked else 0
        if len(tickets) < asked * self._ticket_bytes:
            pool.retry_at = now + RETRY_SECONDS

    @property
    def is_awaiting(self) -> bool:
        """True while the daemon has not answered every request."""
        return any(pool.asked for pool in self.pools.values())

    def forget_slots(self) -> None:
        """Empty every pool, because the daemon is gone and its slots with it."""
        self.pools = {shape: _SlotPool(pool.target) for shape, pool in self.pools.items()}
