"""What the daemon is advised of requests with hints, over a real daemon, and of no others."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hybridkv.core.keys import tenant_of
from hybridkv.core.policies import Advice
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hints import (
    DEMOTE,
    PREFETCH_IN_SECONDS,
    PRIORITY,
    READ,
    RELEASE,
    RETAIN_SECONDS,
    WRITE,
)
from hybridkv.wire.messages import (
    Advise,
    Commit,
    Free,
    Lookup,
    Prefetch,
    Release,
    ReportRequest,
    Request,
    Reserve,
)
from tests.unit.connector.test_scheduler import CHUNK, Rig, tables
from tests.unit.daemon.tierclient import hashes

pytestmark = pytest.mark.engine

PROMPT, ANSWER = 2 * CHUNK + 1, CHUNK
TENANT = tenant_of("alice")
RETAIN_PROMPT = Advise(Advice.RETAIN, b"".join(hashes(1, 2)), TENANT, 600_000)
ALL = b"".join(hashes(1, 3))
"""The chunks of the prompt and that of its answer."""


class Advised:
    """A scheduler role with write slots, and what the daemon is sent from then on."""

    def __init__(self, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = Rig(daemon)
        self.rig.await_slots()
        self.messages: list[Request] = []
        link = self.rig.side.session.link
        queue = link.queue

        def listened(message: Request, now: float) -> bool:
            self.messages.append(message)
            return bool(queue(message, now))

        monkeypatch.setattr(link, "queue", listened)

    def begin(self, params: Mapping[str, object] | None) -> Any:
        """Return a request with these parameters, of which the prompt is computed."""
        request = self.rig.request(1, PROMPT)
        request.cache_salt = "alice"
        request.kv_transfer_params = params
        self.rig.side.on_new_request(request)
        assert self.rig.offered(request) == 0
        self.rig.side.on_allocated(request, lambda: tables(PROMPT), 0)
        self.compute(request, PROMPT)
        return request

    def compute(self, request: Any, tokens: int) -> Any:
        """Compute so many tokens. The workers report all copies. Returns the plan."""
        total = request.num_computed_tokens + tokens
        plan = self.rig.planned({"r": tokens}, tables(total))
        request.num_computed_tokens = total
        self.report(plan)
        return plan

    def report(self, plan: Any) -> None:
        done = {number: {0} for number in plan.stores}
        boots = {self.rig.side.session.boot: 1}
        self.rig.side.on_report(set(), set(), self.rig.report(plan.number, boots, done=done))

    def answer(self, request: Any) -> None:
        """Generate a chunk of the answer and one more token, and end the request."""
        request.num_tokens += ANSWER + 1
        request.block_hashes = hashes(1, 3)
        self.compute(request, ANSWER)
        self.end()

    def end(self) -> None:
        self.rig.side.on_finished("r")
        self.rig.side.on_step_end()

    def advice(self) -> list[Advise]:
        return [message for message in self.messages if isinstance(message, Advise)]


@pytest.fixture
def advised(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Advised]:
    advised = Advised(daemon, monkeypatch)
    yield advised
    advised.rig.side.close()


@pytest.mark.parametrize("params", [None, {"do_remote_decode": True}, {READ: True, WRITE: True}])
def test_of_a_request_without_hints_the_daemon_is_told_no_more(
    advised: Advised, params: Any
) -> None:
    advised.answer(advised.begin(params))
    (lookup,) = (message for message in advised.messages if isinstance(message, Lookup))
    kinds = {type(message) for message in advised.messages} - {Commit, Release, ReportRequest}
    assert kinds <= {Lookup, Reserve, Free}
    assert not lookup.is_scan


def test_a_prompt_is_retained_from_its_lookup_and_the_whole_request_from_its_end(
    advised: Advised,
) -> None:
    request = advised.begin({RETAIN_SECONDS: 600})
    assert advised.advice() == [RETAIN_PROMPT]
    advised.answer(request)
    assert advised.advice() == [RETAIN_PROMPT, Advise(Advice.RETAIN, ALL, TENANT, 600_000)]


@pytest.mark.parametrize(("key", "advice"), [(RELEASE, Advice.RELEASE), (DEMOTE, Advice.DEMOTE)])
@pytest.mark.parametrize("is_retained", [False, True])
def test_what_is_let_go_is_let_go_after_the_last_commit(
    advised: Advised, key: str, advice: Advice, is_retained: bool
) -> None:
    request = advised.begin({key: True, RETAIN_SECONDS: 600 * is_retained})
    assert advised.advice() == [RETAIN_PROMPT] * is_retained
    advised.answer(request)
    assert advised.advice()[is_retained:] == [Advise(advice, ALL, TENANT)]
    kinds = [type(message) for message in advised.messages]
    assert kinds.index(Advise, kinds.index(Advise) + is_retained) > _last(kinds, Commit)


def _last(kinds: list[type], kind: type) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)


@pytest.mark.parametrize("key", [RETAIN_SECONDS, DEMOTE])
def test_a_request_that_goes_on_is_prefetched_after_what_else_it_advises(
    advised: Advised, key: str
) -> None:
    request = advised.begin({key: 600 if key == RETAIN_SECONDS else True, PREFETCH_IN_SECONDS: 1.5})
    before = advised.advice()
    advised.answer(request)
    advise, prefetch = advised.messages[-2:]
    assert isinstance(advise, Advise)
    assert advised.advice() == [*before, advise]
    assert prefetch == Prefetch(ALL, 1500)


def test_an_aborted_request_is_let_go_once_its_copies_are_over(advised: Advised) -> None:
    request = advised.rig.request(1, PROMPT)
    request.kv_transfer_params = {RELEASE: True}
    assert advised.rig.arrive(request) == 0
    advised.rig.side.on_allocated(request, lambda: tables(PROMPT), 0)
    plan = advised.rig.planned({"r": PROMPT}, tables(PROMPT))
    advised.end()
    assert advised.advice() == []
    advised.report(plan)
    advised.rig.side.on_step_end()
    assert advised.advice() == [Advise(Advice.RELEASE, b"".join(hashes(1, 2)))]


def test_a_request_of_low_priority_is_a_scan(advised: Advised) -> None:
    advised.answer(advised.begin({PRIORITY: "low"}))
    (lookup,) = (message for message in advised.messages if isinstance(message, Lookup))
    assert lookup.is_scan
    assert advised.advice() == []


def test_a_prompt_without_names_advises_nothing(advised: Advised) -> None:
    request = advised.rig.request(1, CHUNK // 2)
    request.kv_transfer_params = {RETAIN_SECONDS: 600, RELEASE: True}
    advised.rig.side.on_new_request(request)
    advised.end()
    assert advised.advice() == []


def test_what_was_not_said_before_the_connection_was_lost_is_not_said(advised: Advised) -> None:
    request = advised.rig.request(1, PROMPT)
    request.kv_transfer_params = {RELEASE: True}
    assert advised.rig.arrive(request) == 0
    advised.rig.side.on_allocated(request, lambda: tables(PROMPT), 0)
    plan = advised.rig.planned({"r": PROMPT}, tables(PROMPT))
    advised.end()
    for listener in advised.rig.side.listeners:
        listener.on_connection_lost(0.0)
    advised.report(plan)
    advised.rig.side.on_step_end()
    assert advised.advice() == []
