"""The daemon's decisions: sessions, leases, credits, refusals."""

import msgspec
import pytest

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, SlotRef, pack_slots, pack_u64
from hybridkv.core.policies import Advice
from hybridkv.daemon.sessions import Process
from hybridkv.shm.slots import slot_bytes
from hybridkv.tiers.record import record_of
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Advise,
    Clear,
    Commit,
    Computed,
    Computing,
    Describe,
    Done,
    Drained,
    Engines,
    Error,
    Explain,
    Explained,
    Forget,
    Free,
    Hello,
    Identify,
    IdentityDifference,
    ListEngines,
    ListObjects,
    Lookup,
    OtherIdentity,
    Pin,
    Prefetch,
    ReadAnnouncements,
    ReadPrefetches,
    ReadQuotas,
    Release,
    ReportAudit,
    ReportCorrupt,
    ReportIdentity,
    ReportMapping,
    ReportRequest,
    ReportStale,
    Request,
    RequestExplanation,
    Reserve,
    SetQuota,
    StartPrefetch,
    Stats,
    Subscribe,
    Welcome,
    WireEngine,
    WireGeometry,
    WireGroup,
    WireModel,
    geometry_to_wire,
)
from hybridkv.wire.protocol import RULES, ConnectionState
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS, make
from tests.unit.daemon.harness import (
    ARENA,
    commit,
    engine,
    engine_hello,
    grant,
    hashes,
    lookup,
    make_daemon,
)

QWEN3 = LAYOUTS["qwen3"]
GEMMA3 = LAYOUTS["gemma3"]
PART = QWEN3.groups[0].block_bytes
MINIMAL: dict[type[Request], Request] = {
    type(message): message
    for message in (
        Hello(1, PROTOCOL_VERSION, "control"),
        Drained(1),
        ReportMapping(True),
        Identify(1, b"n" * 32),
        Subscribe(),
        Describe(b"", b"", []),
        ReadAnnouncements(1, 1),
        Lookup(1, 1, b""),
        Release(1),
        Computing(1),
        Computed(1),
        Advise(Advice.RETAIN, b""),
        Prefetch(b""),
        StartPrefetch(1, "r"),
        ReadPrefetches(1, []),
        Reserve(1, PART, 1, 0),
        Commit(b"", b"", b""),
        Free(b""),
        ReportCorrupt(b""),
        ReportRequest("r", RequestExplanation(1, 0)),
        ReportIdentity({}),
        ReportAudit("r", AuditOutcome.PASSED),
        ReportStale(True),
        Explain(1, "r"),
        Stats(1),
        Clear(1),
        Pin(1),
        ListObjects(1, 0),
        ListEngines(1),
        Forget(1, 0),
        ReadQuotas(1),
        SetQuota(1, 0),
    )
}


def test_a_hit_needs_every_group_at_one_boundary() -> None:
    daemon = make_daemon()
    engine(daemon, 1, GEMMA3)
    size = GEMMA3.groups[0].block_bytes
    for group, numbers in ((0, [1, 2, 3]), (1, [1, 2, 3]), (2, [1, 2])):
        commit(daemon, 1, grant(daemon, 1, size, len(numbers)), group, numbers)
    assert lookup(daemon, 1, 1, *range(1, 4)).chunks == 2
    check_daemon(daemon)


def test_a_request_is_explained_also_by_what_is_stored_under_another_identity() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3, "a", b"x" * 32)
    engine(daemon, 2, QWEN3, "b", b"y" * 32)
    daemon.handle(1, ReportIdentity({"dtype": "bfloat16", "config": "c"}))
    daemon.handle(2, ReportIdentity({"dtype": "float32", "config": "c"}))
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    explanation = RequestExplanation(300, 0, first_chunk=hashes(1))
    daemon.handle(2, ReportRequest("cmpl-7-0-ab12", explanation))
    daemon.sessions.on_connect(3)
    daemon.handle(3, Hello(1, PROTOCOL_VERSION, "control"))
    explained = daemon.handle(3, Explain(5, "cmpl-7"))
    differs = IdentityDifference("dtype", here="float32", there="bfloat16")
    others = [OtherIdentity(b"x" * 32, [differs])]
    assert explained == Explained(5, ["cmpl-7-0-ab12"], b"y" * 32, explanation, others)
    unknown = daemon.handle(3, Explain(6, "cmp"))
    assert unknown == Explained(6, ["cmpl-7-0-ab12"])


def test_only_the_last_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.observe.history.REQUESTS_MAX", 3)
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    for number in (1, 2, 3, 1, 4):
        daemon.handle(1, ReportRequest(f"r{number}", RequestExplanation(1, number)))
    explained = daemon.handle(1, Explain(5, "r2"))
    assert explained == Explained(5, ["r4", "r1", "r3"])


def test_the_engines_that_are_connected_are_listed_with_what_they_said() -> None:
    daemon = make_daemon()
    geometry = geometry_to_wire(GEMMA3)
    model = WireModel(
        name="gemma",
        max_model_len=4096,
        kv_dtype="auto (bfloat16)",
        layers=[1, 1, 1],
        retention_tokens=0,
        step_tokens=2048,
    )
    daemon.sessions.on_connect(1)
    daemon.handle(1, msgspec.structs.replace(engine_hello(GEMMA3, "a", b"x" * 32), model=model))
    engine(daemon, 2, QWEN3, "b", b"y" * 32)
    daemon.sessions.on_connect(3)
    daemon.handle(3, Hello(1, PROTOCOL_VERSION, "control"))
    assert daemon.handle(3, ListEngines(5)) == Engines(
        5,
        [
            WireEngine("a", b"x" * 32, geometry, model),
            WireEngine("b", b"y" * 32, geometry_to_wire(QWEN3), None),
        ],
    )
    daemon.on_disconnect(1)
    listed = daemon.handle(3, ListEngines(6))
    assert [seen.engine_id for seen in listed.engines] == ["b"]  # type: ignore[union-attr]


def test_credits_are_bounded_and_objects_under_a_lease_stay() -> None:
    daemon = make_daemon(ARENA // 4)
    engine(daemon, 1, QWEN3)
    slots = grant(daemon, 1, PART, 1000)
    assert 0 < len(slots) * slot_bytes(PART, 1) <= ARENA // 16
    commit(daemon, 1, slots, 0, list(range(len(slots))))
    lookup(daemon, 1, 1, 0, 1)
    for number in range(100, 200):
        commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [number])
    assert daemon.view.metric_values().named()["evicted"] > 0
    assert lookup(daemon, 1, 2, 0, 1).chunks == 2
    check_daemon(daemon)


def test_what_a_failed_load_read_is_replaced_by_what_is_stored_next() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    commit(daemon, 1, grant(daemon, 1, PART, 2), 0, [1, 2])
    for lease, (tokens, failed, is_new) in enumerate(
        [(0, False, False), (256, False, False), (0, True, True)]
    ):
        found = lookup(daemon, 1, lease, 1, 2)
        daemon.handle(1, Release(lease, tokens, failed=failed))
        commit(daemon, 1, grant(daemon, 1, PART, 2), 0, [1, 2])
        again = lookup(daemon, 1, 100 + lease, 1, 2)
        daemon.handle(1, Release(100 + lease, 256))
        assert again.chunks == 2
        assert (again.slots != found.slots) == is_new
    check_daemon(daemon)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Hello(1, PROTOCOL_VERSION, "engine", "e"), "hello_twice"),
        (Lookup(1, 1, b"short"), "hashes"),
        (Reserve(1, 12345, 1, 1), "part_bytes"),
        (Free(b"123"), "packed"),
        (Free(pack_u64([1])), "packed"),
    ],
)
def test_refusals_have_a_code_and_change_nothing(request_: Request, code: str) -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    refused = daemon.handle(1, request_)
    assert isinstance(refused, Error)
    assert refused.code == code
    assert daemon.view.metric_values().named()[f"refused_{code}"] == 1
    check_daemon(daemon)


def test_what_living_engines_are_made_of_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may change the weights of one engine again and again beside another."""
    monkeypatch.setattr("hybridkv.observe.history.IDENTITIES_MAX", 2)
    daemon = make_daemon()
    engine(daemon, 1, QWEN3, "a", b"x" * 32)
    daemon.handle(1, ReportIdentity({"dtype": "float32"}))
    engine(daemon, 2, QWEN3, "b", b"y" * 32)
    for number in range(4):
        daemon.handle(2, Identify(9, bytes([number]) * 32))
        daemon.handle(2, ReportIdentity({"weights": f"{number}"}))
    assert daemon.history.differences(b"x" * 32, bytes([3]) * 32)
    assert not daemon.history.differences(b"x" * 32, bytes([0]) * 32)


def test_workers_are_bounded_by_those_that_the_next_daemon_knows_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next daemon would not know that a further worker may still write into slots."""
    monkeypatch.setattr("hybridkv.shm.trailer.PROCESSES_MAX", 2)
    daemon = make_daemon()
    hello = Hello(1, PROTOCOL_VERSION, "worker", "e")
    for number in (1, 2, 3):
        daemon.sessions.on_connect(number, Process(number, 7))
    assert [type(daemon.handle(number, hello)) for number in (1, 2)] == [Welcome, Welcome]
    refused = daemon.handle(3, hello)
    assert isinstance(refused, Error)
    assert refused.code == "sessions"
    daemon.on_disconnect(3)
    check_daemon(daemon)


def test_sessions_and_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.daemon.sessions.SESSIONS_MAX", 2)
    monkeypatch.setattr("hybridkv.daemon.handlers.LEASES_MAX", 2)
    daemon = make_daemon()
    assert isinstance(engine(daemon, 1, QWEN3, "a"), Welcome)
    assert isinstance(engine(daemon, 2, QWEN3, "b"), Welcome)
    refused = engine(daemon, 3, QWEN3, "c")
    assert isinstance(refused, Error)
    assert refused.code == "sessions"
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    assert [lookup(daemon, 1, lease, 1).chunks for lease in (1, 2)] == [1, 1]
    refused = daemon.handle(1, Lookup(5, 3, hashes(1)))
    assert isinstance(refused, Error)
    assert refused.code == "lease"
    daemon.on_disconnect(2)
    assert isinstance(daemon.handle(3, Hello(1, PROTOCOL_VERSION, "control")), Welcome)
    check_daemon(daemon)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(1, 99, "control"), "version"),
        (Hello(1, PROTOCOL_VERSION, "engine", "e"), "hello_incomplete"),
        (Stats(1), "hello_first"),
    ],
)
def test_greetings_that_are_refused(hello: Request, code: str) -> None:
    daemon = make_daemon()
    daemon.sessions.on_connect(1)
    refused = daemon.handle(1, hello)
    assert isinstance(refused, Error)
    assert refused.code == code


def test_a_control_connection_has_no_session() -> None:
    daemon = make_daemon()
    daemon.sessions.on_connect(1)
    assert isinstance(daemon.handle(1, Hello(1, PROTOCOL_VERSION, "control")), Welcome)
    refused = daemon.handle(1, Lookup(2, 1, hashes(1)))
    assert isinstance(refused, Error)
    assert refused.code == "role"


def test_what_an_engine_tells_of_a_request_cannot_break_the_explanation() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    for number, first in enumerate((b"no hash", hashes(2), b"")):
        daemon.handle(1, ReportRequest(f"r{number}", RequestExplanation(1, 0, first_chunk=first)))
        explained = daemon.handle(1, Explain(2, f"r{number}"))
        assert isinstance(explained, Explained), explained
        assert explained.explanation is not None
        assert not explained.others


def test_a_request_without_a_name_is_not_shown_in_place_of_another() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    daemon.handle(1, ReportRequest("", RequestExplanation(1, 3)))
    assert daemon.handle(1, Explain(2, "unknown")) == Explained(2, [""])


@pytest.mark.parametrize("first", [0, 4])
def test_what_all_objects_of_a_commit_have_in_common_is_said_once(first: int) -> None:
    """One group, one tenant, and the hash before the first stand for those of all objects."""
    groups, tenants = pack_u64([0]), pack_u64([9])
    names, before = hashes(5, 6, 7), hashes(first)
    known = []
    for parents, times in ((before, 1), (before + names[:-HASH_BYTES], 3)):
        daemon = make_daemon()
        engine(daemon, 1, QWEN3)
        refs = grant(daemon, 1, PART, 3)
        packed = pack_slots(refs)
        request = Commit(
            slots=packed,
            groups=groups * times,
            hashes=names,
            parents=parents,
            classes=b"\0\1\0",
            tenants=tenants * times,
        )
        assert daemon.handle(1, request) is None
        slots = [daemon.store.slot_at(ref.offset, ref.generation) for ref in refs]
        known.append([record_of(slot) for slot in slots if slot is not None])
        empty = Commit(b"", groups, b"", parents=before, tenants=tenants)
        assert daemon.handle(1, empty) is None
        check_daemon(daemon)
    assert known[0] == known[1]
    assert [record.tenant for record in known[0]] == [9] * 3
    assert len({record.parent for record in known[0]}) == 3


def test_columns_of_a_commit_have_one_item_or_one_for_each() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    packed = pack_slots(grant(daemon, 1, PART, 3))
    names = hashes(1, 2, 3)
    right = Commit(packed, pack_u64([0]), names)
    for change in (
        {"groups": pack_u64([0, 0])},
        {"groups": b""},
        {"parents": names[: 2 * HASH_BYTES]},
        {"parents": names + b"\0"},
        {"classes": b"\0"},
        {"tenants": pack_u64([1, 2])},
    ):
        wrong = msgspec.structs.replace(right, **change)
        refused = daemon.handle(1, wrong)
        assert isinstance(refused, Error), wrong
        assert refused.code == "commit"
    assert daemon.view.metric_values().named()["objects"] == 0
    check_daemon(daemon)


def test_a_geometry_without_end_is_refused_at_once() -> None:
    """A window that shares no factor with the chunk repeats after a billion chunks."""
    daemon = make_daemon()
    group = WireGroup(
        gid=0,
        kind=GroupKind.CHUNKED_LOCAL,
        tokens_per_block=1,
        block_bytes=8,
        window_tokens=(1 << 30) - 1,
        extra_retained_tokens=0,
        replicated=False,
    )
    geometry = WireGeometry([group], 128, 1, 1, ranks=1, stages=1)
    hello = engine_hello(QWEN3, "e", b"n" * 32)
    daemon.sessions.on_connect(1)
    refused = daemon.handle(1, msgspec.structs.replace(hello, geometry=geometry))
    assert isinstance(refused, Error)
    assert refused.code == "geometry"


def test_a_hit_names_no_more_slots_than_fit_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is stored: a client would take a longer answer for nonsense."""
    monkeypatch.setattr("hybridkv.daemon.handlers.BATCH_MAX", 20)
    geometry = make(16, 16, *[(GroupKind.FULL, 16, 0)] * 3, chunk=16)
    daemon = make_daemon()
    engine(daemon, 1, geometry)
    for group in range(3):
        commit(
            daemon, 1, grant(daemon, 1, geometry.groups[0].block_bytes, 10), group, list(range(10))
        )
    found = lookup(daemon, 1, 1, *range(10))
    assert found.chunks == 6
    assert found.masks == [b"\1" * 6] * 3
    assert len(found.slots) // SLOT_BYTES == 18
    assert lookup(daemon, 1, 2, *range(4)).chunks == 4


@pytest.mark.parametrize("state", ConnectionState)
@pytest.mark.parametrize("message", RULES, ids=lambda message: message.__name__)
def test_who_may_say_what(state: ConnectionState, message: type[Request]) -> None:
    """Exactly the messages of the table are taken in each state, and answered as it says."""
    daemon = make_daemon()
    if state is ConnectionState.ENGINE:
        engine(daemon, 1, QWEN3)
    else:
        daemon.sessions.on_connect(1)
    if state not in (ConnectionState.NEW, ConnectionState.ENGINE):
        daemon.handle(1, Hello(1, PROTOCOL_VERSION, state))
    reply = daemon.handle(1, MINIMAL[message])
    if state in RULES[message].states:
        assert (None if reply is None else type(reply)) is RULES[message].reply
    else:
        assert isinstance(reply, Error)
        expected = (
            "hello_first"
            if state is ConnectionState.NEW
            else "hello_twice"
            if message is Hello
            else "role"
        )
        assert reply.code == expected
    check_daemon(daemon)


def test_a_condemned_object_is_a_miss() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    slots = grant(daemon, 1, PART, 2)
    commit(daemon, 1, slots, 0, [1, 2])
    packed = pack_slots([slots[1]])
    daemon.handle(1, ReportCorrupt(pack_slots([SlotRef(slots[1].offset, slots[1].generation + 1)])))
    assert lookup(daemon, 1, 1, 1, 2).chunks == 2, "another generation is another object"
    daemon.handle(1, ReportCorrupt(packed))
    assert lookup(daemon, 1, 2, 1, 2).chunks == 1
    check_daemon(daemon)


def test_unused_slots_can_be_given_back() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    slots = grant(daemon, 1, PART, 2)
    packed = pack_slots(slots)
    daemon.handle(1, Free(packed))
    assert daemon.view.metric_values().named()["bytes_writing"] == 0
    commit(daemon, 1, slots, 0, [1, 2])
    assert daemon.view.metric_values().named()["commits_unknown"] == 2
    check_daemon(daemon)


def test_a_lease_number_is_used_once() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    lookup(daemon, 1, 1, 1)
    refused = daemon.handle(1, Lookup(5, 1, hashes(1)))
    assert isinstance(refused, Error)
    assert refused.code == "lease"


def test_identities_are_apart_and_sessions_of_one_identity_share() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3, "a", b"x" * 32)
    engine(daemon, 2, QWEN3, "b", b"x" * 32)
    engine(daemon, 3, QWEN3, "c", b"y" * 32)
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    assert lookup(daemon, 2, 1, 1).chunks == 1
    assert lookup(daemon, 3, 1, 1).chunks == 0
    refused = engine(daemon, 4, GEMMA3, "d", b"x" * 32)
    assert isinstance(refused, Error)
    assert refused.code == "identity"


def test_another_identity_from_now_on() -> None:
    """After a weight update nothing older is found, and what is stored then is apart from it."""
    daemon = make_daemon()
    engine(daemon, 1, QWEN3, "a", b"x" * 32)
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [1])
    assert daemon.handle(1, Identify(4, b"y" * 32)) == Done(4, 0)
    assert lookup(daemon, 1, 1, 1).chunks == 0
    commit(daemon, 1, grant(daemon, 1, PART, 1), 0, [2])
    engine(daemon, 2, QWEN3, "b", b"x" * 32)
    assert [lookup(daemon, 2, number, number).chunks for number in (1, 2)] == [1, 0]
    check_daemon(daemon)


def test_a_refused_commit_stores_nothing() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    slots = grant(daemon, 1, PART, 3)
    packed = pack_slots(slots)
    refused = daemon.handle(1, Commit(packed, pack_u64([1, 0, 0]), hashes(1, 2, 3)))
    assert isinstance(refused, Error)
    assert refused.code == "commit"
    assert daemon.view.metric_values().named()["objects"] == 0
    assert commit(daemon, 1, slots, 0, [1, 2, 3]) is None
    assert lookup(daemon, 1, 1, *range(1, 4)).chunks == 3
    check_daemon(daemon)
