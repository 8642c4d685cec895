"""What is owed to the engine: each load and each save that has not ended, in either role."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOBODY = -1  # The index of a load that no connector does, and which therefore fails.


@dataclass(eq=False, slots=True)
class ChildLoad:
    """An asynchronous load that has not ended."""

    child: int
    tokens: int
    started: float
    announced: bool = False  # Whether the workers know of it.


class EndedTransfers(NamedTuple):
    """What a step's report ended; `saves` has the connectors that held the blocks."""

    loads: dict[str, ChildLoad]
    failed: set[str]
    saves: dict[str, set[int]]
    absorbed: int  # Reports of transfers that nobody waited for.

    def of(self, child: int) -> dict[str, set[str] | None]:
        """One connector's own, as fields of vLLM's output."""
        loads = {name for name, load in self.loads.items() if load.child == child}
        saves = {name for name, holders in self.saves.items() if child in holders}
        return {
            "finished_recving": loads or None,
            "failed_recving": loads & self.failed,
            "finished_sending": saves or None,
        }


@dataclass(eq=False, slots=True)
class PendingTransfers:
    """The scheduler's: loads and saves of one engine that have not ended, by request."""

    loads: dict[str, ChildLoad] = field(default_factory=dict)
    saves: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The connectors that hold a request's blocks."""
    _new_saves: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def finished(self, request_id: str) -> bool:
        """The request ended; whether some connector holds its blocks."""
        if request_id in self.saves:
            self._new_saves[request_id] = tuple(sorted(self.saves[request_id]))
        return request_id in self.saves

    def give_up(self, dead: Container[int], settled: Container[int]) -> list[str]:
        """Requests whose loads fail because of dead connectors.

        A load that no worker knows of fails at once. Other loads, and saves, end when the copies of
        their connector have had time to end: it is one of `settled`.
        """
        given_up = []
        for request_id, load in self.loads.items():
            untold = not load.announced and (load.child == NOBODY or load.child in dead)
            if untold or load.child in settled:
                load.child = NOBODY
                given_up.append(request_id)
        return given_up

    def announce(self) -> dict[str, Any]:
        """What the workers do not know yet, as fields of MultiPlan."""
        new = {name: load.child for name, load in self.loads.items() if not load.announced}
        for request_id in new:
            self.loads[request_id].announced = True
        saves, self._new_saves = self._new_saves, {}
        return {"loads": new, "saves": saves}

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


@dataclass(slots=True)
class TransferLedger:
    """A worker's: loads and saves that were announced, each of which is reported once."""

    loads: dict[str, int] = field(default_factory=dict)  # The connector that loads a request.
    saves: dict[str, set[int]] = field(default_factory=dict)
    """The connectors that hold a request's blocks."""
    tainted: set[str] = field(default_factory=set)  # Loads of which some part has failed already.
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    absorbed: int = 0  # Reports that nobody waited for.

    def announce(self, loads: Mapping[str, int], saves: Mapping[str, Iterable[int]]) -> None:
        """The engine waits for these from now on."""
        self.loads.update(loads)
        for request_id, children in saves.items():
            self.saves.setdefault(request_id, set()).update(children)

    def loaded(self, child: int, finished: Iterable[str], failed: Iterable[str]) -> None:
        """A connector reported these; a failed load ends only when it is finished too."""
        self.tainted.update(name for name in failed if self.loads.get(name) == child)
        for request_id in finished:
            if self.loads.get(request_id) != child:
                self.absorbed += 1
                continue
            del self.loads[request_id]
            self.finished.add(request_id)
            if request_id in self.tainted:
                self.tainted.discard(request_id)
                self.failed.add(request_id)

    def sent(self, child: int, request_ids: Iterable[str]) -> None:
        """A connector reported these saves as done."""
        for request_id in request_ids:
            if child not in self.saves.get(request_id, ()):
                self.absorbed += 1
                continue
            self.saves[request_id].discard(child)
            if not self.saves[request_id]:
                del self.saves[request_id]
                self.saved.add(request_id)

    def give_up(self, children: Iterable[int]) -> None:
        """What these connectors owe ends now, whatever they will say, and their loads failed."""
        for child in children:
            loads = [name for name, loading in self.loads.items() if loading == child]
            self.loaded(child, loads, loads)
            self.sent(child, [name for name, some in self.saves.items() if child in some])

    def is_owed_by(self, child: int) -> bool:
        """Whether a connector has transfers to report."""
        return child in self.loads.values() or any(child in some for some in self.saves.values())

    def take(self) -> tuple[set[str], set[str], set[str]]:
        """(finished, failed, saved) requests since the last call; failed ones are in both."""
        taken = self.finished, self.failed, self.saved
        self.finished, self.failed, self.saved = set(), set(), set()
        return taken
