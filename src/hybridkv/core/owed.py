"""What several connectors of one worker owe the engine: each load and each save is reported once, whatever they say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """Loads and saves that were announced and not reported yet. `absorbed` counts reports that nobody waited for."""

    loads: dict[str, int] = field(default_factory=dict)
    """Request: place of the connector that loads it."""
    saves: dict[str, set[int]] = field(default_factory=dict)
    """Request: places of the connectors that hold its blocks."""
    tainted: set[str] = field(default_factory=set)
    """Loads of which some part has failed already."""
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    absorbed: int = 0

    def announce(self, loads: Mapping[str, int], saves: Mapping[str, Iterable[int]]) -> None:
        """The engine waits for these from now on."""
        self.loads.update(loads)
        for name, children in saves.items():
            self.saves.setdefault(name, set()).update(children)

    def loaded(self, child: int, finished: Iterable[str], failed: Iterable[str]) -> None:
        """What a connector reported; a failed load ends only with its being finished."""
        self.tainted.update(name for name in failed if self.loads.get(name) == child)
        for name in finished:
            if self.loads.get(name) == child:
                self._end(name)
            else:
                self.absorbed += 1

    def taint(self, child: int) -> None:
        """Some part of some load of this connector failed, and nobody knows of which."""
        self.tainted.update(name for name, loading in self.loads.items() if loading == child)

    def give_up(self, names: Iterable[str]) -> None:
        """These loads have failed, whatever their connector will say."""
        for name in names:
            if name in self.loads:
                self.tainted.add(name)
                self._end(name)

    def sent(self, child: int, names: Iterable[str]) -> None:
        """Saves that a connector reported as done."""
        for name in names:
            children = self.saves.get(name)
            if children is None or child not in children:
                self.absorbed += 1
                continue
            children.discard(child)
            if not children:
                del self.saves[name]
                self.saved.add(name)

    def let_go(self, child: int, names: Iterable[str]) -> None:
        """These saves end, as far as this connector goes."""
        self.sent(child, [name for name in names if child in self.saves.get(name, ())])

    def take(self) -> tuple[set[str], set[str], set[str]]:
        """(finished, failed, saved) requests since the last call; failed ones are in both."""
        taken = self.finished, self.failed, self.saved
        self.finished, self.failed, self.saved = set(), set(), set()
        return taken

    def _end(self, name: str) -> None:
        del self.loads[name]
        self.finished.add(name)
        if name in self.tainted:
            self.tainted.discard(name)
            self.failed.add(name)
