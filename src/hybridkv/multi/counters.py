"""What MultiConnector counts beside what its children's guards count (`vllm.hook_guard`)."""

from typing import NamedTuple

from hybridkv.core.metrics import Metric
from hybridkv.vllm.hook_guard import FAULTS, event

SYNC_DECLINED = event("sync_declined")
PASSED_OVER = event("passed_over")
LOADS_GIVEN_UP = event("loads_given_up")
LOADS_FAILED = event("loads_failed")
LOOKUPS_LATE_ROOM = event("lookups_late_room")
SOURCES_WRONG = event("sources_wrong")
REPORTS_ABSORBED = event("reports_absorbed")
BLOCK_ERRORS = event("block_errors_of_several_groups")


class CounterKey(NamedTuple):
    """A counter: what it counts, and of which child."""

    child: str  # The child's name; "" = MultiConnector itself.
    metric: Metric

    @property
    def event(self) -> str:
        """The label `event` under which it is exported: "fault_" and the hook, or the event."""
        (label,) = self.metric.labels
        return f"fault_{label}" if self.metric.family == FAULTS else label
