"""What the connectors of one worker owe the engine: each load and each save is reported once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferLedger:
    """Loads and saves that were announced and not reported yet."""

    loads: dict[str, int] = field(default_factory=dict)
    """The connector that loads a request."""
    saves: dict[str, set[int]] = field(default_factory=dict)
    """The connectors that hold a request's blocks."""
    tainted: set[str] = field(default_factory=set)
    """Loads of which some part has failed already."""
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    absorbed: int = 0
    """Reports that nobody waited for."""

    def announce(self, loads: Mapping[str, int], saves: Mapping[str, Iterable[int]]) -> None:
        """The engine waits for these from now on."""
        self.loads.update(loads)
        for request_id, children in saves.items():
            self.saves.setdefault(request_id, set()).update(children)

    def loaded(self, child: int, finished: Iterable[str], failed: Iterable[str]) -> None:
        """A connector reported these; a failed load ends only when it is finished too."""
        self.tainted.update(name for name in failed if self.loads.get(name) == child)
        for request_id in finished:
            if self.loads.get(request_id) == child:
                self._end(request_id)
            else:
                self.absorbed += 1

    def taint(self, child: int) -> None:
        """Some part of some load of this connector failed, and nobody knows of which."""
        self.tainted.update(name for name, loading in self.loads.items() if loading == child)

    def give_up(self, request_ids: Iterable[str]) -> None:
        """These loads have failed, whatever their connector will say."""
        for request_id in self.loads.keys() & set(request_ids):
            self.tainted.add(request_id)
            self._end(request_id)

    def sent(self, child: int, request_ids: Iterable[str]) -> None:
        """A connector reported these saves as done."""
        for request_id in request_ids:
            children = self.saves.get(request_id, set())
            if child not in children:
                self.absorbed += 1
                continue
            children.discard(child)
            if not children:
                del self.saves[request_id]
                self.saved.add(request_id)

    def let_go(self, child: int, request_ids: Iterable[str]) -> None:
        """These saves end, as far as this connector goes."""
        self.sent(child, [name for name in request_ids if child in self.saves.get(name, ())])

    def is_owed_by(self, child: int) -> bool:
        """Whether a connector has transfers to report."""
        return child in self.loads.values() or any(child in some for some in self.saves.values())

    def take(self) -> tuple[set[str], set[str], set[str]]:
        """(finished, failed, saved) requests since the last call; failed ones are in both."""
        taken = self.finished, self.failed, self.saved
        self.finished, self.failed, self.saved = set(), set(), set()
        return taken

    def _end(self, request_id: str) -> None:
        del self.loads[request_id]
        self.finished.add(request_id)
        if request_id in self.tainted:
            self.tainted.discard(request_id)
            self.failed.add(request_id)
