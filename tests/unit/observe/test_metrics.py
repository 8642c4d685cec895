"""What /metrics says: all of it described, by Prometheus' rules, and never less than before."""

import dataclasses
import re
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hybridkv import daemon, tiers
from hybridkv.client.control import ControlClient
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.daemon.handlers import AUDIT_COUNTERS
from hybridkv.daemon.metrics import DAEMON
from hybridkv.observe.ceiling import CEILING
from hybridkv.observe.history import Snapshot
from hybridkv.observe.web import WebPages
from hybridkv.store.metrics import STORE
from hybridkv.tiers.health import ERROR_COUNTERS, MOVE_COUNTERS
from hybridkv.tiers.metrics import DEMOTION, PROMOTION, TIER
from hybridkv.wire.messages import (
    Clear,
    Hello,
    Lookup,
    Release,
    ReportRequest,
    RequestExplanation,
    Reserve,
    WireModel,
)
from hybridkv.wire.status import SessionStatus
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.harness import (
    commit,
    engine,
    engine_hello,
    grant,
    hashes,
    lookup,
    make_daemon,
)
from tests.unit.daemon.tierclient import Client, is_written
from tests.unit.observe.metric_names import exposed
from tests.waiting import DEADLINE_SECONDS, until

PART = 256
SMALL = Geometry(
    (Group(0, GroupKind.FULL, 16, (PART,)), Group(1, GroupKind.SLIDING, 16, (PART,), 32)),
    16,
    16,
    16,
)
HOSTILE = 'a"b\\c\n<img src=x onerror=alert(1)> \u202e{}'


def hello(name: str) -> Hello:
    """The greeting of an engine whose id and model are `name`."""
    model = WireModel(
        name=name,
        max_model_len=1024,
        kv_dtype="auto",
        layers=[1, 1],
        retention_tokens=None,
        step_tokens=1,
    )
    return engine_hello(SMALL, name, model=model)


def text_of(snapshot: Snapshot | None) -> str:
    answer: Future[Snapshot] = Future()
    if snapshot is None:
        answer.set_exception(TimeoutError())
    else:
        answer.set_result(snapshot)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WebPages(lambda: answer))
    return generate_latest(registry).decode()


class SampleKey(NamedTuple):
    """A sample's name and labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


def samples(text: str) -> dict[SampleKey, float]:
    """The number of each sample. Prometheus takes no two of the same name and labels."""
    found: dict[SampleKey, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", f"{family.name} is not in the catalog"
        assert family.documentation
        for sample in family.samples:
            key = SampleKey(sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


_COUNTED = re.compile(r"(\w+)\.counters\[\"(\w+)\"\]")


def test_whatever_the_daemon_counts_is_in_a_table() -> None:
    names = {
        (owner, name)
        for package in (daemon, tiers)
        for path in Path(package.__path__[0]).rglob("*.py")
        for owner, name in _COUNTED.findall(path.read_text())
    }
    of_tiers = {name for owner, name in names if owner == "tier"}
    of_tiers |= {*ERROR_COUNTERS.values(), *chain(*MOVE_COUNTERS.values())}
    assert of_tiers <= set(TIER)
    of_the_daemon = {name for owner, name in names if owner in ("state", "daemon")}
    of_the_daemon |= set(AUDIT_COUNTERS.values())
    assert of_the_daemon <= set(DAEMON)
    assert {name for _, name in names} <= {*DAEMON, *TIER}
    assert len(names) > 20


def test_what_a_busy_daemon_says_is_whole_and_never_goes_down() -> None:
    core = make_daemon()
    core.sessions.on_connect(1)
    core.handle(1, hello(HOSTILE))
    engine(core, 2, SMALL, name="other", identity=b"m" * 32)
    before: Mapping[SampleKey, float] = {}
    counters = {name for name, described in exposed().items() if described.kind != "gauge"}
    for turn in range(8):
        connection = 1 + turn % 2
        slots = grant(core, connection, PART, 4)
        commit(core, connection, slots[:2], 0, [turn, turn + 1])
        commit(core, connection, slots[2:], 1, [turn, turn + 1])
        lookup(core, connection, turn + 1, turn, turn + 1)
        core.handle(connection, Release(turn + 1, 16, 512, failed=turn == 3))
        core.handle(connection, Lookup(9, 1, b"short"))
        core.handle(connection, Reserve(9, 17, 1, 1))
        core.handle(connection, ReportRequest(HOSTILE, RequestExplanation(1, 0, detail=HOSTILE)))
        if turn == 5:
            core.handle(connection, Clear(3))
        core.tick(float(turn))
        while core.ceiling.work():
            pass
        now = samples(text_of(core.view.snapshot(float(turn))))
        for key, value in before.items():
            assert key.name not in counters or now[key] >= value, key
        before = now
    assert before[SampleKey("hybridkv_daemon_refused_total", (("code", "hashes"),))] == 8
    assert core.view.metric_values().of("requests", "lookup") == 16
    assert before[SampleKey("hybridkv_daemon_loads_failed_total")] == 1
    held = {
        key: value for key, value in before.items() if key.name == "hybridkv_daemon_group_bytes"
    }
    assert sum(held.values()) == before[SampleKey("hybridkv_daemon_bytes_committed")] > 0
    kinds = {dict(key.labels)["kind"] for key in held}
    assert kinds == {"full", "sliding"}
    engines = {
        dict(key.labels)["engine"]
        for key in before
        if key.name == "hybridkv_daemon_session_connected"
    }
    assert engines == {HOSTILE, "other"}


def test_counters_are_there_before_they_count() -> None:
    now = samples(text_of(make_daemon().view.snapshot(0.0)))
    names = {key.name for key in now}
    for table in (DAEMON, STORE, PROMOTION, DEMOTION, CEILING):
        for name, family in table.items():
            suffix = {"counter": "_total", "histogram": "_sum"}.get(family.kind, "")
            is_shown = not family.labels and not family.is_debug
            assert (f"hybridkv_daemon_{name}{suffix}" in names) == is_shown, name


def test_two_sessions_of_one_engine_are_one_row() -> None:
    session = SessionStatus(
        engine_id="e",
        model="m",
        identity="i",
        chunk_tokens=16,
        groups="",
        leases=2,
        writing_bytes=100,
        is_connected=True,
        since=0.0,
    )
    again = replace(session, is_connected=False)
    now = samples(
        text_of(dataclasses.replace(make_daemon().view.snapshot(0.0), sessions=(session, again)))
    )
    labels = (("engine", "e"), ("identity", "i"), ("model_name", "m"))
    assert now[SampleKey("hybridkv_daemon_session_connected", labels)] == 1


def test_a_daemon_that_does_not_answer_is_told_and_nothing_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert samples(text_of(None)) == {SampleKey("hybridkv_daemon_answering"): 0.0}
    monkeypatch.setattr("hybridkv.observe.web.ANSWER_SECONDS", 0.01)
    statuses: list[str] = []
    environ = {"HTTP_HOST": "localhost", "REQUEST_METHOD": "GET", "PATH_INFO": "/metrics"}
    body = b"".join(WebPages(Future)(environ, lambda status, headers, *_: statuses.append(status)))
    assert statuses == ["200 OK"]
    assert b"hybridkv_daemon_answering 0.0" in body


def test_a_daemon_with_a_tier(tmp_path: Path) -> None:
    """All that a real daemon says is described, and the ceiling counts what happened."""
    socket_path = str(tmp_path / "daemon.sock")
    options = ["--disk", str(tmp_path / "disk"), "--disk-bytes", "16MiB"]
    with (
        ForkedDaemon(socket_path, "16MiB", metrics_port=0, options=options),
        Client(socket_path) as client,
    ):
        client.store(1, 4)
        until(lambda: is_written(socket_path), "nothing is written")
        assert client.look_up(1, 4, wait_ms=1000).found.chunks == 4
        assert client.look_up(2, 4, wait_ms=1000).found.chunks == 0
        # What waits to be counted when somebody clears is left out.
        until(lambda: client.values()["ceiling_lookups"] == 2, "the ceiling is not worked off")
        with ControlClient(socket_path) as control:
            control.clear_objects()
        assert client.look_up(1, 4, wait_ms=20_000).found.chunks == 4, "from the disk"
        until(lambda: client.values()["ceiling_lookups"] == 3, "the ceiling is not worked off")
        with urllib.request.urlopen(_url(socket_path), timeout=DEADLINE_SECONDS) as answer:
            text = answer.read().decode()
    ours = "".join(line for line in text.splitlines(keepends=True) if "hybridkv_daemon" in line)
    now = samples(ours)
    assert now[SampleKey("hybridkv_daemon_ceiling_asked_tokens_total")] == 12 * 128
    assert now[SampleKey("hybridkv_daemon_ceiling_hit_tokens_total")] == 8 * 128
    assert now[SampleKey("hybridkv_daemon_ceiling_tokens_total")] == 8 * 128
    assert now[SampleKey("hybridkv_daemon_lookup_wait_seconds_count")] == 1
    assert now[SampleKey("hybridkv_daemon_lookup_wait_seconds_bucket", (("le", "+Inf"),))] == 1
    assert 0 < now[SampleKey("hybridkv_daemon_lookup_wait_seconds_sum")] < 20
    assert now[SampleKey("hybridkv_daemon_tier_chunks_hit_total", (("tier", "disk"),))] == 4
    assert now[SampleKey("hybridkv_daemon_tier_bytes_written_total", (("tier", "disk"),))] > 0
    assert now[SampleKey("hybridkv_daemon_tier_is_open", (("tier", "disk"),))] == 1


def _url(socket_path: str) -> str:
    with ControlClient(socket_path) as control:
        return control.stats().metrics_url


def test_what_is_evicted_is_below_the_ceiling() -> None:
    """The daemon's own numbers, with an arena that is too small for what is stored."""
    core = make_daemon(64 << 10)
    engine(core, 1, Geometry((Group(0, GroupKind.FULL, 16, (4000,)),), 16, 16, 16))
    numbers = range(1, 25)
    for number in numbers:
        commit(core, 1, grant(core, 1, 4000, 1), 0, [number])
    held = [number for number in numbers if lookup(core, 1, number, number).chunks]
    for number in numbers:
        core.handle(1, Release(number))
    while core.ceiling.work():
        pass
    values = core.view.metric_values().named()
    assert values["evicted"] > 0
    assert (values["ceiling_asked_tokens"], values["ceiling_tokens"]) == (24 * 16, 24 * 16)
    assert 0 < values["ceiling_hit_tokens"] == 16 * len(held) < 24 * 16
    core.handle(1, Clear(2))
    core.handle(1, Lookup(5, 99, hashes(1)))
    while core.ceiling.work():
        pass
    assert core.view.metric_values().named()["ceiling_tokens"] == 24 * 16, (
        "who clears wants it gone"
    )
