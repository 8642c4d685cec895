"""Waiting until all that an engine stores is in the daemon's tiers."""

import time

from tests.waiting import until

from hybridkv.client.control import ControlClient

POLL_SECONDS = 0.2


def daemon_values(socket_path: str) -> dict[str, float]:
    """Returns the daemon's values, by name."""
    with ControlClient(socket_path) as control:
        return control.stats().values


def wait_until_stored(socket_path: str, seconds: float) -> None:
    """Wait until no object has come for a while, and none waits to be written to a tier.

    Raises AssertionError after so many seconds.
    """
    last = -1.0

    def is_stored() -> bool:
        nonlocal last
        time.sleep(POLL_SECONDS)
        values = daemon_values(socket_path)
        before, last = last, values["objects_stored"]
        under_way = values.get("writes_waiting", 0) + values.get("tier_disk_jobs_running", 0)
        return before == last and not under_way

    until(is_stored, "everything is stored", seconds)
