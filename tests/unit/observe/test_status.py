"""What the page is told: what is wrong, whether more memory would help, and how it was before."""

import dataclasses
import json

import msgspec
import pytest
from msgspec.structs import replace

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.metrics import Metric
from hybridkv.core.refusals import Refusal
from hybridkv.daemon.view import SAMPLES_MAX, STEP_SECONDS
from hybridkv.observe.history import Sample, Snapshot
from hybridkv.observe.status import BRIEF_SAMPLES, StatusReport, health, verdict
from hybridkv.wire.messages import Found, Lookup, Release, ReportAudit, ReportStale
from hybridkv.wire.status import SessionStatus, TierRefusal, TierStatus
from tests.unit.daemon.harness import commit, engine, grant, hashes, lookup, make_daemon
from tests.unit.observe.test_metrics import PART, SMALL

WELL = TierStatus(
    name="disk",
    location="disk:///d",
    write="through",
    max_bytes=None,
    is_open=True,
    is_shut=False,
    is_hung=False,
    values={},
)
SESSION = SessionStatus(
    engine_id="e",
    model="m",
    identity="i",
    chunk_tokens=16,
    groups="",
    leases=0,
    writing_bytes=0,
    is_connected=True,
    since=0.0,
)
FULL = TierRefusal(Refusal.NO_SPACE, 120.0)
NOW = 5000.0


def encoded(report: StatusReport, snapshot: Snapshot) -> bytes:
    """The body of /status.json."""
    return msgspec.json.encode(report.make(snapshot))


def snapshot(
    before: dict[str, float] | None = None, now: dict[str, float] | None = None, ago: float = 60.0
) -> Snapshot:
    """A daemon whose values were `before` some time ago."""
    empty = make_daemon().view.snapshot(NOW)
    numbers = tuple((before or {}).get(metric.family, 0.0) for metric in empty.columns)
    empty.values.update({Metric(name): value for name, value in (now or {}).items()})
    return dataclasses.replace(empty, hour=(Sample(NOW - ago, numbers),), sessions=(SESSION,))


def test_a_daemon_that_is_well_has_nothing_to_tell() -> None:
    assert health(dataclasses.replace(snapshot(), tiers=(WELL,))) == []


def test_whether_it_helps_is_told_by_what_was_loaded() -> None:
    """A hit of tokens that the engine has itself saves nothing; a load saves what it spared."""
    daemon = make_daemon()
    engine(daemon, 1, SMALL)
    for index in range(2):
        commit(daemon, 1, grant(daemon, 1, PART, 4), index, [1, 2, 3, 4])
    daemon.view.tick(0.0)

    def look_up(lease: int, now: float) -> None:
        question = Lookup(5, lease, hashes(1, 2, 3, 4), tokens_per_second=32)
        found = daemon.handle(1, question, now)
        assert isinstance(found, Found)
        assert found.chunks == 4

    look_up(1, 10.0)
    daemon.handle(1, Release(1), 10.5)
    status = StatusReport().make(daemon.view.snapshot(20.0))
    assert status.recent.loaded_tokens == 0
    assert status.recent.saved_seconds is None
    assert status.help == "Nothing was loaded in the last hour."
    look_up(2, 30.0)
    daemon.handle(1, Release(2, tokens=64, loaded_bytes=4096), 30.5)
    status = StatusReport().make(daemon.view.snapshot(40.0))
    assert status.recent.loaded_tokens == 64
    assert status.recent.saved_seconds == 64 / 32 - 0.5
    assert status.help == (
        "In the last hour 64 tokens were loaded, 50% of those asked for, which saved 1.5 s."
    )


def test_an_engine_with_unread_weights_is_told_until_they_are_read_or_it_is_gone() -> None:
    daemon = make_daemon()
    for connection in (1, 2):
        engine(daemon, connection, SMALL)
        daemon.handle(connection, ReportStale(False, unread=7))

    def told() -> list[str]:
        problems = health(daemon.view.snapshot(20.0))
        return [problem.text for problem in problems if problem.level == "warn"]

    assert [text.split(",")[0] for text in told()] == [
        "2 engines share with no other and with no later one"
    ]
    daemon.handle(1, ReportStale(False))
    assert told()[0].startswith("1 engines")
    daemon.on_disconnect(2)
    assert told() == []


def test_audits_are_told_and_a_difference_is_bad() -> None:
    daemon = make_daemon()
    engine(daemon, 1, SMALL)
    daemon.view.tick(0.0)
    for _ in range(3):
        daemon.handle(1, ReportAudit("r", AuditOutcome.PASSED))
    status = StatusReport().make(daemon.view.snapshot(20.0))
    assert status.help.endswith("Audited 3, 0 differed.")
    daemon.handle(1, ReportAudit("r", AuditOutcome.DIFFERED, "layer x differs by 2"))
    status = StatusReport().make(daemon.view.snapshot(40.0))
    assert status.help.endswith("Audited 4, 1 differed.")
    (problem,) = [problem for problem in status.health if problem.level == "bad"]
    assert "1 live audits found that an engine computes other bytes" in problem.text


@pytest.mark.parametrize(
    ("tier", "level", "words"),
    [
        (replace(WELL, is_open=False), "bad", "cannot be used"),
        (replace(WELL, is_hung=True), "bad", "hangs"),
        (replace(WELL, is_shut=True), "bad", "fails"),
        (
            replace(WELL, refusals=[FULL]),
            "bad",
            "refused objects for 2 min: its file system is full",
        ),
        (replace(WELL, refusals=[FULL], is_shut=True), "bad", "full; free the file system"),
        (replace(WELL, values={"objects_damaged": 3.0}), "note", "3 objects were damaged"),
        (replace(WELL, values={"objects_shed": 2.0}), "note", "2 objects were not written"),
    ],
)
def test_a_tier_that_is_not_well_is_told(tier: TierStatus, level: str, words: str) -> None:
    (found,) = health(dataclasses.replace(snapshot(), tiers=(tier,)))
    assert found.level == level
    assert found.text.startswith("disk (disk:///d)")
    assert words in found.text


@pytest.mark.parametrize(
    ("name", "level"),
    [("loads_failed", "bad"), ("deadlines_missed", "warn"), ("slots_short", "note")],
)
def test_what_went_wrong_lately_is_news_and_what_did_long_ago_is_not(name: str, level: str) -> None:
    (found,) = health(snapshot({name: 2.0}, {name: 7.0}))
    assert (found.level, found.text.split()[5]) == (level, "5")
    assert health(snapshot({name: 7.0}, {name: 7.0})) == []


def test_the_worst_comes_first() -> None:
    troubled = dataclasses.replace(
        snapshot(now={"slots_short": 1.0, "deadlines_missed": 1.0}),
        tiers=(replace(WELL, is_open=False),),
        sessions=(),
    )
    assert [problem.level for problem in health(troubled)] == ["bad", "warn", "note", "note"]


@pytest.mark.parametrize(
    ("hit", "ceiling", "values", "words"),
    [
        (0, 0, {"ceiling_asked_tokens": 0.0}, "Nothing was looked up"),
        (60, 61, {"evicted": 5.0}, "would not help: there is next to nothing"),
        (60, 90, {"evicted": 5.0}, "may help: up to 30%"),
        (60, 90, {}, "would not help: nothing was lost for lack of room"),
        (60, 90, {"slots_short": 1.0}, "does not count what engines found no room"),
        (60, 90, {"evicted": 5.0, "ceiling_chunks_forgotten": 1.0}, "may be higher"),
    ],
)
def test_whether_more_memory_would_help(
    hit: int, ceiling: int, values: dict[str, float], words: str
) -> None:
    now = {
        "ceiling_asked_tokens": 100.0,
        "ceiling_hit_tokens": float(hit),
        "ceiling_tokens": float(ceiling),
    } | values
    answer = verdict(snapshot(now=now))
    assert words in answer.text
    if now["ceiling_asked_tokens"]:
        assert (answer.hit, answer.ceiling) == (hit / 100, ceiling / 100)


def test_rates_are_those_of_the_last_minute() -> None:
    status = StatusReport().make(
        snapshot({"lookups": 100.0, "bytes_loaded": 0.0}, {"lookups": 400.0, "bytes_loaded": 6e6})
    )
    assert status.minute.per_second["lookups"] == 5.0
    assert status.minute.per_second["bytes_loaded"] == 1e5


def test_a_daemon_keeps_an_hour() -> None:
    core = make_daemon()
    engine(core, 1, SMALL)
    clock = 1000.0
    assert core.wakes_at() <= clock
    for turn in range(SAMPLES_MAX + 100):
        core.tick(clock)
        lookup(core, 1, turn + 1, 1, 2)
        while core.ceiling.work():
            pass
        assert core.wakes_at() <= clock + STEP_SECONDS
        clock += STEP_SECONDS
    latest = core.view.snapshot(clock)
    assert len(latest.hour) == SAMPLES_MAX
    assert latest.hour[-1].at - latest.hour[0].at == 3600
    page = json.loads(encoded(StatusReport(), latest))
    assert page["hour"]["lookups"] == [0.1] * 360
    assert page["hour"]["ages"][0] == 3590
    assert page["hour"]["ages"][-1] == 0
    assert page["hour"]["hit"] == [0.0] * 360
    brief = core.view.status(clock)
    assert brief.hour.lookups == [0.1] * (BRIEF_SAMPLES - 1)


def test_the_past_is_made_once_for_each_sample() -> None:
    report = StatusReport()
    first = snapshot({"lookups": 1.0})
    assert json.loads(encoded(report, first))["hour"]["lookups"] == []
    later = dataclasses.replace(first, hour=(*first.hour, Sample(NOW - 50, first.hour[0].values)))
    assert json.loads(encoded(report, later))["hour"]["lookups"] == [0.0]
    assert encoded(report, later) == encoded(report, later)
