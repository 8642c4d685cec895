"""What the scheduler role owes the engine: each load and each save that has not ended."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

NOBODY = -1
"""The index of a load that no connector does, and which therefore fails."""


@dataclass(eq=False, slots=True)
class ChildLoad:
    """An asynchronous load that has not ended."""

    child: int
    tokens: int
    started: float
    announced: bool = False
    """Whether the workers know of it."""


class EndedTransfers(NamedTuple):
    """What a step's report ended; `saves` has the connectors that held the blocks."""

    loads: dict[str, ChildLoad]
    failed: set[str]
    saves: dict[str, set[int]]
    absorbed: int
    """Reports of transfers that nobody waited for."""

    def of(self, child: int) -> dict[str, set[str] | None]:
        """One connector's own, as fields of vLLM's output."""
        loads = {name for name, load in self.loads.items() if load.child == child}
        saves = {name for name, holders in self.saves.items() if child in holders}
        return {
            "finished_recving": loads or None,
            "failed_recving": loads & self.failed,
            "finished_sending": saves or None,
        }


class PendingTransfers:
    """Loads and saves of one engine that have not ended, by request."""

    def __init__(self) -> None:
        self.loads: dict[str, ChildLoad] = {}
        self.saves: dict[str, set[int]] = {}
        """The connectors that hold a request's blocks."""
        self._new_saves: dict[str, tuple[int, ...]] = {}
        self._let_go: list[tuple[int, str]] = []

    def hold(self, request_id: str, child: int) -> None:
        """A connector holds the blocks of a request that ends."""
        self.saves.setdefault(request_id, set()).add(child)

    def finished(self, request_id: str) -> bool:
        """The request ended; whether some connector holds its blocks."""
        if request_id in self.saves:
            self._new_saves[request_id] = tuple(sorted(self.saves[request_id]))
        return request_id in self.saves

    def give_up(self, dead: Container[int], settled: Iterable[int]) -> list[str]:
        """Requests whose loads fail because of dead connectors.

        A load that no worker knows of fails at once. Other loads, and saves, end when the copies of
        their connector have had time to end: it is one of `settled`.
        """
        given_up, settled = [], set(settled)
        for request_id, load in self.loads.items():
            untold = not load.announced and (load.child == NOBODY or load.child in dead)
            if untold or load.child in settled:
                load.child = NOBODY
                given_up.append(request_id)
        for request_id, holders in self.saves.items():
            self._let_go += [(child, request_id) for child in holders & settled]
        return given_up

    def announce(self) -> dict[str, Any]:
        """What the workers do not know yet, as fields of MultiPlan."""
        new = {name: load.child for name, load in self.loads.items() if not load.announced}
        failed = tuple(name for name, load in self.loads.items() if load.child == NOBODY)
        saves, let_go = self._new_saves, tuple(self._let_go)
        self._new_saves, self._let_go = {}, []
        for request_id in new:
            self.loads[request_id].announced = True
        return {"loads": new, "saves": saves, "failed": failed, "let_go": let_go}

    def end(self, output: Any) -> EndedTransfers:
        """End what workers report, and leave in vLLM's `output` what the engine has to see.

        Of a request that was aborted while it loaded, the engine frees the blocks with the first
        report that it sees, and ends with the second.
        """
        received, sent = set(output.finished_recving or ()), set(output.finished_sending or ())
        loads, saves = received & self.loads.keys(), sent & self.saves.keys()
        output.finished_recving = {n for n in loads if n not in self.saves or n in saves} or None
        output.finished_sending = saves - self.loads.keys() or None
        return EndedTransfers(
            {name: self.loads.pop(name) for name in loads},
            loads & set(output.failed_recving or ()),
            {name: self.saves.pop(name) for name in saves},
            len(received) - len(loads) + len(sent) - len(saves),
        )
