"""What one fault is, and what a test is named by."""

from dataclasses import dataclass
from pathlib import Path

from tests.mutations.anchors import NoMatch
from tests.mutations.matching import MutatedFile, mutated

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hybridkv"
COMMANDS = ("tests.simulation", "tests.daemonsim", "tests.devicesim", "ruff", "importlinter.cli")
"""Modules that a command may begin with. Every other test is a pytest node id."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault that is put into a copy of the package, and the tests that must fail on it."""

    name: str
    fault: str
    """The fault in a line."""
    anchor: str
    """The function, class or constant that is changed. anchors.py has the form."""
    old: str
    """The text that matches at one place of the anchor, or "" for the beginning of its body."""
    new: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    """pytest node ids (without parameters: any of them), or commands, see COMMANDS."""

    def problem(self) -> str:
        """Returns why the fault does not fit the source, or "" where it fits."""
        try:
            self.mutated()
        except NoMatch as error:
            return str(error)
        return ""

    def mutated(self) -> MutatedFile:
        """Returns the file that changes, with the fault."""
        return mutated(PACKAGE, self.anchor, self.old, self.new)

    def apply(self, package: Path) -> None:
        """Put the fault into the copy of the package at `package`."""
        path, text = self.mutated()
        (package / path).write_text(text)


def is_command(test: str) -> bool:
    """Whether a test is a command of COMMANDS, and not a node of pytest."""
    return test.split(maxsplit=1)[0] in COMMANDS


def nodes(results: dict[str, bool], test: str) -> list[bool]:
    """Returns the results of `test`, and of all its parameters where it names none."""
    return [red for node, red in results.items() if node == test or node.startswith(f"{test}[")]
