"""A fault finds its function after a move or a new format, or says why it does not."""

from pathlib import Path

import pytest

from tests.mutations.anchors import NoMatch
from tests.mutations.changes import Change, always, body, never, swap, value, without
from tests.mutations.mutation import Mutation

SOURCE = '''
LIMIT: int = 3


class Room:
    """A class."""

    @property
    def free(self) -> int:
        """Free places."""
        if self.seats > self.taken and self.is_open:
            left = self.seats - self.taken  # a comment
            return left
        return 0

    def take(self, count: int = 1) -> bool:
        self.taken += count
        self.book(
            count,
        )
        return self.free > 0


def largest(rooms):
    return max(room.seats for room in rooms if room.is_open)
'''
HALLS = "def largest(halls):\n    return max(halls)\n"


def mutated(directory: Path, anchor: str, change: Change) -> str:
    (directory / "rooms.py").write_text(SOURCE)
    (directory / "halls.py").write_text(HALLS)
    return Mutation("name", "fault", anchor, change, "A1", ()).mutated(directory).text


@pytest.mark.parametrize(
    ("anchor", "change", "line"),
    [
        ("Room.free", never("is_open"), "if self.seats > self.taken and False:"),
        ("Room.free", always("seats"), "if True and self.is_open:"),
        ("rooms:largest", never("is_open"), "max((room.seats for room in rooms if False))"),
        ("Room.take", always("free"), "return True"),
        ("Room.take", without("book"), "self.taken += count\n        pass\n"),
        ("Room.take", without("self.taken"), "pass\n        self.book(count)"),
        ("halls:largest", swap("max", "min"), "return min(halls)"),
        ("LIMIT", value("original + 1"), "LIMIT: int = (lambda original: original + 1)(3)"),
    ],
)
def test_a_change_is_made_at_its_place(
    anchor: str, change: Change, line: str, tmp_path: Path
) -> None:
    assert line in mutated(tmp_path, anchor, change)


def test_a_new_body_has_the_function_as_it_was_and_its_arguments(tmp_path: Path) -> None:
    change = body("return original(**arguments) * len(arguments['halls'])")
    text = mutated(tmp_path, "halls:largest", change)
    names: dict[str, object] = {}
    exec(text, names)
    largest = names["largest"]
    assert callable(largest)
    assert largest([2, 3]) == 6


@pytest.mark.parametrize(
    ("anchor", "change", "why"),
    [
        ("Room.fre", never("seats"), "no function or constant 'Room.fre'.*perhaps to 'Room.free'"),
        ("largest", swap("max", "min"), "'largest' is in halls, rooms"),
        ("Room.take", without("nothing"), "'nothing' fits 0 places"),
        ("Room.take", without("count"), "'count' fits 2 places"),
        ("Room.free", swap("left", "0"), "left: a local name may change any day"),
        ("LIMIT", body("pass"), "a constant has no body"),
        ("Room.take", value("0"), "it is no constant"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    anchor: str, change: Change, why: str, tmp_path: Path
) -> None:
    with pytest.raises(NoMatch, match=why):
        mutated(tmp_path, anchor, change)
