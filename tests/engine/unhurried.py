"""MultiConnector with times for a slow machine, as a `kv_connector_module_path`.

A request waits ten seconds for children that look while the others have nothing, and one for
children that could have a better hit.
"""

from typing import Any

from hybridkv.connector import MultiConnector
from hybridkv.multi import ranking
from hybridkv.multi.ranking import WaitTimes
from hybridkv.multi.scheduler import MultiScheduler

__all__ = ["MultiConnector"]

_wait_times = MultiScheduler._wait_times  # noqa: SLF001 - the one place of all waits


def _long_wait_times(*args: Any) -> WaitTimes:
    return _wait_times(*args)._replace(patience_seconds=10.0)


vars(ranking)["GRACE_SECONDS"] = 1.0
setattr(MultiScheduler, "_wait_times", _long_wait_times)  # noqa: B010 - mypy has it for a method
