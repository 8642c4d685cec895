"""The scheduler role while the daemon reads tiers for a request."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import LOOKUPS_OUTRUN, LOOKUPS_PROMOTED
from hybridkv.connector.scheduler.lookups import may_be_computed_elsewhere
from hybridkv.connector.scheduler.requests import Change, RequestEvent
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings, parse_settings
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import Decline
from tests.forked_daemon import ForkedDaemon
from tests.layouts import LAYOUTS
from tests.unit.connector import requests
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client, hashes
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.engine

CHUNKS = 4


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose RAM is empty, over a directory that has a prompt and takes its time."""
    url = f"disk://{tmp_path}/disk?bytes=64MiB&timeout=60"
    socket_path = str(tmp_path / "daemon.sock")
    with (
        ForkedDaemon(socket_path, "64MiB", options=["--tier", url, "--node", "n"]) as daemon,
        Client(daemon.socket_path) as client,
    ):
        client.store(1, CHUNKS)
        until(
            lambda: client.values().get("tier_disk_objects_written") == 3 * CHUNKS,
            "it is on the disk",
        )
    options = ["--tier", f"inject+{url}&latency=3", "--node", "n"]
    with ForkedDaemon(socket_path, "64MiB", options=options) as daemon:
        yield daemon


def connected(slow: DaemonProcess) -> tuple[Any, Any, Counter[Metric]]:
    """The scheduler role, a request whose prompt the directory has, and the role's counters."""
    counters: Counter[Metric] = Counter()
    settings: Settings = parse_settings(
        {
            "server": f"unix://{slow.socket_path}",
            "load_policy": "always",
            "lookup_timeout_ms": 10_000,
            "audit": "off",
        }
    )
    scheduler = requests.make_role(settings, GEOMETRY, IDENTITY, counters)
    tokens = CHUNKS * GEOMETRY.chunk_tokens + 1
    names = b"".join(hashes(1, CHUNKS))
    request = requests.request("r", tokens, names)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while scheduler.session.link.welcome is None:
        scheduler.exchange_messages(time.monotonic())
        assert time.monotonic() < deadline
    return scheduler, request, counters


def test_what_comes_up_is_not_waited_for_where_the_engine_has_as_much(slow: DaemonProcess) -> None:
    scheduler, request, counters = connected(slow)
    scheduler.on_new_request(request)
    until(
        lambda: scheduler.offer_hit(request, 0) is None and counters[LOOKUPS_PROMOTED] == 1,
        "the daemon reads",
    )
    assert scheduler.offer_hit(request, (CHUNKS - 1) * GEOMETRY.chunk_tokens) is None, (
        "a chunk more is worth it"
    )
    with ControlClient(slow.socket_path) as control:
        assert control.stats().values["lookups_waiting"] == 1
        assert scheduler.offer_hit(request, CHUNKS * GEOMETRY.chunk_tokens) == 0
        assert counters[LOOKUPS_OUTRUN] == 1
        scheduler.on_finished("r")
        until(lambda: not control.stats().values["lookups_waiting"], "nobody waits any more")
    scheduler.close()


def test_tokens_that_came_up_too_late_were_asked_for_and_not_hit(slow: DaemonProcess) -> None:
    """What the directory has of them an unlimited cache would have had."""
    scheduler, request, counters = connected(slow)
    scheduler.on_new_request(request)
    until(
        lambda: scheduler.offer_hit(request, 0) is None and counters[LOOKUPS_PROMOTED] == 1,
        "the daemon reads",
    )
    tracked, now = scheduler.requests.by_id["r"], time.monotonic()
    late = Change(RequestEvent.SETTLED, declined=Decline.LATE_ANSWER)
    scheduler.requests.advance(tracked, late, now)
    scheduler.on_finished("r")
    scheduler.session.link.flush(now)
    with ControlClient(slow.socket_path) as control:
        until(lambda: control.stats().values["ceiling_lookups"] == 1, "it is counted")
        report, asked = control.stats(status=True), CHUNKS * GEOMETRY.chunk_tokens
    names = ("ceiling_asked_tokens", "ceiling_tokens", "ceiling_hit_tokens", "tokens_asked")
    assert [report.values[name] for name in names] == [asked, asked, 0, asked]
    assert report.status is not None
    recent = report.status.recent
    assert (recent.hit, recent.ceiling) == (0.0, 1.0)
    assert any("prompts were computed" in problem.text for problem in report.status.health)
    scheduler.close()


def test_who_was_not_chosen_lets_go_before_its_answer_is_there(slow: DaemonProcess) -> None:
    """Another connector loads (D13): no lookup waits in the daemon, and no answer holds a lease."""
    scheduler, request, counters = connected(slow)
    scheduler.on_new_request(request)
    until(
        lambda: scheduler.offer_hit(request, 0) is None and counters[LOOKUPS_PROMOTED] == 1,
        "the daemon reads",
    )
    with ControlClient(slow.socket_path) as control:
        assert control.stats().values["lookups_waiting"] == 1
        scheduler.on_allocated(request, lambda: (), 0)
        scheduler.session.link.flush(time.monotonic())
        until(lambda: not control.stats().values["lookups_waiting"], "nobody waits any more")
        until(
            lambda: not control.stats().values["tier_disk_jobs_running"],
            "what was begun has come up",
        )
        scheduler.exchange_messages(time.monotonic())
        assert control.stats().values["leases"] == 0
        assert scheduler.offer_hit(request, 0) == 0
        assert not scheduler.requests.by_lease
    scheduler.close()


def test_a_state_at_the_very_end_of_a_prompt_is_waited_for_by_nobody() -> None:
    for model, waits in (("qwen3next", False), ("gemma3", True), ("qwen3", True)):
        geometry = LAYOUTS[model]
        assert may_be_computed_elsewhere(geometry, 3 * geometry.chunk_tokens) is waits
        assert may_be_computed_elsewhere(geometry, 3 * geometry.chunk_tokens + 1)
