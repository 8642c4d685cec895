"""A fault finds its place after a rename, a move or a new format, or says why it does not."""

from pathlib import Path

import pytest

from tests.mutations.anchors import NoMatch
from tests.mutations.matching import mutated

SOURCE = '''
"""A module."""

LIMITS = {"a": 1, "b": 2}
STEPS = {
    "a": 3,  # not LIMITS
}


class Room:
    """A class."""

    @property
    def free(self) -> int:
        """Free places."""
        if self.seats > self.taken:
            return self.seats - self.taken  # a comment
        return 0

    def take(self, count: int, name: str) -> bool:
        for _ in range(count):
            if self.free:
                self.taken += 1
        return self.book(
            name,
            count,
        )


def largest(rooms, least):
    def inside(room):
        return room.seats >= least

    return max(rooms)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "hotel").mkdir()
    (tmp_path / "hotel" / "rooms.py").write_text(SOURCE)
    (tmp_path / "hotel" / "halls.py").write_text("def largest(halls):\n    return max(halls)\n")
    (tmp_path / "hotel" / "page.js").write_text("let rooms = 1; // rooms\n")
    return tmp_path


def changed(package: Path, anchor: str, old: str, new: str) -> tuple[str, str]:
    """The line that went and the lines that came."""
    path, text = mutated(package, anchor, old, new)
    was, is_now = (package / path).read_text().split("\n"), text.split("\n")
    while was and is_now and was[0] == is_now[0]:
        del was[0], is_now[0]
    while was and is_now and was[-1] == is_now[-1]:
        del was[-1], is_now[-1]
    return "\n".join(was), "\n".join(is_now)


@pytest.mark.parametrize(
    ("anchor", "old", "new", "line"),
    [
        ("Room.free", "return 0", "return 1", "        return 1"),
        ("Room", "class Room:", "class Room(dict):", "class Room(dict):"),
        ("STEPS", '"a": 3', '"a": 4', '    "a": 4,  # not LIMITS'),
        ("rooms:", '"b": 2', '"b": 3', 'LIMITS = {"a": 1, "b": 3}'),
        ("largest.inside", ">=", ">", "        return room.seats > least"),
        ("halls:largest", "max(halls)", "min(halls)", "    return min(halls)"),
        ("hotel.halls:largest", "max", "min", "    return min(halls)"),
        ("hotel/page.js", "let rooms", "let halls", "let halls = 1; // rooms"),
    ],
)
def test_exact_text_is_found_within_its_anchor(
    package: Path, anchor: str, old: str, new: str, line: str
) -> None:
    assert changed(package, anchor, old, new)[1] == line


@pytest.mark.parametrize(
    "old",
    [
        "return self.book(name, count)",
        "return self.book(\n    name, count\n)",
        "return (self.book(name, count,))",
        "return self . book(name,  # who\n  count)",
    ],
)
def test_layout_does_not_count(package: Path, old: str) -> None:
    assert changed(package, "Room.take", old, "return False")[1] == "        return False"


def test_parentheses_that_group_go_as_a_whole(package: Path) -> None:
    file = package / "hotel" / "halls.py"
    file.write_text("def wide(a, b):\n    return (\n        a\n        and (b or a)\n    )\n")
    assert changed(package, "wide", "return a and (b or a)", "return b")[1] == "    return b"
    assert (
        "return (\n        a\n        or b\n    )"
        in mutated(package, "wide", "and (b or a)", "or b")[1]
    )
    with pytest.raises(NoMatch, match="fits 0 places"):
        mutated(package, "wide", "return a", "return b")


def test_identifiers_may_have_other_names(package: Path) -> None:
    old, new = "if self.a > self.b: return self.a - self.b", "if self.b:\n    return wide(self.a)"
    lines = "        if self.taken:\n            return wide(self.seats)  # a comment"
    assert changed(package, "Room.free", old, new)[1] == lines


def test_the_exact_names_come_first(package: Path) -> None:
    (package / "hotel" / "halls.py").write_text("def both(a, b):\n    a += 1\n    b += 1\n")
    assert changed(package, "both", "b += 1", "b += 2")[1] == "    b += 2"
    with pytest.raises(NoMatch, match=r"'c \+= 1' fits 2 places in 'both'"):
        mutated(package, "both", "c += 1", "c += 2")


def test_of_several_places_the_one_with_the_fewest_other_names_is_meant(package: Path) -> None:
    table = "ROWS = {\n    Row.A: go(Seat.B),\n    Row.B: go(Seat.C),\n}\n"
    (package / "hotel" / "halls.py").write_text(table)
    line = "    Row.B: go(Seat.A),"
    assert changed(package, "ROWS", "Line.B: go(Seat.C)", "Line.B: go(Seat.A)")[1] == line
    for old in ("Line.D: go(Seat.E)", "Line.D: come(Chair.E)"):
        with pytest.raises(NoMatch, match="fits 2 places in 'ROWS'"):
            mutated(package, "ROWS", old, "0")


@pytest.mark.parametrize("old", ["a - a", "min(a)", "a < b", "me.seats > me.taken"])
def test_a_rename_is_one_for_one_and_changes_nothing_else(package: Path, old: str) -> None:
    with pytest.raises(NoMatch, match=r"fits 0 places in 'Room\.free'"):
        mutated(package, "Room.free", old, "0")


def test_more_lines_are_indented_as_the_first(package: Path) -> None:
    new = """
    if self.free and count:
        self.taken += 2
        continue
    """
    expected = """\
            if self.free and count:
                self.taken += 2
                continue"""
    old = "if self.free: self.taken += 1"
    assert changed(package, "Room.take", old, new)[1] == expected


def test_no_old_text_is_the_beginning_of_the_body(package: Path) -> None:
    fault = "if not self:\n    raise ValueError"
    lines = "        if not self:\n            raise ValueError"
    assert changed(package, "Room.free", "", fault) == ("", lines)
    _, text = mutated(package, "Room.free", "", fault)
    assert f'"""Free places."""\n{lines}\n' in text
    assert changed(package, "Room.take", "", "return True") == ("", "        return True")
    assert changed(package, "rooms:", "", "import os") == ("", "import os")
    with pytest.raises(NoMatch, match="'LIMITS' has no body"):
        mutated(package, "LIMITS", "", "pass")


@pytest.mark.parametrize(
    ("anchor", "old", "why"),
    [
        ("Room.fre", "0", "no function, class or constant 'Room.fre'.*perhaps to 'Room.free'"),
        ("kitchens:largest", "0", "no function, class or constant 'kitchens:largest'"),
        ("largest", "max", "'largest' is in hotel.halls, hotel.rooms"),
        ("Room.free", "7", "'7' fits 0 places in 'Room.free'"),
        ("rooms:", "max(halls, least)", "fits 0 places in module 'hotel.rooms'"),
        ("rooms:", "max(", "no balanced brackets"),
        ("rooms:", "rooms) + (least", "does not open"),
        ("hotel/page.js", "rooms", "occurs 2 times in hotel/page.js"),
        ("hotel/none.js", "rooms", "occurs 0 times in hotel/none.js"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    package: Path, anchor: str, old: str, why: str
) -> None:
    with pytest.raises(NoMatch, match=why):
        mutated(package, anchor, old, "new")
