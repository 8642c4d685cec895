"""Counts of several connectors on their way through vLLM's pipeline (requirements B25-B30).

A request counts when the engine has admitted it: one query for each connector that was asked, a
hit with its tokens for the one that loads, a miss for each that had nothing. A connector that had
less, or did not answer in time, has a query alone. Requests that come back from preemption are not
counted, because vLLM's own totals leave them out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from hybridkv.multi.ranking import ChildAnswer

PENDING = "pending_loads"
"""The one name that is a level and no count."""


class ConnectorCounts(KVConnectorStats):
    """Counts since the last time as {connector: {name: count}}; of PENDING the later value stands.

    MultiConnector itself is the connector "".
    """

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> "ConnectorCounts":
        """The counts of a payload without those below 0: counters never go down (B30)."""
        made = cls()
        for connector, counts in data.items():
            for name, value in counts.items():
                if (count := max(0, int(value))) or name == PENDING:
                    made.add(str(connector), str(name), count)
        return made

    def add(self, connector: str, name: str, count: int = 1) -> None:
        """Add to one count, or replace a level."""
        counts = self.data.setdefault(connector, {})
        counts[name] = count if name == PENDING else counts.get(name, 0) + count

    def admitted(
        self,
        names: Sequence[str],
        answers: Mapping[int, ChildAnswer],
        chosen: int | None,
        tokens: int,
    ) -> None:
        """A request has blocks; `chosen` loads `tokens` of them; `answers` has those asked."""
        for index, answer in answers.items():
            self.add(names[index], "queries")
            if index == chosen and tokens:
                self.add(names[index], "hits")
                self.add(names[index], "hit_tokens", tokens)
            elif answer.tokens == 0:
                self.add(names[index], "misses")

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, dict[str, int]] = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorCounts":
        """Add `other`, which is later, to this object."""
        for connector, counts in other.data.items():
            for name, count in counts.items():
                self.add(connector, name, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One interval for vLLM's log line."""
        return {
            f"{connector} {name}".strip(): count
            for connector, counts in self.data.items()
            for name, count in counts.items()
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data
