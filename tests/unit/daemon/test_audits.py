"""The offers of the daemon to a live audit: stored objects of a chunk that the engine computes."""

import dataclasses

import pytest

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import SlotRef, unpack_slots
from hybridkv.daemon.handlers import Daemon
from hybridkv.wire.messages import (
    AuditOffer,
    Error,
    Explain,
    Explained,
    Found,
    Identify,
    Lookup,
    Release,
    ReportAudit,
    ReportCorrupt,
    ReportRequest,
    RequestExplanation,
)
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_daemon

HYBRID = LAYOUTS["qwen3next"]
STATES, FULL = (0, 1), 2


def daemon_of(geometry: Geometry) -> Daemon:
    daemon = make_daemon()
    engine(daemon, 1, geometry)
    return daemon


def store(daemon: Daemon, geometry: Geometry, number: int, *groups: int) -> list[SlotRef]:
    """Store the objects of these groups of a chunk. Returns their slots."""
    slots: list[SlotRef] = []
    for index in groups:
        granted = grant(daemon, 1, geometry.groups[index].block_bytes, 1)
        commit(daemon, 1, granted, index, [number])
        slots += granted
    return slots


def asked(daemon: Daemon, *numbers: int, audit_lease: int = 2, lease: int = 1) -> Found:
    found = daemon.handle(1, Lookup(5, lease, hashes(*numbers), audit_lease=audit_lease))
    assert isinstance(found, Found), found
    return found


def offered(found: Found) -> AuditOffer:
    assert found.audit is not None, "nothing is offered"
    return found.audit


def leases(daemon: Daemon) -> float:
    return daemon.view.metric_values().of("leases")


def test_the_last_chunk_of_a_hit_is_offered_with_the_hit_before_it() -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    slots = [slot for number in range(3) for slot in store(daemon, geometry, number, 0)]
    found = asked(daemon, 0, 1, 2, 3)
    offer = offered(found)
    assert (found.chunks, offer.chunk, offer.lease) == (3, 2, 2)
    assert [*unpack_slots(found.slots)] == slots
    assert [*unpack_slots(offer.shorter_slots)] == slots[:2]
    assert [*unpack_slots(offer.slots)] == slots[2:]
    check_daemon(daemon)


def test_a_hit_of_one_chunk_is_audited_too() -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    slots = store(daemon, geometry, 0, 0)
    offer = offered(asked(daemon, 0))
    assert offer.chunk == 0
    assert not offer.shorter_slots
    assert [*unpack_slots(offer.slots)] == slots


def test_states_of_both_boundaries_are_needed_for_the_last_chunk() -> None:
    """The shorter hit has the state before the chunk, and the state after it is compared."""
    daemon = daemon_of(HYBRID)
    first = store(daemon, HYBRID, 0, *STATES, FULL)
    second = store(daemon, HYBRID, 1, *STATES, FULL)
    offer = offered(asked(daemon, 0, 1))
    assert offer.chunk == 1
    assert [*unpack_slots(offer.shorter_slots)] == first
    assert [*unpack_slots(offer.slots)] == second


def test_without_a_state_before_it_nothing_of_the_hit_is_given_up() -> None:
    """The chunk after the hit is computed anyway, and its stored objects are compared."""
    daemon = daemon_of(HYBRID)
    store(daemon, HYBRID, 0, FULL)
    store(daemon, HYBRID, 1, *STATES, FULL)
    after = store(daemon, HYBRID, 2, FULL)
    found = asked(daemon, 0, 1, 2)
    offer = offered(found)
    assert (found.chunks, offer.chunk) == (2, 2)
    assert not offer.shorter_slots
    assert [*unpack_slots(offer.slots)] == [(0, 0), (0, 0), *after]


def test_a_miss_is_audited_by_what_is_there_of_its_first_chunk() -> None:
    daemon = daemon_of(HYBRID)
    there = store(daemon, HYBRID, 0, FULL)
    found = asked(daemon, 0, 1)
    assert not found.chunks
    assert [*unpack_slots(offered(found).slots)][FULL] == there[0]
    assert leases(daemon) == 1
    daemon.handle(1, Release(2))
    assert not leases(daemon)
    check_daemon(daemon)


@pytest.mark.parametrize("audit_lease", [0, 2])
def test_nothing_is_offered_where_nothing_is_stored_or_nobody_asked(audit_lease: int) -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    assert asked(daemon, 7, audit_lease=audit_lease).audit is None
    store(daemon, geometry, 0, 0)
    assert (asked(daemon, 0, audit_lease=audit_lease).audit is None) == (not audit_lease)


def test_both_leases_keep_their_slots_until_each_ends() -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    for number in range(2):
        store(daemon, geometry, number, 0)
    offer = offered(asked(daemon, 0, 1))
    assert leases(daemon) == 2
    daemon.handle(1, Release(1))
    # The object is gone for everybody, and its bytes stay for the audit.
    before = daemon.store.committed_bytes
    daemon.handle(1, ReportCorrupt(offer.slots))
    assert daemon.store.committed_bytes == before
    assert asked(daemon, 0, 1, audit_lease=0, lease=3).chunks == 1
    daemon.handle(1, Release(2))
    assert daemon.store.committed_bytes < before
    daemon.handle(1, Release(3))
    assert not leases(daemon)
    check_daemon(daemon)


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1), (3, 2)])
def test_the_number_of_an_audits_lease_is_used_once(numbers: tuple[int, int]) -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    store(daemon, geometry, 0, 0)
    lease, audit_lease = numbers
    if lease != audit_lease:
        asked(daemon, 0)
    refused = daemon.handle(1, Lookup(5, lease, hashes(0), audit_lease=audit_lease))
    assert isinstance(refused, Error)
    assert refused.code == "lease"


def test_no_more_leases_are_opened_than_a_session_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.daemon.handlers.LEASES_MAX", 1)
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    store(daemon, geometry, 0, 0)
    assert asked(daemon, 0).audit is None
    assert leases(daemon) == 1


def test_a_hit_inside_a_block_is_not_audited() -> None:
    fine = dataclasses.replace(HYBRID, hash_tokens=64, alignment_tokens=64)
    daemon = daemon_of(fine)
    store(daemon, fine, 0, *STATES, FULL)
    store(daemon, fine, 103, *STATES, FULL)
    tails = hashes(*range(100, 106))
    found = daemon.handle(1, Lookup(5, 1, hashes(0, 1), tails=tails, audit_lease=2))
    assert isinstance(found, Found)
    assert (found.depth, found.tail, found.audit) == (2, 4, None)


def test_an_engine_with_other_weights_by_now_is_offered_nothing() -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    store(daemon, geometry, 0, 0)
    daemon.handle(1, Identify(3, b"o" * 32))
    assert asked(daemon, 0).audit is None


def test_what_came_of_an_audit_is_counted_and_explained() -> None:
    """It ends after its request, or before."""
    daemon = daemon_of(LAYOUTS["qwen3"])
    daemon.handle(1, ReportRequest("r", RequestExplanation(600, 2)))
    daemon.handle(1, ReportAudit("r", AuditOutcome.DIFFERED, "layer x differs by 2"))
    daemon.handle(1, ReportAudit("not known", AuditOutcome.PASSED))
    values = daemon.view.metric_values()
    outcomes = ("passed", "differed", "unmade")
    assert [values.of(f"audits_{outcome}") for outcome in outcomes] == [1, 1, 0]
    explained = daemon.handle(1, Explain(4, "r"))
    assert isinstance(explained, Explained)
    assert explained.explanation is not None
    assert explained.explanation.audit is AuditOutcome.DIFFERED
    assert explained.explanation.audit_detail == "layer x differs by 2"
