"""Which objects a command is about, and to which family a chunk belongs."""

import pytest

from hybridkv.core.selection import Families, HeldObject, Selection


def held(
    chunk: int,
    parent: int | None = 0,
    *,
    gid: int = 0,
    tenant: int | None = 7,
    written: float | None = 100.0,
    used: float | None = 50.0,
) -> HeldObject:
    key = b"\xab" * 32 + chunk.to_bytes(32, "little") + gid.to_bytes(2, "big")
    return HeldObject(key, 4096, tenant, parent, written, used)


def family(chunk: int) -> str:
    return chunk.to_bytes(8, "little").hex()


def nobody(_: HeldObject) -> None:
    raise AssertionError("nobody asked for families")


@pytest.mark.parametrize(
    ("selection", "wanted", "is_selected"),
    [
        (Selection(tenant=7), held(1), True),
        (Selection(tenant=8), held(1), False),
        (Selection(tenant=7), held(1, tenant=None), None),
        (Selection(tenant=7, identity="ac"), held(1, tenant=None), False),
        (Selection(identity="abab"), held(1), True),
        (Selection(identity="a"), held(1), True),
        (Selection(unused_seconds=50), held(1), True),
        (Selection(unused_seconds=51), held(1), False),
        (Selection(unused_seconds=50), held(1, used=None), None),
        (Selection(unused_seconds=101), held(1, used=None), False),
        (Selection(unused_seconds=1), held(1, written=None, used=None), None),
        (Selection(tenant=8, unused_seconds=1), held(1, written=None, used=None), False),
        (Selection(), held(1, tenant=None), True),
    ],
)
def test_what_is_unknown_decides_nothing(
    selection: Selection, wanted: HeldObject, is_selected: bool | None
) -> None:
    assert selection.selects(wanted, nobody) is is_selected


def test_a_family_is_all_that_begins_with_one_chunk() -> None:
    families = Families()
    rows = [held(1), held(2, 1), held(3, 2), held(4, 1), held(5), held(9, 8)]
    for row in reversed(rows):  # The order does not matter.
        families.learn_from(row, is_exact=True)
    names = [families.family_of(row) for row in rows]
    assert names == [family(1)] * 4 + [family(5), None], "the chunk before 9 is held nowhere"
    wanted = Selection(family=family(1)[:3])
    answers = [wanted.selects(row, families.family_of) for row in rows]
    assert answers == [True] * 4 + [False, None]
    other = held(1)._replace(key=b"\xac" * 32 + held(1).key[32:])
    assert families.family_of(other) is None, "identities have families of their own"


def test_a_window_in_a_tier_does_not_say_that_it_is_first() -> None:
    families = Families()
    window, full, first = held(2, 0, gid=1), held(2, 1), held(1, 0)
    for row in (window, first):
        families.learn_from(row, is_exact=False)
    assert families.family_of(window) is families.family_of(first) is None
    families.learn_from(full, is_exact=False)
    assert families.family_of(first) == family(1), "objects of its group name the chunk before"
    assert families.family_of(window) == family(1), "another object of its chunk names it"


def test_ram_knows_of_windows_what_tiers_do_not() -> None:
    families = Families()
    families.learn_from(held(2, 1, gid=1), is_exact=True)
    families.learn_from(held(2, 0, gid=1), is_exact=False)
    families.learn_from(held(3, 0, gid=1), is_exact=False)
    families.learn_from(held(1, 0), is_exact=True)
    names = [families.family_of(held(chunk, 0, gid=1)) for chunk in (2, 3)]
    assert names == [family(1), None]


def test_a_circle_of_names_ends() -> None:
    families = Families()
    rows = [held(1, 2), held(2, 1)]
    for row in rows:
        families.learn_from(row, is_exact=True)
    assert [families.family_of(row) for row in rows] == [None, None]
