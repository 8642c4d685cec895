"""What MultiConnector counts beside what its children's guards count (`vllm.hook_guard`)."""

from typing import NamedTuple

from hybridkv.core.metrics import Metric
from hybridkv.vllm.hook_guard import FAULTS, event

SYNC_DECLINED = event("sync_declined")
"""A hit was declined: it loads within the step, in a model with several groups."""
PASSED_OVER = event("passed_over")
"""A request waited for the connector's answer in vain."""
LOADS_GIVEN_UP = event("loads_given_up")
"""A load was failed, because its connector is switched off."""
LOADS_FAILED = event("loads_failed")
"""A load failed."""
LOOKUPS_LATE_ROOM = event("lookups_late_room")
"""Other loads left no room in the engine's block pool."""
SOURCES_WRONG = event("sources_wrong")
"""A connector's tokens by source were not those of its load."""
REPORTS_ABSORBED = event("reports_absorbed")
"""A report of a transfer that nobody waited for was kept from the engine."""
BLOCK_ERRORS = event("block_errors_of_several_groups")
"""Block errors failed all loads, because blocks had several groups."""


class CounterKey(NamedTuple):
    """A counter: what it counts, and of which child."""

    child: str  # The child's name; "" = MultiConnector itself.
    metric: Metric

    @property
    def event(self) -> str:
        """The label `event` under which it is exported: "fault_" and the hook, or the event."""
        (label,) = self.metric.labels
        return f"fault_{label}" if self.metric.family == FAULTS else label
