"""The scheduler role over a real daemon, hook by hook; vLLM's requests are plain values here."""

import copy
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.scheduler.requests import RequestState
from hybridkv.core.packed import unpack_u64
from hybridkv.core.settings import parse_settings
from hybridkv.core.speed import Speed
from hybridkv.lab.daemon_process import DaemonProcess
from tests.unit.connector import requests
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client, hashes, stats, until
from tests.waiting import DEADLINE_SECONDS

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
    ) -> None:
        from hybridkv.connector.messages import StepReport
        from hybridkv.connector.scheduler.role import SchedulerRole

        self.counters: Counter[str] = Counter()
        server = f"unix://{daemon.socket_path}"
        parsed = parse_settings(
            {"server": server, "lookup_timeout_ms": 1e3 * LOOKUP_SECONDS, **(settings or {})}
        )
        self.side = SchedulerRole(
            parsed, GEOMETRY, IDENTITY, "e", daemon.socket_path, 2048, self.counters, 1000
        )
        self._socket_path = daemon.socket_path
        until(self._welcomed, "the daemon greets")
        self.report = StepReport
        if attached:
            self.step({})

    def _welcomed(self) -> bool:
        self.side._poll(time.monotonic())
        return self.side._session.link.welcome is not None

    def request(self, prompt: int, tokens: int, name: str = "r", preemptions: int = 0) -> Any:
        """A prompt's first `tokens` tokens as vLLM knows them."""
        names = b"".join(hashes(prompt, tokens // CHUNK))
        return requests.request(name, tokens, names, preemptions)

    def offered(self, request: Any, local: int = 0) -> int:
        """The answer, once there is one."""
        offers: list[int] = []

        def asked() -> bool:
            offer = self.side.matched(request, local)
            offers.extend([] if offer is None else [offer])
            return bool(offers)

        until(asked, "the lookup is answered")
        return offers[0]

    def step(
        self,
        scheduled: dict[str, int],
        tables: Any = None,
        finished: tuple[str, ...] = (),
        failed: Any = (),
    ) -> Any:
        """One step: the plan, after which the workers are attached and report `finished` loads."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        plan = self.side.planned(output, lambda _: tables)
        self.side.reported(
            set(finished), set(failed), self.report(boots={self.side._session.boot: 1})
        )
        assert not self.side.step_ended()
        return plan

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
    """Prompt 1 is stored."""
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        made = Rig(daemon)
        yield made
        made.side.close()


def loading(rig: Rig, name: str = "r", local: int = 0) -> Any:
    """A request whose load the workers were told of."""
    request = rig.request(1, STORED * CHUNK + 1, name)
    rig.side.arrived(request)
    offer = rig.offered(request, local)
    assert offer == STORED * CHUNK - local
    rig.side.allocated(request, tables(STORED * CHUNK + 1), offer)
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
    assert rig.counters["loads"] == 1


def test_the_lookup_of_a_waiting_request_leaves_with_the_plan(rig: Rig) -> None:
    """The engine asks about it once others are done; tiers below RAM are asked meanwhile."""
    before = rig.value("lookups")
    rig.side.arrived(rig.request(1, STORED * CHUNK + 1))
    assert rig.value("lookups") == before, "an arrival sends nothing"
    rig.side.planned(
        SimpleNamespace(
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        ),
        lambda _: (),
    )
    until(lambda: rig.value("lookups") == before + 1, "the daemon is asked")


def test_the_daemon_is_not_blamed_for_the_engines_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused engine takes requests and no steps; their lookups leave with its next step."""
    from hybridkv.connector.scheduler import role

    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    pause = 10 * LOOKUP_SECONDS
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + pause, time_ns=time.time_ns)
    monkeypatch.setattr(role, "time", later)
    assert rig.offered(request) == STORED * CHUNK
    assert not rig.counters["lookups_late_answer"]


def test_a_lease_that_nothing_is_loaded_under_is_let_go_at_once(rig: Rig) -> None:
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    assert rig.offered(request)
    assert rig.value("leases") == 1
    rig.side.allocated(request, tables(STORED * CHUNK + 1), 0)
    rig.step({})
    until(lambda: not rig.value("leases"), "the engine took nothing of it")
    other = rig.request(1, STORED * CHUNK + 1, "aborted")
    rig.side.arrived(other)
    assert rig.offered(other)
    rig.side.finished("aborted")
    rig.step({})
    until(lambda: not rig.value("leases"), "it was aborted before it had blocks")
    assert "aborted" not in rig.side._requests.by_id


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
        rig.side.arrived(request)
        assert rig.offered(request, local) == offer
        rig.side.finished(name)


def test_asking_again_asks_nobody_and_changes_nothing(rig: Rig) -> None:
    """vLLM asks in every step until it has blocks (C22, C36, D3)."""
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    offers = {rig.offered(request) for _ in range(5)}
    assert offers == {STORED * CHUNK}
    assert rig.counters["lookups"] == 1
    assert rig.value("lookups") == 1
    rig.side.allocated(request, tables(STORED * CHUNK + 1), STORED * CHUNK)
    rig.step({})
    rig.step({}, finished=("r",))
    rig.side.allocated(request, tables(STORED * CHUNK + 1), 0)
    assert rig.side._requests.by_id["r"].state is RequestState.READY
    assert not rig.step({}).failed


def test_a_plan_is_handed_over_once_and_leaves_the_engines_own_alone(rig: Rig) -> None:
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    rig.side.allocated(request, tables(STORED * CHUNK + 1), rig.offered(request))
    output = SimpleNamespace(
        num_scheduled_tokens={}, total_num_scheduled_tokens=0, kv_connector_block_state=None
    )
    before = copy.deepcopy(output)
    first, second = rig.side.planned(output, lambda _: []), rig.side.planned(output, lambda _: [])
    assert output == before
    assert (list(first.loads), list(second.loads)) == (["r"], [])
    runs = first.loads["r"].runs
    assert {run.span.group_index for run in runs} == set(range(len(GEOMETRY.groups)))
    assert len({offset for run in runs for offset in unpack_u64(run.offsets)}) == sum(
        run.objects for run in runs
    )


def test_a_resumed_request_is_looked_up_with_what_it_has_generated(rig: Rig) -> None:
    """Its hashes are read where the engine keeps them (C17, C39)."""
    request = rig.request(1, 2 * CHUNK)
    rig.side.arrived(request)
    rig.side.allocated(request, tables(2 * CHUNK), rig.offered(request))
    rig.step({})
    rig.step({}, finished=("r",))
    grown = rig.request(1, STORED * CHUNK + 1, preemptions=1)
    request.num_tokens, request.num_preemptions = grown.num_tokens, 1
    request.block_hashes[:] = grown.block_hashes
    assert rig.offered(request) == STORED * CHUNK
    assert rig.counters["lookups"] == 2


def test_a_request_that_nobody_knows_is_a_miss(rig: Rig) -> None:
    """And where the engine waits for its load all the same, the load fails (C38)."""
    unknown = rig.request(1, STORED * CHUNK + 1, "unknown")
    assert rig.side.matched(unknown, 0) == 0
    rig.side.allocated(unknown, tables(STORED * CHUNK + 1), 0)
    assert not rig.step({}).failed
    rig.side.allocated(unknown, tables(STORED * CHUNK + 1), CHUNK)
    assert rig.step({}, finished=("unknown",)).failed == ["unknown"]
    rig.side.finished("unknown")


def test_a_failed_load_is_never_offered_again_and_stored_anew(rig: Rig) -> None:
    """Though the lookup found it: whatever was wrong there is computed now (B38, D4)."""
    request = loading(rig)
    rig.step({}, finished=("r",), failed=("r",))
    assert rig.counters["loads_failed"] == 1
    request.num_preemptions = 1
    assert rig.side.matched(request, 0) == 0
    until(lambda: not rig.value("leases"), "it is released")
    # Credits come with the daemon's answers.
    until(lambda: _poll(rig) or not rig.side.slots_fd, "there are write slots")
    plan = rig.step({"r": STORED * CHUNK + 1}, tables(STORED * CHUNK + 1))
    stored = {(run.span.group_index, run.span.first_chunk) for run in plan.stores.values()}
    assert stored == {(index, 0) for index in range(len(GEOMETRY.groups))}


def test_what_was_loaded_is_not_stored_again_and_counted_by_its_plan(rig: Rig) -> None:
    request = loading(rig, local=CHUNK)
    rig.step({}, finished=("r",))
    until(lambda: _poll(rig) or not rig.side.slots_fd, "there are write slots")
    request.num_computed_tokens = STORED * CHUNK
    assert not rig.step({"r": 1}, tables(STORED * CHUNK + 1)).stores
    full, sliding, small = GEOMETRY.groups
    blocks = (STORED - 1) * (full.block_bytes + small.block_bytes) + sliding.block_bytes
    assert rig.counters["tokens_loaded"] == (STORED - 1) * CHUNK
    assert rig.counters["bytes_loaded"] == blocks
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
    assert rig.counters["loads"] == 1
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert any("for r in" in record.getMessage() for record in caplog.records)


def test_patience_is_what_computing_takes_and_has_a_cap(daemon: DaemonProcess) -> None:
    """D18: 2.0 s and 0.1 s per Ki tokens while the speed of prefill is not known."""
    rig = Rig(daemon, {"load_timeout_seconds": 12})
    assert rig.side._lookups.patience.of(0) == (2.0, 0)
    assert rig.side._lookups.patience.of(10 << 10) == (3.0, 0)
    rig.side._lookups.patience.prefill = Speed(1000.0, 0.0)
    assert rig.side._lookups.patience.of(500) == (0.5, 1000)
    assert rig.side._lookups.patience.of(1 << 20) == (12.0, 1000)
    rig.side.close()


def test_the_speed_of_prefill_is_measured_step_by_step(rig: Rig) -> None:
    request = rig.request(2, 9 * CHUNK)
    rig.side.arrived(request)
    assert rig.offered(request) == 0
    rig.step({"r": 1}, tables(9 * CHUNK))
    assert rig.side._lookups.patience.prefill == Speed(), "a step of a few tokens says nothing"
    began = time.monotonic()
    rig.step({"r": 4 * CHUNK}, tables(9 * CHUNK))
    rate, most = rig.side._lookups.patience.prefill.per_second, 4 * CHUNK / 1e-4
    assert min(most, 4 * CHUNK / (time.monotonic() - began)) <= rate <= most


def _poll(rig: Rig) -> bool:
    rig.side._poll(time.monotonic())
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
            rig.side.arrived(request)
            began = time.monotonic()
            offers.append(rig.offered(request))
            assert time.monotonic() - began < DEADLINE_SECONDS / 4
        assert offers == [0] * 4
        late, spared = rig.counters["lookups_late_answer"], rig.counters["lookups_breaker_open"]
        assert late >= 3
        assert late + spared == 4
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: rig.value("lookups_hit") == late, "all are answered at last")
    until(lambda: _poll(rig) or not rig.value("leases"), "no lease is kept")
    rig.side.close()


def test_a_fault_while_blocks_are_given_fails_the_load_once(rig: Rig) -> None:
    """A second report, while the request runs, would end the engine."""
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    offer = rig.offered(request)
    broken = rig.side._room.most_blocks
    rig.side._room.most_blocks = lambda tokens: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        rig.side.allocated(request, tables(STORED * CHUNK + 1), offer)
    rig.side._room.most_blocks = broken  # type: ignore[method-assign]
    rig.side.must_fail("r", offer)
    assert rig.step({}, finished=("r",), failed=("r",)).failed == ["r"]
    assert rig.side.emergency().failed == []
    assert rig.side._requests.by_id["r"].state is RequestState.BYPASS
    rig.side.finished("r")
    assert not rig.side._requests.by_id


def test_a_side_that_is_switched_off_gives_back_what_it_held(rig: Rig) -> None:
    """Its workers say that they are done with all its greetings: none is greeted with any more."""
    request = rig.request(1, STORED * CHUNK + 1)
    rig.side.arrived(request)
    assert rig.offered(request)
    assert rig.value("leases") == 1
    greeted = rig.side._session.link.greetings
    plan = rig.side.quit()
    assert plan.session == greeted + 1
    until(lambda: rig.value("sessions") == 0 or rig.value("leases") == 0, "no worker copies")
    assert rig.side._session.link.welcome is None


def test_a_miss_does_not_wait_for_workers(rig: Rig) -> None:
    request = rig.request(2, STORED * CHUNK + 1)
    rig.side.arrived(request)
    until(
        lambda: _poll(rig) or rig.side._requests.by_id["r"].lookup.found is not None,
        "it is answered",
    )
    rig.side._session.attached_ranks = {}
    assert rig.side.matched(request, 0) == 0


def connector_of(rig: Rig) -> Any:
    """The connector as vLLM calls it, over the rig's scheduler role."""
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.vllm.supervise import Supervisor

    connector: Any = HybridKVConnector.__new__(HybridKVConnector)
    connector._supervisor, connector._scheduler, connector._worker = (
        Supervisor("scheduler"),
        rig.side,
        None,
    )
    connector._facts = {}
    return connector


def test_a_connector_that_is_switched_off_ends_its_session(rig: Rig) -> None:
    connector = connector_of(rig)
    request = rig.request(1, STORED * CHUNK + 1)
    connector.on_new_request(request)
    until(lambda: connector.get_num_new_matched_tokens(request, 0)[0], "it is offered")
    connector._supervisor.switch_off("the test says so")
    greeted = rig.side._session.link.greetings
    assert [connector.build_connector_meta(None).session for _ in range(2)] == [greeted + 1] * 2
    assert rig.side._session.link.welcome is None
    until(lambda: not rig.value("leases"), "no worker copies")


def test_a_fault_while_the_cache_is_reset_switches_the_connector_off(rig: Rig) -> None:
    """What was found before is of other weights."""
    connector = connector_of(rig)
    request = rig.request(1, STORED * CHUNK + 1)
    connector.on_new_request(request)
    until(lambda: connector.get_num_new_matched_tokens(request, 0)[0], "it is offered")
    rig.side.identify = None  # type: ignore[method-assign,assignment]
    assert connector.reset_cache()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_what_is_said_behind_the_loss_of_a_connection_is_not_taken(rig: Rig) -> None:
    """Slots of a session that has ended are somebody else's."""
    taken: list[Any] = []

    def take(reply: Any, now: float) -> None:
        taken.append(reply)
        rig.side._session.link._lose("the test says so", now)

    said: list[Any] = ["what loses it", "what comes behind"]
    rig.side._session.link.poll = lambda now: said  # type: ignore[method-assign]
    rig.side._take = take  # type: ignore[method-assign]
    rig.side._poll(time.monotonic())
    assert taken == ["what loses it"]


def test_what_was_computed_before_a_weight_update_is_committed_under_the_old_name(
    daemon: DaemonProcess,
) -> None:
    """Commits leave at the end of a step; an update before must not give them the new weights."""
    rig = Rig(daemon)
    with (
        Client(daemon.socket_path, name="old") as old,
        Client(daemon.socket_path, name="new", identity=b"o" * 32) as new,
    ):
        until(
            lambda: not rig.side.step_ended() and rig.side.slots_fd is None, "there are write slots"
        )
        request = rig.request(2, STORED * CHUNK + 1)
        rig.side.arrived(request)
        assert rig.offered(request) == 0
        rig.side.allocated(request, [], 0)
        output = SimpleNamespace(
            num_scheduled_tokens={"r": STORED * CHUNK},
            total_num_scheduled_tokens=STORED * CHUNK,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        plan = rig.side.planned(output, lambda _: tables(STORED * CHUNK + 1))
        assert plan.stores
        done = {number: {0} for number in plan.stores}
        rig.side.reported(set(), set(), rig.report(boots={rig.side._session.boot: 1}, done=done))
        rig.side.identify(b"o" * 32, {})
        rig.side.step_ended()
        until(lambda: old.values().get("objects_stored", 0) > 0, "they are committed")
        found = old.answer(old.ask(2, STORED))
        assert found.chunks == STORED
        assert new.answer(new.ask(2, STORED)).chunks == 0
    rig.side.close()


def test_the_first_step_of_an_engine_is_stored(daemon: DaemonProcess) -> None:
    """It may be all of a prompt, and the only one in which a state stands where it is needed.

    No worker has reported yet that it is attached. After a step without a report, none is.
    """
    rig = Rig(daemon, attached=False)
    until(
        lambda: _poll(rig) or (rig.side._session.boot != "" and rig.side.slots_fd is None),
        "there are write slots",
    )
    for name, stores in (("first", True), ("second", False)):
        request = rig.request(2, STORED * CHUNK + 1, name)
        rig.side.arrived(request)
        assert rig.offered(request) == 0
        rig.side.allocated(request, [], 0)
        output = SimpleNamespace(
            num_scheduled_tokens={name: STORED * CHUNK},
            total_num_scheduled_tokens=STORED * CHUNK,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        plan = rig.side.planned(output, lambda _: tables(STORED * CHUNK + 1))
        assert bool(plan.stores) == stores
        assert plan.boot
        rig.side.reported(set(), set(), None)
    rig.side.close()
