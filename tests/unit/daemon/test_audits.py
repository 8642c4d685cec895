"""The offers of the daemon to a live audit: stored objects of a chunk that the engine computes."""

import pytest

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import SlotRef, unpack_slots
from hybridkv.daemon.handlers import Daemon
from hybridkv.wire.messages import (
    AuditOffer,
    Explain,
    Explained,
    Found,
    Identify,
    Lookup,
    Release,
    ReportAudit,
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


def test_an_engine_with_other_weights_by_now_is_offered_nothing() -> None:
    geometry = LAYOUTS["qwen3"]
    daemon = daemon_of(geometry)
    store(daemon, geometry, 0, 0)
    daemon.handle(1, Identify(3, b"o" * 32))
    assert asked(daemon, 0).audit is None
