"""What one fault is, and what a test is named by."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hybridkv"
COMMANDS = ("tests.simulation", "tests.daemonsim", "ruff", "importlinter.cli")
"""Modules that a command may begin with; every other test is a pytest node id."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault that is put into a copy of the package, and the tests that must fail on it."""

    name: str
    fault: str
    """What it is, in a line."""
    path: str
    """The file below src/hybridkv."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    """pytest node ids (without parameters: any of them), or commands, see COMMANDS."""

    def problem(self) -> str:
        """Why the fault cannot be put in as it is written; "" where it can."""
        source = PACKAGE / self.path
        if not source.is_file():
            return f"{self.path} is not there"
        count = source.read_text().count(self.old)
        return "" if count == 1 else f"its old text occurs {count} times in {self.path}"

    def apply(self, package: Path) -> None:
        """Put it into the copy of the package at `package`."""
        target = package / self.path
        target.write_text(target.read_text().replace(self.old, self.new))


def is_command(test: str) -> bool:
    """Whether a test is not pytest's."""
    return test.split(maxsplit=1)[0] in COMMANDS


def nodes(results: dict[str, bool], test: str) -> list[bool]:
    """Of all results by node id those of `test`, and of its parameters where it names none."""
    return [red for node, red in results.items() if node == test or node.startswith(f"{test}[")]
