"""The output of commands: tables, bars, JSON, and foreign text that no terminal obeys."""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from hybridkv.core.findings import Verdict

STYLES = {Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def plain(text: str) -> str:
    """`text`, which a client may have chosen, without characters that a terminal obeys.

    "a\\x1b[2J" -> "a\\ufffd[2J"
    """
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


class PlainConsole(Console):
    """Standard output, on which no word is markup. Without a terminal it has `width` columns."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False)
        if width is not None and not self.file.isatty():
            self.width = width

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, so that the command ends as it would without this library."""
        raise BrokenPipeError


def new_table(
    columns: Iterable[str], left: Collection[str] = (), title: str | None = None
) -> Table:
    """Returns a table. Its columns are flush right, except for those in `left`."""
    aligned = (Column(name, justify="left" if name in left else "right") for name in columns)
    return Table(*aligned, title=title, title_justify="left")


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Returns lines of names and values: [("a", 1), ("bcd", 2)] -> ["a    1", "bcd  2"]."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def print_json(value: object, sort_keys: bool = False) -> None:
    """Print a value as commands do with --json."""
    print(json.dumps(value, indent=2, sort_keys=sort_keys))


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps, which disappears at the end.

    Yields a function to be called after each step.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """Show how many things are done on standard error, if that is a terminal.

    Yields a function to be called with the number. What is shown disappears at the end.
    """
    with Progress(
        TextColumn("{task.completed:,.0f} {task.description}"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number: bar.update(task, completed=number)


def waiting(seconds: float) -> None:
    """Say on standard error that vLLM is at work, which takes half a minute or more."""
    print(f"vLLM reads the configuration, since {seconds:.0f} s", file=sys.stderr)
