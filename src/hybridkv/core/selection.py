"""What was asked of several connectors and what came of it, as numbers that only grow (requirements B27, B28).

Counted when the engine has admitted a request: one query for each connector that was asked, a hit with its tokens for
the one that loads, a miss for each that had nothing. Who had less, or did not answer in time, has a query alone.
Requests that come back from preemption are not counted, because vLLM's own totals leave them out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.core.choice import Answer

COUNTERS = ("queries", "hits", "hit_tokens", "misses")


@dataclass(slots=True)
class Selection:
    """Counts since the last time they were taken, by connector; `pending_loads` is a level, not a count."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    pending_loads: dict[str, int] = field(default_factory=dict)

    def admitted(self, names: Sequence[str], answers: Mapping[int, Answer], chosen: int | None, tokens: int) -> None:
        """A request has blocks; `tokens` of them are loaded by `chosen`. `answers` has those that were asked."""
        for place, answer in answers.items():
            self._add(names[place], "queries", 1)
            if place == chosen and tokens:
                self._add(names[place], "hits", 1)
                self._add(names[place], "hit_tokens", tokens)
            elif answer.tokens == 0:
                self._add(names[place], "misses", 1)

    def merged(self, other: "Selection") -> "Selection":
        """This, then `other`."""
        result = Selection({name: dict(counts) for name, counts in self.counts.items()}, dict(self.pending_loads))
        for name, counts in other.counts.items():
            for counter, count in counts.items():
                result._add(name, counter, count)
        result.pending_loads |= other.pending_loads
        return result

    def as_dict(self) -> dict[str, dict[str, int]]:
        """By connector, as it travels: COUNTERS and "pending_loads"."""
        names = dict.fromkeys([*self.counts, *self.pending_loads])
        return {
            name: {
                **self.counts.get(name, {}),
                **({"pending_loads": self.pending_loads[name]} if name in self.pending_loads else {}),
            }
            for name in names
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> "Selection":
        """From `as_dict`; what is below 0 is left out, because counters never go down (requirements B30)."""
        made = cls()
        for name, values in data.items():
            for counter in COUNTERS:
                if (count := int(values.get(counter, 0))) > 0:
                    made._add(str(name), counter, count)
            if "pending_loads" in values:
                made.pending_loads[str(name)] = max(0, int(values["pending_loads"]))
        return made

    def _add(self, name: str, counter: str, count: int) -> None:
        counts = self.counts.setdefault(name, {})
        counts[counter] = counts.get(counter, 0) + count
