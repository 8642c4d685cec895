"""Advice about chunks: retained for a time within a share, let go first, demoted."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from hybridkv.core.packed import pack_slots, pack_u64
from hybridkv.core.policies import Advice
from hybridkv.daemon import advice, pins
from hybridkv.daemon.handlers import Daemon
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import (
    RETENTION_MS_MAX,
    Advise,
    Commit,
    Error,
    Lookup,
    Pin,
    Pinned,
    Release,
    ReportRequest,
    RequestExplanation,
    RetainedBytes,
    WirePin,
)
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import command, engine, grant, hashes, make_daemon

QWEN3 = LAYOUTS["qwen3"]
PART = QWEN3.groups[0].block_bytes
SLOT = slot_bytes(PART, 1)
SECOND = 1000


def names(*numbers: int) -> bytes:
    """Names of chunks. None is that of no chunk."""
    return hashes(*(number + 1 for number in numbers))


def daemon_of(slots: int) -> Daemon:
    """A daemon with RAM for so many objects, and an engine."""
    daemon = make_daemon(slots * SLOT)
    engine(daemon, 1, QWEN3)
    return daemon


def store(daemon: Daemon, chain: Sequence[int], known: int = 0, tenant: int = 0) -> None:
    """Store a prompt, chunk after chunk, from the chunk `known` on."""
    for at in range(known, len(chain)):
        parent = names(chain[at - 1]) if at else bytes(32)
        for slot in grant(daemon, 1, PART, 1):
            daemon.handle(
                1,
                Commit(
                    slots=pack_slots([slot]),
                    groups=pack_u64([0]),
                    hashes=names(chain[at]),
                    parents=parent,
                    tenants=pack_u64([tenant]),
                ),
            )


def advise(daemon: Daemon, wish: Advice, chain: Sequence[int], ttl_ms: int = 0) -> None:
    assert daemon.handle(1, Advise(wish, names(*chain), 0, ttl_ms), daemon.now) is None
    daemon.tick(daemon.now)


def kept(daemon: Daemon, chain: Sequence[int]) -> int:
    """Returns how many chunks of a prompt RAM has, and uses none of them."""
    found = daemon.handle(1, Lookup(5, 999, names(*chain), is_scan=True))
    daemon.handle(1, Release(999))
    return found.chunks  # type: ignore[union-attr]


def scan(daemon: Daemon, prompts: int = 40) -> None:
    for number in range(prompts):
        store(daemon, range(100 + 3 * number, 103 + 3 * number))


@pytest.mark.parametrize("comes_first", ["objects", "advice"])
def test_a_retained_prompt_survives_a_scan_until_its_time_and_not_longer(comes_first: str) -> None:
    daemon = daemon_of(24)
    if comes_first == "objects":
        store(daemon, range(5))
    advise(daemon, Advice.RETAIN, range(5), 60 * SECOND)
    if comes_first == "advice":
        store(daemon, range(5))
    scan(daemon)
    assert kept(daemon, range(5)) == 5
    assert daemon.advice.wakes_at() == 60.0
    daemon.tick(59.9)
    assert daemon.store.queue.retained_bytes == 5 * SLOT
    daemon.tick(60.0)
    assert daemon.store.queue.retained_bytes == 0
    scan(daemon)
    assert kept(daemon, range(5)) == 0
    assert daemon.advice.wakes_at() == math.inf
    check_daemon(daemon)


def test_of_a_prompt_beyond_the_share_the_beginning_is_retained() -> None:
    """A quarter of 24 objects is a tenant's."""
    daemon = daemon_of(24)
    store(daemon, range(10))
    advise(daemon, Advice.RETAIN, range(10), 60 * SECOND)
    scan(daemon)
    assert kept(daemon, range(10)) == 6
    assert daemon.store.retention.refused == {"tenant": 1, "prefix": 3}
    check_daemon(daemon)


@pytest.mark.parametrize("is_scan", [False, True])
def test_a_hit_of_a_scan_is_no_use(is_scan: bool) -> None:
    daemon = daemon_of(8)
    store(daemon, [0, 1])
    daemon.handle(1, Lookup(5, 1, names(0, 1), is_scan=is_scan))
    daemon.handle(1, Release(1))
    scan(daemon, 4)
    assert kept(daemon, [0, 1]) == (0 if is_scan else 2)


def test_advice_is_bounded_and_done_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "WAITING_MAX", 8)
    monkeypatch.setattr(advice, "STEPS_MAX", 2)
    daemon = daemon_of(24)
    store(daemon, range(5))
    for _ in range(2):
        daemon.handle(1, Advise(Advice.RETAIN, names(*range(5)), 0, RETENTION_MS_MAX + 1))
    assert daemon.store.retention.refused == {"waiting": 5}
    assert daemon.store.retention.shortened == 5
    for turn in range(1, 4):
        daemon.tick(0.0)
        assert daemon.store.queue.retained_bytes == min(5, 2 * turn) * SLOT
    daemon.tick(0.0)
    assert daemon.advice.wakes_at() == RETENTION_MS_MAX / 1e3
    for turn in range(1, 4):
        daemon.tick(RETENTION_MS_MAX / 1e3)
        assert daemon.store.queue.retained_bytes == max(0, 5 - 2 * turn) * SLOT
    assert isinstance(daemon.handle(1, Advise(Advice.RETAIN, b"x")), Error)


def test_what_another_prompt_goes_on_from_is_not_let_go() -> None:
    daemon = daemon_of(24)
    store(daemon, [0, 1, 2, 3])
    store(daemon, [0, 1, 7, 8], known=2)
    for number in range(2):
        daemon.handle(1, Lookup(5, number, names(0, 1, 2, 3)))
        daemon.handle(1, Release(number))
    advise(daemon, Advice.RETAIN, range(4), 60 * SECOND)
    advise(daemon, Advice.RELEASE, range(4))
    daemon.tick(daemon.now)
    assert daemon.store.queue.retained_bytes == 2 * SLOT, "the other prompt's stay as they were"
    check_daemon(daemon)
    store(daemon, range(100, 100 + 24 - 6 + 2))
    assert kept(daemon, [0, 1, 2, 3]) == 2
    assert kept(daemon, [0, 1, 7, 8]) == 4


def pin(daemon: Daemon, **named: Any) -> Pinned | Error:
    """Pin or unpin, and return the answer after the work is done."""
    reply = daemon.handle(2, Pin(1, **named), daemon.now)
    while isinstance(reply, Pinned) and reply.is_busy:
        daemon.tick(daemon.now)
        reply = daemon.handle(2, Pin(1), daemon.now)
    assert isinstance(reply, Pinned | Error)
    return reply


def operated(slots: int) -> Daemon:
    """A daemon of an engine and a command."""
    daemon = daemon_of(slots)
    command(daemon, 2)
    return daemon


def test_a_request_is_pinned_by_its_prompt() -> None:
    daemon = operated(24)
    store(daemon, range(5))
    explanation = RequestExplanation(900, 5, last_chunk=names(3))
    daemon.handle(1, ReportRequest("cmpl-1-0", explanation))
    assert isinstance(pin(daemon, ttl_ms=SECOND, request_id="cmpl-2"), Error)
    pinned = pin(daemon, ttl_ms=60 * SECOND, request_id="cmpl-1")
    assert pinned == Pinned(
        id=1,
        pins=[WirePin("cmpl-1", "", None, 60 * SECOND, chunks=4, kept=4)],
        tenants=[RetainedBytes(0, 4 * SLOT, 6 * SLOT)],
        is_busy=False,
    )
    scan(daemon)
    assert kept(daemon, range(5)) == 4
    assert pin(daemon, request_id="cmpl-1") == Pinned(1, [], [], False)
    check_daemon(daemon)
    scan(daemon)
    assert kept(daemon, range(5)) == 0
    assert isinstance(pin(daemon, ttl_ms=SECOND, request_id="cmpl-1"), Error), "it is not there"


@pytest.mark.parametrize("steps", [1, 256])
def test_a_tenant_is_pinned_without_the_others(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "STEPS_MAX", steps)
    daemon = operated(48)
    for number, tenant in enumerate((7, 8, 7)):
        store(daemon, range(10 * number, 10 * number + 8), tenant=tenant)
    pinned = pin(daemon, ttl_ms=60 * SECOND, tenant=7)
    assert isinstance(pinned, Pinned)
    assert [(each.chunks, each.kept) for each in pinned.pins] == [(16, 12)], "a quarter of RAM"
    assert sum(daemon.store.retention.refused.values()) == 4, "each other chunk is tried once"
    identity = (b"n" * 32).hex()
    both = pin(daemon, ttl_ms=90 * SECOND, tenant=8, identity=identity[:9])
    assert isinstance(both, Pinned)
    assert [(each.chunks, each.kept) for each in both.pins] == [(16, 12), (8, 8)]
    assert isinstance(pin(daemon, ttl_ms=SECOND, identity="ab"), Error)
    daemon.tick(60.0)
    for _ in range(40):
        daemon.tick(60.0)
    assert daemon.store.queue.retained_bytes == 8 * SLOT
    listed = pin(daemon)
    assert isinstance(listed, Pinned)
    assert [(each.tenant, each.left_ms) for each in listed.pins] == [(8, 30 * SECOND)]
    check_daemon(daemon)


def test_with_quotas_of_users_nothing_is_pinned_by_a_salt() -> None:
    daemon = daemon_of(24)
    command(daemon, 2, tenant=5)
    assert isinstance(pin(daemon, ttl_ms=SECOND, tenant=7), Error)


def test_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 2)
    daemon = operated(24)
    for tenant in (1, 2, 1):
        assert isinstance(pin(daemon, ttl_ms=SECOND, tenant=tenant), Pinned)
    assert isinstance(pin(daemon, ttl_ms=SECOND, tenant=3), Error)
    daemon.tick(1.0)
    assert isinstance(pin(daemon, ttl_ms=SECOND, tenant=3), Pinned)
