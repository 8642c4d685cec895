"""Requests that wait for nothing, because no answer could add to what the engine has itself."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector.metrics import LOOKUPS_ASKED, LOOKUPS_OUTRUN, declined
from hybridkv.connector.scheduler.requests import RequestState, explain_request, longest_hit_tokens
from hybridkv.core.keys import HASH_BYTES
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.observe.status import outcome_of
from hybridkv.wire.messages import Decline
from hybridkv.wire.status import Outcome
from tests.layouts import LAYOUTS
from tests.unit.connector.test_scheduler import CHUNK, STORED, Rig, tables
from tests.unit.daemon.tierclient import GEOMETRY, Client
from tests.waiting import until

pytestmark = pytest.mark.engine

OWN = STORED * CHUNK
"""Tokens of the longest hit of a prompt of one token more."""


@pytest.fixture
def rig(daemon: DaemonProcess) -> Iterator[Rig]:
    """A role with write slots, over a daemon that has the first chunks of prompt 1."""
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        rig = Rig(daemon)
        rig.await_slots()
        yield rig
        rig.side.close()


def stop(daemon: DaemonProcess, signal_number: int) -> None:
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal_number)


def runs(rig: Rig, prompt: int, name: str, tokens: int = OWN + 1) -> None:
    """A request begins to run, of which the engine has all whole chunks before its last token."""
    request = rig.request(prompt, tokens, name)
    rig.side.on_new_request(request)
    assert rig.side.offer_hit(request, (tokens - 1) // CHUNK * CHUNK) == 0
    rig.side.on_allocated(request, lambda: tables(tokens), 0)


def stored(rig: Rig, name: str, tokens: int) -> list[tuple[int, int, int]]:
    """What a step stores that computes the request up to `tokens`: (group, chunk, objects)."""
    plan = rig.step({name: tokens}, tables(tokens))
    spans = [run.span for run in plan.stores.values()]
    return sorted((span.group_index, span.first_chunk, span.objects) for span in spans)


def answered(rig: Rig, name: str) -> bool:
    rig.side.exchange_messages(time.monotonic())
    return rig.side.requests.by_id[name].state is RequestState.READY


def test_a_daemon_that_hangs_costs_the_engines_own_hits_nothing(
    rig: Rig, daemon: DaemonProcess
) -> None:
    """No hit takes a second question, and what RAM has is not stored again."""
    stop(daemon, signal.SIGSTOP)
    try:
        for number in range(30):
            runs(rig, 1, f"r{number}")
            assert not stored(rig, f"r{number}", OWN + 1)
    finally:
        stop(daemon, signal.SIGCONT)
    assert rig.counters[LOOKUPS_OUTRUN] == rig.counters[LOOKUPS_ASKED] == 30
    assert not rig.side.session.breaker.failures
    tracked = rig.side.requests.by_id["r29"]
    assert outcome_of(explain_request(GEOMETRY, tracked)).outcome is Outcome.LOCAL
    until(lambda: answered(rig, "r29"), "the answers come")
    assert not rig.side.requests.by_lease
    assert not stored(rig, "r29", OWN + 1)
    until(lambda: not rig.value("leases"), "no lease is kept")


def test_a_chunk_that_the_engine_lacks_is_waited_for(rig: Rig, daemon: DaemonProcess) -> None:
    stop(daemon, signal.SIGSTOP)
    try:
        for local, tokens in ((OWN - CHUNK, OWN + 1), (OWN, OWN + CHUNK + 1), (0, CHUNK + 1)):
            request = rig.request(1, tokens, f"{local}")
            rig.side.on_new_request(request)
            assert rig.side.offer_hit(request, local) is None
    finally:
        stop(daemon, signal.SIGCONT)


def test_what_the_answer_lacks_is_stored_once(rig: Rig, daemon: DaemonProcess) -> None:
    """The chunk that the request completes meanwhile is stored in its step, and not again."""
    tokens, groups = OWN + CHUNK, range(len(GEOMETRY.groups))
    stop(daemon, signal.SIGSTOP)
    try:
        runs(rig, 2, "r", tokens)
        assert stored(rig, "r", tokens) == [(index, STORED, 1) for index in groups]
    finally:
        stop(daemon, signal.SIGCONT)
    until(lambda: answered(rig, "r"), "nothing was found")
    assert stored(rig, "r", tokens) == [(index, 0, STORED) for index in groups]
    assert not stored(rig, "r", tokens)


def test_requests_of_one_step_store_again_what_was_lost(rig: Rig, daemon: DaemonProcess) -> None:
    """Each ends before its answer. So after an answer that lacked something, the next waits."""
    stop(daemon, signal.SIGSTOP)
    try:
        runs(rig, 2, "r")
        assert not stored(rig, "r", OWN + 1)
        rig.side.on_finished("r")
    finally:
        stop(daemon, signal.SIGCONT)
    request = rig.request(2, OWN + 1, "s")
    # The lease ends with the request, and once more with the answer.
    until(lambda: rig.step({}) and rig.value("requests_release") == 2, "its answer was taken")
    rig.side.on_new_request(request)
    assert rig.side.offer_hit(request, OWN) is None
    assert rig.offered(request, OWN) == 0
    rig.side.on_allocated(request, lambda: tables(OWN + 1), 0)
    assert stored(rig, "s", OWN + 1)
    runs(rig, 1, "t")


def test_a_hit_of_the_engine_that_is_gone_before_it_has_blocks_is_loaded(rig: Rig) -> None:
    """The engine asks in each step until it has blocks, and may evict its own hit meanwhile."""
    request = rig.request(1, OWN + 1)
    rig.side.on_new_request(request)
    assert rig.side.offer_hit(request, OWN) == 0
    assert rig.offered(request) == OWN


def test_a_request_that_is_resumed_before_the_answer_is_looked_up_anew(
    rig: Rig, daemon: DaemonProcess
) -> None:
    stop(daemon, signal.SIGSTOP)
    try:
        runs(rig, 1, "r")
        request = rig.side.requests.by_id["r"].request
        request.num_preemptions = 1
        assert rig.side.offer_hit(request, 0) is None
    finally:
        stop(daemon, signal.SIGCONT)
    assert rig.offered(request) == OWN
    rig.side.on_finished("r")
    rig.step({})
    until(lambda: not rig.value("leases"), "both leases end")


def test_a_hit_inside_a_chunk_is_waited_for() -> None:
    """Only where the engine's match unit is as long as what it lacks, nothing can be added."""
    geometry = LAYOUTS["qwen3"]
    chunk = geometry.chunk_tokens
    assert longest_hit_tokens(geometry, 2 * chunk, with_tails=False) == chunk
    assert longest_hit_tokens(geometry, 2 * chunk + 1, with_tails=False) == 2 * chunk
    unit = geometry.hash_tokens
    assert (
        longest_hit_tokens(geometry, 2 * chunk + unit, with_tails=True)
        == (2 * chunk + unit - 1) // unit * unit
    )


def test_the_first_request_after_a_restart_of_the_daemon_is_served(
    rig: Rig, daemon: DaemonProcess
) -> None:
    """An idle engine notices the restart with the request, which waits for the greeting.

    Its connection has lasted. One that has not is made anew later.
    """
    lasted_at = time.monotonic() + RECONNECT_SECONDS
    until(lambda: time.monotonic() > lasted_at, "the connection has lasted")
    daemon.kill()
    daemon.start()
    request = rig.request(1, OWN + 1)
    rig.side.on_new_request(request)

    offers: list[int | None] = []

    def is_offered() -> bool:
        rig.step({})
        offers.append(rig.side.offer_hit(request, 0))
        return offers[-1] is not None

    until(is_offered, "it is answered")
    assert offers[-1] == OWN, rig.counters
    assert not any(rig.counters[declined(reason)] for reason in Decline)


def test_a_request_waits_for_no_daemon_that_is_gone(rig: Rig, daemon: DaemonProcess) -> None:
    daemon.kill()
    request = rig.request(1, OWN + 1)
    rig.side.on_new_request(request)
    assert rig.side.offer_hit(request, 0) == 0
    assert rig.counters[declined(Decline.LOST)] == 1
    assert len(rig.side.requests.by_id["r"].lookup.hashes) == STORED * HASH_BYTES
