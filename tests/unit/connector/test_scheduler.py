"""The scheduler role over a real daemon, hook by hook; vLLM's requests are plain values here."""

import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.metrics import (
    ATTACH_FAILED,
    BYTES_LOADED,
    HINTS_MISTAKEN,
    HINTS_SHORTENED,
    LOADS_DONE,
    LOADS_FAILED,
    LOOKUPS_ASKED,
    TOKENS_LOADED,
    Shed,
    declined,
    hinted,
    hits_limited,
    stores_shed,
)
from hybridkv.connector.scheduler.listeners import EngineIdentity
from hybridkv.connector.scheduler.loads import LOAD_SECONDS_MAX
from hybridkv.connector.scheduler.lookups import Patience
from hybridkv.connector.scheduler.requests import RequestState, explain_request
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.metrics import Metric
from hybridkv.core.policies import EvictionClass, LoadPolicy
from hybridkv.core.settings import parse_settings
from hybridkv.core.speed import PrefillSpeed, Speed
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hints import PRIORITY, READ, RETAIN_SECONDS, WRITE
from hybridkv.vllm.weights import StepLook, WeightsAnswer
from hybridkv.wire.messages import Commit, Decline, Found, Free
from tests.unit.connector import requests
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client, hashes, stats
from tests.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.engine

CHUNK = GEOMETRY.chunk_tokens
LOOKUP_SECONDS = 10.0
STORED = 4
"""Chunks of prompt 1 that the daemon has."""


class Rig:
    """A scheduler role, what its workers say, and the daemon as seen from outside."""

    def __init__(
        self,
        daemon: DaemonProcess,
        settings: dict[str, object] | None = None,
        attached: bool = True,
        why_computed: str = "",
    ) -> None:
        from hybridkv.connector.messages import StepReport

        self.counters: Counter[Metric] = Counter()
        server = f"unix://{daemon.socket_path}"
        parsed = parse_settings(
            {
                "server": server,
                "lookup_timeout_ms": 1e3 * LOOKUP_SECONDS,
                "audit": "off",
                **(settings or {}),
            }
        )
        self.side = requests.make_role(
            parsed, GEOMETRY, IDENTITY, self.counters, why_computed=why_computed
        )
        self._socket_path = daemon.socket_path
        self._gauges: dict[Metric, float] = {}
        until(self._welcomed, "the daemon greets")
        self.report = StepReport
        if attached:
            self.step({})

    def _welcomed(self) -> bool:
        self.side.exchange_messages(time.monotonic())
        return self.side.session.link.welcome is not None

    def request(self, prompt: int, tokens: int, name: str = "r", preemptions: int = 0) -> Any:
        """A prompt's first `tokens` tokens as vLLM knows them."""
        names = b"".join(hashes(prompt, tokens // CHUNK))
        return requests.request(name, tokens, names, preemptions)

    def offered(self, request: Any, local: int = 0) -> int:
        """The answer, once there is one."""
        offers: list[int] = []

        def asked() -> bool:
            offer = self.side.offer_hit(request, local)
            offers.extend([] if offer is None else [offer])
            return bool(offers)

        until(asked, "the lookup is answered")
        return offers[0]

    def arrive(self, request: Any, local: int = 0) -> int:
        """A new request, and the answer to its lookup."""
        self.side.on_new_request(request)
        return self.offered(request, local)

    def step(
        self,
        scheduled: dict[str, int],
        tables: Any = None,
        finished: tuple[str, ...] = (),
        failed: Any = (),
    ) -> Any:
        """One step: the plan, after which the workers are attached and report `finished` loads."""
        plan = self.planned(scheduled, tables)
        report = self.report(plan.number, {self.side.session.boot: 1})
        self.side.on_report(set(finished), set(failed), report)
        assert not self.side.on_step_end()
        return plan

    def planned(self, scheduled: dict[str, int], tables: Any = None) -> Any:
        """The plan of a step, of which no worker has heard."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        return self.side.plan_step(output, lambda _: tables)

    def await_slots(self) -> None:
        """Return once there are write slots of each size: the first answer may have none."""

        def has_slots() -> bool:
            self.side.exchange_messages(time.monotonic())
            if self.side.session.is_connected:
                self.side.reserve_slots(time.monotonic())
            return requests.has_write_slots(self.side)

        until(has_slots, "there are write slots")

    def gauge(self, name: str) -> float:
        """One of the role's own gauges, as it was told last."""
        stats = self.side.take_stats()
        self._gauges.update(stats.gauges if stats else {})
        return self._gauges[Metric(name)]

    def value(self, name: str) -> float:
        """One of the daemon's counters or gauges."""
        return stats(self._socket_path).get(name, 0.0)


def tables(tokens: int) -> list[list[int]]:
    """A block table for each group; no block is in two of them."""
    blocks = -(-tokens // CHUNK)
    return [
        list(range(1 + 100 * gid, 1 + 100 * gid + blocks)) for gid in range(len(GEOMETRY.groups))
    ]


@pytest.fixture
def rig(daemon: DaemonProcess) -> Iterator[Rig]:
    """A role over a daemon that has the first chunks of prompt 1."""
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        rig = Rig(daemon)
        yield rig
        rig.side.close()


def loading(rig: Rig, name: str = "r", local: int = 0) -> Any:
    """A request whose load the workers were told of."""
    request = rig.request(1, STORED * CHUNK + 1, name)
    offer = rig.arrive(request, local)
    assert offer == STORED * CHUNK - local
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), offer)
    ((planned, load),) = rig.step({}).loads.items()
    assert planned == name
    assert [op for run in load.runs for op in run.ops()], "workers go through the plan first"
    return request


def test_a_lease_is_held_until_the_load_has_ended(rig: Rig) -> None:
    """The lease covers the whole hit, also chunks that the engine has itself (C25, C26)."""
    loading(rig, local=CHUNK)
    assert rig.value("leases") == 1
    rig.step({}, finished=("r",))
    until(lambda: not rig.value("leases"), "it is released")
    assert rig.counters[LOADS_DONE] == 1


def test_the_lookup_of_a_waiting_request_leaves_with_the_plan(rig: Rig) -> None:
    """The engine asks about it once others are done; tiers below RAM are asked meanwhile."""
    before = rig.value("lookups")
    rig.side.on_new_request(rig.request(1, STORED * CHUNK + 1))
    assert rig.value("lookups") == before, "an arrival sends nothing"
    rig.planned({})
    until(lambda: rig.value("lookups") == before + 1, "the daemon is asked")


def test_the_daemon_is_not_blamed_for_the_engines_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused engine takes requests and no steps; their lookups leave with its next step."""
    from hybridkv.connector.scheduler import role

    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    pause = 10 * LOOKUP_SECONDS
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + pause, time_ns=time.time_ns)
    monkeypatch.setattr(role, "time", later)
    assert rig.offered(request) == STORED * CHUNK
    assert not rig.counters[declined(Decline.LATE_ANSWER)]


def test_a_lease_that_nothing_is_loaded_under_is_let_go_at_once(rig: Rig) -> None:
    request = rig.request(1, STORED * CHUNK + 1)
    assert rig.arrive(request)
    assert rig.value("leases") == 1
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), 0)
    rig.step({})
    until(lambda: not rig.value("leases"), "the engine took nothing of it")
    aborted = rig.request(1, STORED * CHUNK + 1, "aborted")
    assert rig.arrive(aborted)
    rig.side.on_finished("aborted")
    rig.step({})
    until(lambda: not rig.value("leases"), "it was aborted before it had blocks")
    assert "aborted" not in rig.side.requests.by_id


def test_a_hit_is_what_is_beyond_the_engines_own(rig: Rig) -> None:
    """Never negative, never the whole prompt, and whole chunks of what is there (C16, C19, C21)."""
    for tokens, local, offer in (
        (STORED * CHUNK + 1, 0, STORED * CHUNK),
        (STORED * CHUNK, 0, (STORED - 1) * CHUNK),
        (STORED * CHUNK + 1, CHUNK, (STORED - 1) * CHUNK),
        (STORED * CHUNK + 1, STORED * CHUNK, 0),
        (9 * CHUNK, 0, STORED * CHUNK),
        (9 * CHUNK, 6 * CHUNK, 0),
        (CHUNK, 0, 0),
    ):
        name = f"{tokens} {local}"
        request = rig.request(1, tokens, name)
        assert rig.arrive(request, local) == offer
        rig.side.on_finished(name)


def test_asking_again_asks_nobody_and_changes_nothing(rig: Rig) -> None:
    """vLLM asks in every step until it has blocks (C22, C36, D3)."""
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    offers = {rig.offered(request) for _ in range(5)}
    assert offers == {STORED * CHUNK}
    assert rig.counters[LOOKUPS_ASKED] == 1
    assert rig.value("lookups") == 1
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), STORED * CHUNK)
    rig.step({})
    rig.step({}, finished=("r",))
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), 0)
    assert rig.side.requests.by_id["r"].state is RequestState.READY
    assert not rig.step({}).failed


def test_a_resumed_request_is_looked_up_with_what_it_has_generated(rig: Rig) -> None:
    """Its hashes are read where the engine keeps them (C17, C39)."""
    request = rig.request(1, 2 * CHUNK)
    rig.side.on_new_request(request)
    rig.side.on_allocated(request, lambda: tables(2 * CHUNK), rig.offered(request))
    rig.step({})
    rig.step({}, finished=("r",))
    grown = rig.request(1, STORED * CHUNK + 1, preemptions=1)
    request.num_tokens, request.num_preemptions = grown.num_tokens, 1
    request.block_hashes[:] = grown.block_hashes
    assert rig.offered(request) == STORED * CHUNK
    assert rig.counters[LOOKUPS_ASKED] == 2


def test_a_load_proves_nothing_of_the_blocks_of_a_later_hit(rig: Rig) -> None:
    """It was loaded, preempted before it ran, and hits blocks of another prompt of that length."""
    request = loading(rig)
    rig.step({}, finished=("r",))
    tracked = rig.side.requests.by_id["r"]
    assert tracked.load.restored == range(STORED * CHUNK)
    request.num_preemptions = 1
    assert not rig.offered(request, STORED * CHUNK)
    assert tracked.load.restored == range(0)


def test_a_request_that_needs_each_token_is_stored_and_not_looked_up(rig: Rig) -> None:
    """Its client may say that cached prefixes can be read; an output of each token cannot."""
    request = rig.request(1, STORED * CHUNK + 1)
    request.sampling_params = SimpleNamespace(prompt_logprobs=1)
    request.skip_reading_prefix_cache = False
    rig.await_slots()
    assert rig.arrive(request) == 0
    assert (rig.counters[LOOKUPS_ASKED], rig.counters[declined(Decline.UNWANTED)]) == (0, 1)
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), 0)
    assert rig.step({"r": STORED * CHUNK + 1}, tables(STORED * CHUNK + 1)).stores


@pytest.mark.parametrize("wish", [READ, WRITE])
def test_a_request_reads_and_writes_what_it_may(rig: Rig, wish: str) -> None:
    request = rig.request(1, (STORED + 1) * CHUNK + 1)
    request.kv_transfer_params = {"do_remote_decode": True, wish: False}
    rig.await_slots()
    assert rig.arrive(request) == (STORED * CHUNK if wish == WRITE else 0)
    assert rig.counters[declined(Decline.UNWANTED)] == (wish == READ)
    rig.side.on_allocated(request, lambda: tables(request.num_tokens), 0)
    plan = rig.step({"r": request.num_tokens}, tables(request.num_tokens))
    assert bool(plan.stores) == (wish == READ)
    assert bool(rig.counters[stores_shed(Shed.UNWANTED)]) == (wish == WRITE)
    assert not rig.counters[HINTS_MISTAKEN]


def test_hints_are_counted_and_a_mistake_is_named_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        request = rig.request(number, CHUNK + 1, f"r{number}")
        request.kv_transfer_params = {PRIORITY: "low", RETAIN_SECONDS: 1e9, "hybridkv.no": 1}
        rig.side.on_new_request(request)
    assert rig.counters[hinted("low_priority")] == rig.counters[hinted("retain")] == 3
    assert rig.counters[HINTS_MISTAKEN] == rig.counters[HINTS_SHORTENED] == 3
    assert caplog.text.count("hybridkv.no is no key") == 1


def test_what_a_request_of_low_priority_stores_is_evicted_first(rig: Rig) -> None:
    request = rig.request(2, CHUNK + 1)
    request.kv_transfer_params = {PRIORITY: "low"}
    rig.await_slots()
    assert rig.arrive(request) == 0
    rig.side.on_allocated(request, lambda: tables(CHUNK + 1), 0)
    plan = rig.planned({"r": CHUNK + 1}, tables(CHUNK + 1))
    done = {number: {0} for number in plan.stores}
    rig.side.on_report(set(), set(), rig.report(plan.number, {rig.side.session.boot: 1}, done=done))
    commits = [change for change in rig.side.stores.changes if isinstance(change, Commit)]
    assert commits
    classes = b"".join(commit.classes for commit in commits)
    assert set(classes) == {EvictionClass.UNLIKELY}


def test_an_engine_that_needs_each_token_neither_asks_nor_stores(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        rig = Rig(daemon, why_computed="a pooler reads each token")
        request = rig.request(1, STORED * CHUNK + 1)
        assert rig.arrive(request) == 0
        assert (rig.counters[LOOKUPS_ASKED], rig.counters[declined(Decline.UNWANTED)]) == (0, 1)
        rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), 0)
        assert not rig.step({"r": STORED * CHUNK + 1}, tables(STORED * CHUNK + 1)).stores
        assert not rig.side.stores.credits.is_awaiting, "no slots are held for nothing"
        rig.side.close()


def test_a_request_that_nobody_knows_is_a_miss(rig: Rig) -> None:
    """And where the engine waits for its load all the same, the load fails (C38)."""
    unknown = rig.request(1, STORED * CHUNK + 1, "unknown")
    assert rig.side.offer_hit(unknown, 0) == 0
    rig.side.on_allocated(unknown, lambda: tables(STORED * CHUNK + 1), 0)
    assert not rig.step({}).failed
    rig.side.on_allocated(unknown, lambda: tables(STORED * CHUNK + 1), CHUNK)
    assert rig.step({}, finished=("unknown",)).failed == ["unknown"]
    rig.side.on_finished("unknown")


def test_a_failed_load_is_never_offered_again_and_stored_anew(rig: Rig) -> None:
    """Though the lookup found it: whatever was wrong there is computed now (B38, D4)."""
    request = loading(rig)
    rig.step({}, finished=("r",), failed=("r",))
    assert rig.counters[LOADS_FAILED] == 1
    request.num_preemptions = 1
    assert rig.side.offer_hit(request, 0) == 0
    until(lambda: not rig.value("leases"), "it is released")
    rig.await_slots()
    plan = rig.step({"r": STORED * CHUNK + 1}, tables(STORED * CHUNK + 1))
    stored = {(run.span.group_index, run.span.first_chunk) for run in plan.stores.values()}
    assert stored == {(index, 0) for index in range(len(GEOMETRY.groups))}


@pytest.mark.parametrize("part", ["stores.plan_stores", "room.on_running", "lookups.on_flush"])
def test_the_loads_of_a_plan_that_a_fault_ends_fail(rig: Rig, part: str) -> None:
    """No worker sees that plan, so none would report the loads in it (C38)."""
    request, unknown = (rig.request(1, STORED * CHUNK + 1, name) for name in ("r", "unknown"))
    rig.side.on_new_request(request)
    rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), rig.offered(request))
    rig.side.on_allocated(unknown, lambda: tables(STORED * CHUNK + 1), CHUNK)
    rig.side.session.attached_ranks = None
    where, _, name = part.rpartition(".")
    broken = getattr(rig.side, where)
    setattr(broken, name, lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        rig.planned({"another": 1}, tables(1))
    delattr(broken, name)
    assert sorted(rig.side.plan_failures((), is_off=False).failed) == ["r", "unknown"]
    rig.step({}, finished=("r",), failed=("r",))
    assert rig.side.plan_failures((), is_off=False).failed == []


def test_what_was_loaded_is_not_stored_again_and_counted_by_its_plan(rig: Rig) -> None:
    request = loading(rig, local=CHUNK)
    rig.step({}, finished=("r",))
    rig.await_slots()
    request.num_computed_tokens = STORED * CHUNK
    assert not rig.step({"r": 1}, tables(STORED * CHUNK + 1)).stores
    full, sliding, small = GEOMETRY.groups
    blocks = (STORED - 1) * (full.block_bytes + small.block_bytes) + sliding.block_bytes
    assert rig.counters[TOKENS_LOADED] == (STORED - 1) * CHUNK
    assert rig.counters[BYTES_LOADED] == blocks
    until(lambda: rig.value("tokens_loaded") == (STORED - 1) * CHUNK, "the daemon knows")


def test_a_load_is_no_line_of_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """At the usual level; who asks for more has it (B31)."""
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, ours.name):
            loading(rig)
            rig.step({}, finished=("r",))
    finally:
        ours.removeHandler(caplog.handler)
    assert rig.counters[LOADS_DONE] == 1
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert any("for r in" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("masks", "hit", "limits"),
    [
        ((b"\1\1\1\1", b"\1\0\1\0", b"\1\1\1\1"), 3, {"1:sliding": 1}),
        ((b"\1\1\0\0", b"\1\1\1\1", b"\1\1\0\0"), 2, {"0:full": 1, "2:full": 1}),
        ((b"\1\1\0\0", b"\1\1\0\0", b"\1\1\0\0"), 2, {}),
        ((b"\1\1\1\1", b"\1\1\1\1", b"\1\1\1\1"), 4, {}),
    ],
    ids=["one", "two", "none_has_more", "all_of_it"],
)
def test_groups_that_limit_a_hit_are_counted(
    rig: Rig, masks: tuple[bytes, ...], hit: int, limits: dict[str, int]
) -> None:
    """Where groups disagree the hit is the least of them, and those are counted (B35)."""
    rig.side.on_new_request(rig.request(2, STORED * CHUNK + 1))
    lease = rig.side.requests.by_id["r"].lookup.lease
    rig.side.on_reply(Found(lease, lease, hit, [*masks], b""), 0.0)
    counted = {m: count for m, count in rig.counters.items() if m.family == "hits_limited"}
    assert counted == {hits_limited(group): count for group, count in limits.items()}


def test_a_lookup_asks_for_no_more_than_a_hit_may_have(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon looks at BATCH_MAX // groups chunks; no group is blamed for later chunks."""
    monkeypatch.setattr("hybridkv.wire.messages.BATCH_MAX", 2 * len(GEOMETRY.groups))
    request = rig.request(1, STORED * CHUNK + 1)
    assert rig.arrive(request) == 2 * CHUNK
    explanation = explain_request(GEOMETRY, rig.side.requests.by_id["r"])
    assert (explanation.asked_chunks, explanation.hit_chunks) == (2, 2)
    assert {group.lacks for group in explanation.groups} == {None}
    # With match units of a quarter of a chunk, three tails end inside each.
    lookups, sent = rig.side.lookups, list[Any]()
    unit = CHUNK // 4
    lookups.with_tails = True
    lookups.geometry = replace(GEOMETRY, hash_tokens=unit, alignment_tokens=unit)
    monkeypatch.setattr(
        rig.side.session, "queue_message", lambda message, now: sent.append(message)
    )
    names = b"".join(hashes(2, STORED * 4))
    rig.side.on_new_request(requests.request("s", STORED * CHUNK + 1, names))
    (lookup,) = sent
    assert (len(lookup.hashes), len(lookup.tails)) == (2 * HASH_BYTES, 2 * 3 * HASH_BYTES)


def test_a_load_that_does_not_end_is_named_once_and_shown(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can end a copy that hangs: its request waits, and that is seen (B39, D6)."""
    loading(rig, "slow")
    loading(rig, "quick")
    assert rig.gauge("loads_overdue") == 0
    slow = rig.side.loads.loading["slow"]
    allocated_at = slow.load.allocated_at - LOAD_SECONDS_MAX - 1
    slow.load = slow.load._replace(allocated_at=allocated_at)
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    try:
        assert [rig.gauge("loads_overdue") for _ in range(3)] == [1, 1, 1]
    finally:
        ours.removeHandler(caplog.handler)
    lines = {record.created: record.getMessage() for record in caplog.records}
    (line,) = lines.values()
    assert line.startswith("hybridkv: the load of slow has not ended for 10 s")
    rig.side.on_finished("slow")
    assert rig.gauge("loads_overdue") == 1, "the engine still waits for it"
    rig.step({}, finished=("slow", "quick"))
    assert rig.gauge("loads_overdue") == 0
    assert not rig.side.loads.loading


def test_patience_is_what_computing_takes_and_has_a_cap(daemon: DaemonProcess) -> None:
    """D18: 2.0 s and 0.1 s per Ki tokens while the speed of prefill is not known."""
    rig = Rig(daemon, {"load_timeout_seconds": 12})
    assert rig.side.lookups.patience.tier_wait(0) == (2.0, 0)
    assert rig.side.lookups.patience.tier_wait(10 << 10) == (3.0, 0)
    rig.side.lookups.patience.prefill.speed = Speed(1000.0, 0.0)
    assert rig.side.lookups.patience.tier_wait(500) == (0.5, 1000)
    assert rig.side.lookups.patience.tier_wait(1 << 20) == (12.0, 1000)
    rig.side.close()


def test_the_speed_of_prefill_is_that_of_its_own_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous scheduling a step is planned before the one before it is reported.

    Steps of 16 and 4096 tokens take 0.01 s and 1 s; each begins when the one before it ends.
    """
    from hybridkv.connector.scheduler import role

    now = time.monotonic()
    monkeypatch.setattr(role, "time", SimpleNamespace(monotonic=lambda: now))

    def planned(tokens: int) -> int:
        state = SimpleNamespace(boundary_state_offloads={})
        output = SimpleNamespace(
            num_scheduled_tokens={},
            total_num_scheduled_tokens=tokens,
            kv_connector_block_state=state,
        )
        return int(rig.side.plan_step(output, lambda _: []).number)

    def speed(number: int, after: float) -> float:
        nonlocal now
        now += after
        rig.side.on_report(set(), set(), rig.report(number, {rig.side.session.boot: 1}))
        return float(rig.side.lookups.patience.prefill.speed.per_second)

    decode, prefill = planned(16), planned(4096)
    assert speed(decode, 0.01) == 0.0, "a report of another step says nothing of this one"
    later = planned(16)
    assert speed(prefill, 1.0) == pytest.approx(4096.0)
    assert speed(prefill, 5.0) == pytest.approx(4096.0), "a report that comes twice"
    assert speed(later, 0.01) == pytest.approx(4096.0)


def test_patience_with_the_daemon_is_a_per_cent_of_computing(rig: Rig) -> None:
    """It is `lookup_timeout_ms` at least, and `load_timeout_seconds` at most."""
    prefill = PrefillSpeed(Speed(200.0, 0.0))
    for policy in LoadPolicy:
        patience = Patience(policy, 5.0, 0.1, prefill)
        waits = [patience.answer_seconds(tokens) for tokens in (1000, 2000, 20_000, 2_000_000)]
        assert waits == pytest.approx([0.1, 0.1, 1.0, 5.0])
        assert patience.tier_wait(20_000).seconds <= 5.0
    assert Patience(LoadPolicy.FASTER, 0.05, 0.1).answer_seconds(0) == 0.05
    tokens = STORED * CHUNK + 1
    rig.side.lookups.patience.answer_seconds_min = 0.1
    rig.side.lookups.patience.prefill.speed = Speed(tokens / 500.0, 0.0)
    rig.side.on_new_request(rig.request(1, tokens))
    lookup = rig.side.requests.by_id["r"].lookup
    assert lookup.deadline - lookup.sent_at == pytest.approx(5.0), "1 % of 500 s"


def _poll(rig: Rig) -> bool:
    rig.side.exchange_messages(time.monotonic())
    return False


def test_the_deadline_is_the_lookups_own(daemon: DaemonProcess) -> None:
    """A daemon that does not answer costs `lookup_timeout_ms`; then the breaker opens (B39).

    What it answers later opens leases that nobody wants, and that are let go (D9).
    """
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
    rig = Rig(daemon, {"lookup_timeout_ms": 1})
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        offers = []
        for number in range(4):
            request = rig.request(1, STORED * CHUNK + 1, f"r{number}")
            rig.side.on_new_request(request)
            began = time.monotonic()
            offers.append(rig.offered(request))
            assert time.monotonic() - began < DEADLINE_SECONDS / 4
        assert offers == [0] * 4
        late, spared = (
            rig.counters[declined(Decline.LATE_ANSWER)],
            rig.counters[declined(Decline.BREAKER_OPEN)],
        )
        assert late >= 3
        assert late + spared == 4
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: rig.value("lookups_unused") == late, "all are answered at last")
    asked = late * STORED * CHUNK
    sums = ("tokens_asked", "tokens_hit", "ceiling_asked_tokens", "ceiling_hit_tokens")
    until(lambda: rig.value("ceiling_lookups") == late, "all are counted")
    assert [rig.value(name) for name in sums] == [asked, 0, asked, 0], "nobody had them in time"
    assert rig.value("ceiling_tokens") == asked
    until(lambda: _poll(rig) or not rig.value("leases"), "no lease is kept")
    rig.side.close()


def test_a_fault_while_blocks_are_given_fails_the_load_once(rig: Rig) -> None:
    """A second report, while the request runs, would end the engine."""
    request = rig.request(1, STORED * CHUNK + 1)
    offer = rig.arrive(request)
    broken = rig.side.room.most_blocks
    rig.side.room.most_blocks = lambda tokens: 1 // 0
    with pytest.raises(ZeroDivisionError):
        rig.side.on_allocated(request, lambda: tables(STORED * CHUNK + 1), offer)
    rig.side.room.most_blocks = broken
    rig.side.loads.fail_load("r", offer)
    assert rig.step({}, finished=("r",), failed=("r",)).failed == ["r"]
    assert rig.side.plan_failures((), is_off=False).failed == []
    assert rig.side.requests.by_id["r"].state is RequestState.BYPASS
    rig.side.on_finished("r")
    assert not rig.side.requests.by_id


def test_a_side_that_is_switched_off_gives_back_what_it_held(rig: Rig) -> None:
    """Its workers say that they are done with all its greetings: none is greeted with any more."""
    request = rig.request(1, STORED * CHUNK + 1)
    assert rig.arrive(request)
    assert rig.value("leases") == 1
    greeted = rig.side.session.link.greetings
    plan = rig.side.plan_failures((), is_off=True)
    assert plan.session == greeted + 1
    until(lambda: rig.value("sessions") == 0 or rig.value("leases") == 0, "no worker copies")
    assert rig.side.session.link.welcome is None


def test_a_miss_does_not_wait_for_workers(rig: Rig) -> None:
    request = rig.request(2, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    until(
        lambda: _poll(rig) or rig.side.requests.by_id["r"].lookup.found is not None,
        "it is answered",
    )
    rig.side.session.attached_ranks = {}
    assert rig.side.offer_hit(request, 0) == 0


def test_a_hit_does_not_wait_for_workers_that_cannot_map_the_arena(rig: Rig) -> None:
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    until(
        lambda: _poll(rig) or rig.side.requests.by_id["r"].lookup.found is not None,
        "it is answered",
    )
    rig.side.on_report(set(), set(), rig.report(counters={ATTACH_FAILED: 1}))
    assert rig.side.offer_hit(request, 0) == 0
    assert rig.counters[declined(Decline.LATE_WORKERS)] == 1
    rig.step({})
    assert loading(rig, "s"), "they map it after all"
    rig.side.on_report(set(), set(), rig.report())
    waits = rig.request(1, STORED * CHUNK + 1, "t")
    rig.side.on_new_request(waits)
    assert rig.side.offer_hit(waits, 0) is None, "that they could not once is over"


@pytest.mark.parametrize("why", ["workers", "weights"])
def test_nothing_is_looked_up_while_nothing_can_be_loaded(rig: Rig, why: str) -> None:
    """The daemon reads no tiers for it. A request that is asked about later is looked up then."""
    before = rig.value("lookups")
    session, watch = rig.side.session, rig.side.weights
    request, later = (rig.request(1, STORED * CHUNK + 1, name) for name in ("r", "s"))
    if why == "workers":
        rig.side.on_report(set(), set(), rig.report(is_disabled=True))
    else:
        watch.is_stale = True
    rig.side.on_new_request(request)
    rig.side.on_new_request(later)
    rig.planned({})
    assert rig.side.offer_hit(request, 0) == 0
    reason = {"workers": Decline.LATE_WORKERS, "weights": Decline.IDENTITY}[why]
    assert rig.counters[declined(reason)] == 1
    assert rig.counters[LOOKUPS_ASKED] == 0
    assert rig.value("lookups") == before, "the daemon is not asked"
    if why == "workers":
        rig.side.on_report(set(), set(), rig.report(boots={session.boot: 1}))
    else:
        watch.is_stale = False
    assert rig.offered(later) == STORED * CHUNK
    assert not session.breaker.is_open


def test_an_unanswered_lookup_ends_when_nothing_can_be_loaded_any_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may read tiers for it; the end of its lease ends that."""
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    monkeypatch.setattr(rig.side.session.link, "poll", lambda now: [])
    rig.planned({})
    assert rig.side.offer_hit(request, 0) is None
    rig.side.on_report(set(), set(), rig.report(is_disabled=True))
    assert rig.side.offer_hit(request, 0) == 0
    assert rig.counters[declined(Decline.LATE_WORKERS)] == 1
    assert not rig.side.requests.by_lease, "the lease is let go"


def connector_of(rig: Rig) -> Any:
    """The connector as vLLM calls it, over the rig's scheduler role."""
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.vllm.hook_guard import HookGuard

    connector: Any = HybridKVConnector.__new__(HybridKVConnector)
    connector.guard, connector.life = HookGuard("scheduler"), rig.side.life
    connector.scheduler_role, connector.worker_role = rig.side, None
    return connector


def test_a_connector_that_is_switched_off_ends_its_session(rig: Rig) -> None:
    connector = connector_of(rig)
    request = rig.request(1, STORED * CHUNK + 1)
    connector.on_new_request(request)
    until(lambda: connector.get_num_new_matched_tokens(request, 0)[0], "it is offered")
    connector.guard.pause("the test says so")
    greeted = rig.side.session.link.greetings
    idle = SimpleNamespace(num_scheduled_tokens={})
    assert [connector.build_connector_meta(idle).session for _ in range(2)] == [greeted + 1] * 2
    assert rig.side.session.link.welcome is None
    until(lambda: not rig.value("leases"), "no worker copies")


def answered(digest: str, *steps: int) -> dict[int, WeightsAnswer]:
    """What the one rank says of its weights after the first question, and of these steps."""
    return {0: WeightsAnswer(1, 0, digest, tuple(StepLook(step, 0) for step in steps))}


def test_a_fault_while_the_cache_is_reset_switches_the_connector_off(rig: Rig) -> None:
    """What was found before is of other weights."""
    connector = connector_of(rig)
    request = rig.request(1, STORED * CHUNK + 1)
    connector.on_new_request(request)
    until(lambda: connector.get_num_new_matched_tokens(request, 0)[0], "it is offered")
    rig.side.on_reset = None
    assert connector.reset_cache()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_reset_that_says_nothing_to_connectors_is_seen(rig: Rig) -> None:
    """vLLM tells them with `reset_connector` alone; the same weights hit again at once."""
    connector, watch = connector_of(rig), rig.side.weights
    vars(watch).update(vars(WeightsWatch(("a",))))
    manager = SimpleNamespace(get_blocks=None, block_pool=None, reset_prefix_cache=lambda: True)
    connector.bind_kv_cache_manager(manager)
    request = rig.request(1, STORED * CHUNK + 1)
    assert rig.arrive(request) == STORED * CHUNK
    assert manager.reset_prefix_cache()
    assert rig.side.offer_hit(request, 0) is None, "nobody knows the weights"
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    plan = rig.side.plan_step(output, lambda _: [])
    assert (plan.question, plan.eras) == (1, ())
    boots = {rig.side.session.boot: 1}
    rig.side.on_report(set(), set(), rig.report(boots=boots, weights=answered("a")))
    assert rig.side.offer_hit(request, 0) == STORED * CHUNK
    rig.side.on_finished("r")


def test_other_weights_are_named_by_the_hook_that_tells_the_daemon(rig: Rig) -> None:
    """After a fault of that hook nothing is looked up under the old name, or taken for known."""
    from hybridkv.connector.scheduler.fallbacks import RoleFallback
    from hybridkv.vllm.hook_guard import HookGuard

    watch, link = rig.side.weights, rig.side.session.link
    vars(watch).update(vars(WeightsWatch(("a",), lambda digests: {"weights": digests})))
    old = rig.side.session.hello.namespace
    report = rig.report(weights={0: WeightsAnswer(0, 1, "b")})
    RoleFallback(rig.side, HookGuard("scheduler")).on_report(set(), set(), report)
    assert not watch.is_current
    assert rig.side.session.hello.namespace == old
    greetings = link.greetings
    rig.side.on_report(set(), set(), report)
    assert watch.is_current
    assert rig.side.session.hello.namespace != old
    assert link.greetings == greetings, "the session goes on"


def test_an_idle_engine_steps_while_its_workers_read_late_weights(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 50: of what a start had no time for. What is read has another name, and no doubt."""
    from hybridkv.connector.scheduler import role

    watch = rig.side.weights
    vars(watch).update(vars(WeightsWatch(("random",), lambda digests: {"weights": digests})))
    late = WeightsAnswer(0, 0, "random", unread=3, is_reading=True)
    rig.side.on_report(set(), set(), rig.report(weights={0: late}))
    assert rig.gauge("weights_unread") == 3
    rig.side.on_step_end()
    until(lambda: rig.value("engines_unread") == 1, "the daemon hears it, for its page")
    assert rig.side.has_pending_work()
    now = time.monotonic() + role.READ_ON_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(role, "time", SimpleNamespace(monotonic=lambda: now))
        assert not rig.side.has_pending_work(), "a worker may never end"
    before = rig.side.session.hello.namespace
    read = WeightsAnswer(0, 0, "a", revision=1)
    rig.side.on_report(set(), set(), rig.report(weights={0: read}))
    assert not rig.side.has_pending_work()
    assert rig.gauge("weights_unread") == 0
    rig.side.on_step_end()
    until(lambda: not rig.value("engines_unread"), "and its end")
    assert watch.is_current
    assert rig.side.session.hello.namespace != before


@pytest.mark.parametrize("weights", ["a", "b"])
def test_what_is_stored_after_a_reset_is_committed_once_the_weights_are_known(
    daemon: DaemonProcess, weights: str
) -> None:
    """A prompt's windows and states stand in the engine for one step only."""
    rig = Rig(daemon)
    watch = rig.side.weights
    vars(watch).update(vars(WeightsWatch(("a",))))
    watch.facts_of = lambda digests: {"weights": digests}
    rig.await_slots()
    rig.side.on_reset(True)
    assert rig.side.has_pending_work(), "the workers have not been asked"
    request = rig.request(2, STORED * CHUNK + 1)
    rig.side.on_new_request(request)
    until(lambda: _poll(rig) or rig.side.offer_hit(request, 0) == 0, "a miss is no doubt")
    rig.side.on_allocated(request, lambda: [], 0)
    plan = rig.planned({"r": STORED * CHUNK}, tables(STORED * CHUNK + 1))
    assert plan.stores
    assert not plan.eras
    done, boots = {number: {0} for number in plan.stores}, {rig.side.session.boot: 1}
    answer = answered("", plan.number)
    rig.side.on_report(set(), set(), rig.report(boots=boots, done=done, weights=answer))
    assert not rig.side.stores.changes
    assert rig.side.has_pending_work(), "they are not committed"
    rig.side.on_report(set(), set(), rig.report(boots=boots, weights=answered(weights)))
    sent = {type(message) for message in rig.side.stores.changes}
    assert sent == {Commit if weights == "a" else Free}
    assert not rig.side.has_pending_work()
    rig.side.close()


def test_replies_after_the_loss_of_a_connection_are_not_taken(rig: Rig) -> None:
    """Slots of a session that has ended are somebody else's."""
    taken_replies: list[Any] = []

    def on_reply(reply: Any, now: float) -> None:
        taken_replies.append(reply)
        rig.side.session.link.drop_connection("the test says so", now)

    batches: list[Any] = [["the reply that loses it", "the next reply"], []]
    rig.side.session.link.poll = lambda now: batches.pop(0)
    rig.side.on_reply = on_reply
    rig.side.exchange_messages(time.monotonic())
    assert taken_replies == ["the reply that loses it"]


def test_what_was_computed_before_a_weight_update_is_committed_under_the_old_name(
    daemon: DaemonProcess,
) -> None:
    """Commits leave at the end of a step; an update before must not give them the new weights."""
    rig = Rig(daemon)
    with (
        Client(daemon.socket_path, name="old") as old,
        Client(daemon.socket_path, name="new", identity=b"o" * 32) as new,
    ):
        rig.await_slots()
        request = rig.request(2, STORED * CHUNK + 1)
        assert rig.arrive(request) == 0
        rig.side.on_allocated(request, lambda: [], 0)
        plan = rig.planned({"r": STORED * CHUNK}, tables(STORED * CHUNK + 1))
        assert plan.stores
        done = {number: {0} for number in plan.stores}
        rig.side.on_report(set(), set(), rig.report(boots={rig.side.session.boot: 1}, done=done))
        rig.side.change_identity(EngineIdentity(b"o" * 32, {}))
        rig.side.on_step_end()
        objects = sum(run.objects for run in plan.stores.values())
        until(lambda: old.values().get("objects_stored") == objects, "they are committed")
        found = old.answer(old.ask(2, STORED))
        assert found.chunks == STORED
        assert new.answer(new.ask(2, STORED)).chunks == 0
    rig.side.close()


def test_the_first_step_of_an_engine_is_stored(daemon: DaemonProcess) -> None:
    """It may be all of a prompt, and the only one in which a state stands where it is needed.

    No worker has reported yet that it is attached. After a step without a report, none is.
    """
    rig = Rig(daemon, attached=False)
    rig.await_slots()
    for name, stores in (("first", True), ("second", False)):
        request = rig.request(2, STORED * CHUNK + 1, name)
        assert rig.arrive(request) == 0
        rig.side.on_allocated(request, lambda: [], 0)
        plan = rig.planned({name: STORED * CHUNK}, tables(STORED * CHUNK + 1))
        assert bool(plan.stores) == stores
        assert plan.boot
        rig.side.on_report(set(), set(), None)
    rig.side.close()


def test_an_engine_steps_until_its_last_stores_are_committed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without requests, and never longer than PUSH_SECONDS after the last store."""
    from hybridkv.connector.scheduler import role

    rig.await_slots()
    connector = connector_of(rig)
    assert not connector.has_pending_push_work()
    request = rig.request(2, STORED * CHUNK + 1)
    assert rig.arrive(request) == 0
    rig.side.on_allocated(request, lambda: [], 0)
    plan = rig.step({"r": STORED * CHUNK}, tables(STORED * CHUNK + 1))
    assert plan.stores
    rig.side.on_finished("r")
    rig.step({})
    assert connector.has_pending_push_work()
    first, *others = ({number: {0}} for number in plan.stores)
    report = rig.report(boots={rig.side.session.boot: 1}, done=first)
    rig.side.on_report(set(), set(), report)
    assert connector.has_pending_push_work() == bool(others)
    now = time.monotonic() + role.PUSH_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(role, "time", SimpleNamespace(monotonic=lambda: now))
        assert not connector.has_pending_push_work()
    for done in others:
        rig.side.on_report(set(), set(), rig.report(boots={rig.side.session.boot: 1}, done=done))
    assert not connector.has_pending_push_work()
    rig.side.on_step_end()
    until(lambda: rig.value("objects_stored") > STORED, "they are committed")
    until(lambda: rig.value("tokens_stored") == STORED * CHUNK, "each chunk is counted once")
