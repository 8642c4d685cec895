"""Live audits of the scheduler role over a real daemon, from the offer to every way out.

The workers are the test: it says what they stored and what they found.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hybridkv.connector.metrics import LOADS_DONE, audited, declined
from hybridkv.core.audit import AuditOutcome, AuditVerdict
from hybridkv.core.packed import unpack_slots
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import Decline
from tests.unit.connector.test_scheduler import CHUNK, STORED, Rig, tables
from tests.unit.daemon.tierclient import GEOMETRY, IDENTITY, Client
from tests.waiting import until

pytestmark = pytest.mark.engine

GROUPS = range(len(GEOMETRY.groups))
TOKENS = STORED * CHUNK + 1
SHORTER = (STORED - 1) * CHUNK
PASSED = AuditVerdict(AuditOutcome.PASSED, "model.layers.0", 0.001, 0.1)
DIFFERED = AuditVerdict(AuditOutcome.DIFFERED, "model.layers.1", 1.4, 0.1)
INCONCLUSIVE = AuditVerdict(AuditOutcome.INCONCLUSIVE)


@pytest.fixture
def rig(daemon: DaemonProcess) -> Iterator[Rig]:
    """Prompt 1 is stored, and audits are on."""
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        rig = Rig(daemon, {"audit": "on"})
        rig.await_slots()
        yield rig
        rig.side.close()


def begun(rig: Rig, name: str = "r") -> Any:
    """A request with the load of a hit that is a chunk shorter."""
    request = rig.request(1, TOKENS, name)
    offer = rig.arrive(request)
    assert offer == SHORTER
    rig.side.on_allocated(request, lambda: tables(TOKENS), offer)
    rig.step({})
    rig.step({}, finished=(name,))
    assert rig.counters[LOADS_DONE] == 1
    return request


def computed(rig: Rig, request: Any) -> dict[int, Any]:
    """The engine computes what is left of the prompt; the store runs of the step by number."""
    request.num_computed_tokens = SHORTER
    plan = rig.step({request.request_id: TOKENS - SHORTER}, tables(TOKENS))
    assert sorted(run.span.group_index for run in plan.stores.values()) == [*GROUPS]
    assert {run.span.first_chunk for run in plan.stores.values()} == {STORED - 1}
    request.num_computed_tokens = TOKENS
    return dict(plan.stores)


def reported(rig: Rig, **fields: Any) -> None:
    """The workers report these fields of a StepReport."""
    report = rig.report(0, {rig.side.session.boot: 1}, **fields)
    rig.side.on_report(set(), set(), report)
    rig.side.on_step_end()


def compared(rig: Rig, request: Any) -> dict[int, Any]:
    """The chunk is stored once more, and the workers are told what to compare."""
    runs = computed(rig, request)
    reported(rig, done={number: {0} for number in runs})
    pairs = rig.planned({}).audits
    assert [*pairs] == [*runs]
    return dict(pairs)


def found(rig: Rig, pairs: Mapping[int, Any], *verdicts: AuditVerdict) -> None:
    """What the workers found of each pair."""
    audits = {number: {0: verdict} for number, verdict in zip(pairs, verdicts, strict=True)}
    reported(rig, audits=audits)


def released(rig: Rig) -> None:
    """Every lease ends, and nothing is audited any more."""
    until(lambda: rig.step({}) and not rig.value("leases"), "every lease ends")
    assert rig.side.audits.current is None
    assert not rig.side.requests.by_lease


def test_the_last_chunk_of_the_first_hit_is_computed_and_compared(rig: Rig) -> None:
    request = begun(rig)
    assert rig.value("leases") == 1, "what is compared stays, and the load is over"
    pairs = compared(rig, request)
    assert [pair.chunk for pair in pairs.values()] == [STORED - 1] * len(GROUPS)
    assert len({slot for pair in pairs.values() for slot in unpack_slots(pair.tickets)}) == 6
    assert not rig.planned({}).audits, "the workers are told once"
    found(rig, pairs, PASSED, PASSED, PASSED)
    assert rig.counters[audited(AuditOutcome.PASSED)] == 1
    until(lambda: rig.value("duplicates") == len(GROUPS), "the second copies are given back")
    assert rig.value("audits_passed") == 1
    rig.side.on_finished("r")
    released(rig)
    assert not rig.counters[declined(Decline.AUDIT)]


def test_what_differs_is_dropped_and_its_identity_is_used_no_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = compared(rig, begun(rig))
    audit = rig.side.audits.current
    assert audit is not None
    assert audit.found is not None
    objects = {
        *[slot.generation for slot in unpack_slots(audit.offer.slots)],
        *[slot.generation for slot in unpack_slots(audit.found.slots)],
    }
    assert len(objects) > len(GROUPS), "the hit has more chunks than the one that is compared"
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    try:
        found(rig, pairs, PASSED, DIFFERED, PASSED)
    finally:
        ours.removeHandler(caplog.handler)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    (line,) = {record.getMessage() for record in errors}
    assert "layer model.layers.1 differs by 1.4, 0.1 is allowed" in line
    assert "nobody knows which of the two are wrong" in line
    assert rig.counters[audited(AuditOutcome.DIFFERED)] == 1
    until(lambda: rig.value("audits_differed") == 1, "the daemon is told")
    assert rig.value("objects_condemned") == len(objects - {0}), "a wrong chunk is seldom alone"
    assert not rig.value("duplicates"), "what the engine computed is not committed"
    waiting = rig.request(1, TOKENS, "waiting")
    assert rig.arrive(waiting) == 0
    assert rig.counters[declined(Decline.AUDIT)] == 1
    waiting.num_computed_tokens = 0
    assert not rig.step({"waiting": TOKENS}, tables(TOKENS)).stores, "nothing is stored either"
    rig.side.on_finished("waiting")
    rig.side.on_finished("r")
    released(rig)


@pytest.mark.parametrize("local", [SHORTER + 1, STORED * CHUNK])
def test_a_chunk_that_the_engine_has_itself_is_not_audited(rig: Rig, local: int) -> None:
    """Then nothing of the hit is given up."""
    request = rig.request(1, TOKENS)
    assert rig.arrive(request, local) == STORED * CHUNK - local
    rig.side.on_finished("r")
    released(rig)


def test_asking_again_gives_the_same_offer(rig: Rig) -> None:
    request = rig.request(1, TOKENS)
    rig.side.on_new_request(request)
    assert [rig.offered(request) for _ in range(3)] == [SHORTER] * 3
    assert rig.side.audits.budget.spent_tokens == CHUNK


def test_workers_that_never_answer_keep_nothing_for_ever(rig: Rig) -> None:
    from hybridkv.connector.scheduler.audits import AUDIT_SECONDS_MAX

    compared(rig, begun(rig))
    audit: Any = rig.side.audits.current
    for item in audit.objects.values():
        item.sent_at -= AUDIT_SECONDS_MAX + 1
    reported(rig)
    assert rig.counters[audited(AuditOutcome.INCONCLUSIVE)] == 1
    until(lambda: rig.value("duplicates") == len(GROUPS), "the second copies are given back")


def test_a_role_that_follows_goes_on_with_the_budget_and_what_differed(rig: Rig) -> None:
    from hybridkv.connector.scheduler.audits import Audits

    found(rig, compared(rig, begun(rig)), DIFFERED, PASSED, PASSED)
    follower = Audits(rig.side.requests, rig.side.audits.budget, IDENTITY)
    assert follower.is_cut_off


def test_prompts_with_images_are_not_audited(rig: Rig) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    request = rig.request(1, TOKENS)
    place = PlaceholderRange(offset=STORED * CHUNK, length=1)
    request.mm_features = [MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", "i", place)]
    assert rig.arrive(request) == STORED * CHUNK
    rig.side.on_finished("r")
    released(rig)


def test_audits_may_be_off(daemon: DaemonProcess) -> None:
    with Client(daemon.socket_path) as client:
        client.store(1, STORED)
        rig = Rig(daemon, {"audit": "off"})
        request = rig.request(1, TOKENS)
        assert rig.arrive(request) == STORED * CHUNK
        rig.side.close()


def test_a_hit_that_was_found_before_is_not_offered_after_a_difference(rig: Rig) -> None:
    request = begun(rig)
    early = rig.request(1, TOKENS, "early")
    assert rig.arrive(early) == STORED * CHUNK
    found(rig, compared(rig, request), DIFFERED, PASSED, PASSED)
    assert rig.side.offer_hit(early, 0) == 0
    assert rig.counters[declined(Decline.AUDIT)] == 1


def test_a_request_that_ends_before_the_chunk_is_computed_is_not_audited(rig: Rig) -> None:
    begun(rig)
    rig.side.on_finished("r")
    released(rig)
    assert rig.counters[audited(AuditOutcome.INCONCLUSIVE)] == 1


def test_a_request_that_is_aborted_before_its_offer_keeps_nothing(rig: Rig) -> None:
    request = rig.request(1, TOKENS)
    rig.side.on_new_request(request)
    rig.planned({})
    until(lambda: rig.value("leases") == 2, "the answer is on its way")
    rig.side.on_finished("r")
    released(rig)


def test_an_answer_that_is_read_and_then_not_wanted_is_released(rig: Rig) -> None:
    request = rig.request(1, TOKENS)
    rig.side.on_new_request(request)
    tracked = rig.side.requests.by_id["r"]

    def is_read() -> bool:
        rig.side.exchange_messages(0.0)
        return tracked.lookup.found is not None

    until(is_read, "it is read")
    assert rig.side.audits.current is not None
    rig.side.on_finished("r")
    released(rig)
