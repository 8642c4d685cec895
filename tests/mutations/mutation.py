"""What one fault is, and what a test is named by."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutations.anchors import NoMatch, find, named_nodes
from tests.mutations.changes import Change, Statement, local_names

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hybridkv"
COMMANDS = ("tests.simulation", "tests.daemonsim", "tests.devicesim")
"""Modules that a command may begin with. Every other test is a pytest node id."""


class MutatedFile(NamedTuple):
    """A file of the package with a fault in it."""

    path: Path
    """The path below the package."""
    text: str


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault that is put into a copy of the package, and the tests that must fail on it."""

    name: str
    fault: str
    """The fault in a line."""
    anchor: str
    """The function or constant that is changed. anchors.py has the form."""
    change: Change
    requirements: str
    """Their ids, such as "A2 A3"."""
    tests: tuple[str, ...]
    """pytest node ids (without parameters: any of them), or commands, see COMMANDS."""

    def problem(self) -> str:
        """Returns why the fault does not fit the source, or "" where it fits."""
        try:
            self.mutated(PACKAGE)
        except NoMatch as error:
            return f"{self.anchor}: {error}"
        return ""

    def mutated(self, package: Path) -> MutatedFile:
        """Returns the file that changes, with the fault. Raises NoMatch."""
        file = find(package, self.anchor)
        tree = ast.parse(file.read_text())
        name = self.anchor.rpartition(":")[2]
        node = next(named.node for named in named_nodes(tree) if named.name == name)
        assert isinstance(node, Statement)
        used = {each.id for each in ast.walk(ast.parse(self.change.old)) if hasattr(each, "id")}
        if local := used & local_names(node):
            raise NoMatch(f"{', '.join(sorted(local))}: a local name may change any day")
        self.change.change(node)
        return MutatedFile(file.relative_to(package), ast.unparse(ast.fix_missing_locations(tree)))

    def apply(self, package: Path) -> None:
        """Put the fault into the copy of the package at `package`."""
        path, text = self.mutated(PACKAGE)
        (package / path).write_text(text)


def is_command(test: str) -> bool:
    """Whether a test is a command of COMMANDS, and not a node of pytest."""
    return test.split(maxsplit=1)[0] in COMMANDS


def nodes(results: dict[str, bool], test: str) -> list[bool]:
    """Returns the results of `test`, and of all its parameters where it names none."""
    return [red for node, red in results.items() if node == test or node.startswith(f"{test}[")]
