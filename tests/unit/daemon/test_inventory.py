"""Pages of what RAM and tiers hold: whole, bounded, and never in the loop's way."""

import pytest

from hybridkv.core.coverage import part_bytes
from hybridkv.core.geometry import GroupKind
from hybridkv.core.packed import pack_slots, pack_u64
from hybridkv.core.selection import HeldObject
from hybridkv.daemon import inventory
from hybridkv.tiers import jobs
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.jobs import JobKind
from hybridkv.tiers.record import record_key
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import Commit, ListObjects, ObjectPage
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import command, engine, grant, hashes, refusal_of
from tests.unit.daemon.tier_node import FULL, Node

COMMAND = 50
SIM = "sim://0"


def control(node: Node, connection: int = COMMAND) -> None:
    command(node.daemon, connection)


def page_of(node: Node, place: int, cursor: int, connection: int = COMMAND) -> ObjectPage:
    page = node.daemon.handle(connection, ListObjects(2, place, cursor), node.now)
    assert isinstance(page, ObjectPage), page
    return page


def list_all(node: Node, place: int) -> list[HeldObject]:
    """All pages of a place, while the tier's threads work."""
    held: list[HeldObject] = []
    cursor: int | None = 0
    while cursor is not None:
        page = page_of(node, place, cursor)
        assert not page.error
        assert len(page.objects) <= wire.CHANGES_MAX
        held += page.objects
        cursor = page.cursor
        node.work()
    return held


def store(node: Node, number: int, parent: int = 0, tenant: int = 0) -> bytes:
    """Store one object of full attention. Returns its key."""
    index, group = next(
        (at, group) for at, group in enumerate(FULL.groups) if group.kind is GroupKind.FULL
    )
    size, parts = part_bytes(FULL, group, 0), FULL.parts(group)
    (slot,) = grant(node.daemon, 1, size, 1, parts)
    node.fill(slot, size, parts, number)
    node.daemon.handle(
        1,
        Commit(
            slots=pack_slots([slot]),
            groups=pack_u64([index]),
            hashes=hashes(number),
            parents=hashes(parent) if parent else b"",
            tenants=pack_u64([tenant]),
        ),
        node.now,
    )
    return record_key(b"n" * 32, group.gid, hashes(number))


@pytest.fixture
def node() -> Node:
    node = Node(SIM, make=lambda spec: DictTier({}, is_remote=True))
    engine(node.daemon, 1, FULL)
    control(node)
    return node


def test_ram_and_a_tier_tell_the_same_of_their_objects(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CHANGES_MAX", 2)
    monkeypatch.setattr(jobs, "LIST_KEYS", 2)
    monkeypatch.setattr(inventory, "SCAN_BYTES", 3 * 4096)
    node.tick(10)
    keys = [store(node, 1, tenant=(1 << 64) - 1), *(store(node, at, at - 1) for at in (2, 3, 4, 5))]
    node.tick(5)
    ram = list_all(node, 0)
    assert [held.key for held in ram] == keys, "each once, however short the pages are"
    parents = [0, *(int.from_bytes(hashes(at)[:8], "little") for at in (1, 2, 3, 4))]
    assert [held.parent for held in ram] == parents
    assert [held.tenant for held in ram] == [(1 << 64) - 1, 0, 0, 0, 0]
    assert {held.written_seconds for held in ram} == {held.used_seconds for held in ram} == {5.0}
    node.work()
    below = {held.key: held for held in list_all(node, 1)}
    for held in ram:
        assert below[held.key] == held._replace(written_seconds=None, used_seconds=None)
    node.tick(7)
    node.ask(1, lease=3, wait_ms=0)
    node.tick(1)
    ages = [held.used_seconds for held in list_all(node, 0)]
    assert (ages[0], ages[4]) == (13.0, 13.0), "what is asked for and not hit is not used"


def test_a_hit_is_a_use(node: Node) -> None:
    node.store(FULL, [1])
    store(node, 1)
    node.tick(9)
    assert isinstance(node.ask(1, lease=3, wait_ms=0), wire.Found)
    node.tick(2)
    assert {held.used_seconds for held in list_all(node, 0)} == {2.0}


def test_what_cannot_be_read_is_unknown_and_not_absent(node: Node) -> None:
    tier = node.daemon.tiers[0].tier
    assert isinstance(tier, DictTier)
    key = store(node, 1, tenant=3)
    node.tick()
    node.work()
    tier.records[key] = bytes(4096)
    assert list_all(node, 1) == [HeldObject(key, 4096, None, None, None, None)]
    page_of(node, 1, 0)
    tier.ill = TierError
    node.work()
    page = page_of(node, 1, 1)
    assert (page.objects, page.cursor) == ([], None)
    assert page.error == "Input/output error"


def test_the_loop_hands_out_what_a_thread_has_read(node: Node) -> None:
    store(node, 1)
    node.tick()
    node.work()
    control(node, COMMAND + 1)
    assert page_of(node, 1, 0).cursor == 1
    assert page_of(node, 1, 0, COMMAND + 1).cursor == 1, "one thread lists for everybody, in turn"
    assert [job.kind for job in node.jobs] == [JobKind.LIST]
    assert page_of(node, 1, 1) == ObjectPage(2, [], 1)
    node.work()
    assert page_of(node, 1, 1).cursor == 2
    node.daemon.on_disconnect(COMMAND)
    node.work()
    assert page_of(node, 1, 1, COMMAND + 1).objects == []
    node.work()
    assert len(page_of(node, 1, 1, COMMAND + 1).objects) == 1


@pytest.mark.parametrize(("place", "cursor"), [(2, 0), (1, 5), (1 << 40, 0)])
def test_a_place_that_is_not_there_is_refused(node: Node, place: int, cursor: int) -> None:
    assert (
        refusal_of(node.daemon.handle(COMMAND, ListObjects(2, place, cursor), node.now)) == "place"
    )


def test_only_commands_may_list(node: Node) -> None:
    assert refusal_of(node.daemon.handle(1, ListObjects(2, 0), node.now)) == "role"
