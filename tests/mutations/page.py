"""The last column of tests/REQUIREMENTS.md.

`python -m tests.mutations.page --write` brings it up to date. A row is
`| id | what it asks | where | held by |`. If faults carry the id, the last cell is made from them;
else it is written by hand: the tests that hold the item, or why it is not met.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.mutations.mutation import ROOT, Mutation
from tests.mutations.table import MUTATIONS

DOCUMENT = ROOT / "tests" / "REQUIREMENTS.md"
ROW = re.compile(r"^\| ([ABCD]\d+) \| (.*?) \| (.*?) \| (.*) \|$")
LAST = {"A": 38, "B": 47, "C": 42, "D": 21}
"""The sections of the requirements and how many items each has."""


@dataclass(frozen=True, slots=True)
class Row:
    """A requirement of the document."""

    id: str
    asks: str
    where: str
    held: str


def ids() -> list[str]:
    """Returns the identifiers of all requirements, in order."""
    return [f"{section}{number}" for section, last in LAST.items() for number in range(1, last + 1)]


def rows(text: str) -> list[Row]:
    """Returns the document's rows, in order."""
    return [Row(*found.groups()) for line in text.splitlines() if (found := ROW.match(line))]


def held(requirement: str) -> str:
    """Returns which tests hold a requirement, fault by fault, or "" where no fault carries it."""
    return "<br>".join(
        _shown(mutation) for mutation in MUTATIONS if requirement in mutation.requirements.split()
    )


def document(text: str) -> str:
    """Returns the document with its last column made from the table of faults."""
    return "\n".join(_lines(text)) + "\n"


def _shown(mutation: Mutation) -> str:
    return f"{mutation.name}: " + ", ".join(f"`{test}`" for test in mutation.tests)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        found = ROW.match(line)
        mutations = held(found[1]) if found else ""
        if found and mutations:
            line = f"| {found[1]} | {found[2]} | {found[3]} | {mutations} |"
        yield line


def main() -> int:
    """Write the document with --write. Otherwise return 1 where it is out of date."""
    text = DOCUMENT.read_text()
    new_text = document(text)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(new_text)
        return 0
    return int(new_text != text)


if __name__ == "__main__":
    sys.exit(main())
