"""What commands print: text of others as it is and obeyed by nobody, tables, bars, and JSON."""

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
    """`text` without the characters that a terminal obeys; clients may name anything so."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


class PlainConsole(Console):
    """Standard output on which no word is markup; `width` columns wide where it is no terminal."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False)
        if width is not None and not self.file.isatty():
            self.width = width

    def on_broken_pipe(self) -> None:
        """Left to the command, which ends as it does without this library."""
        raise BrokenPipeError


def new_table(
    columns: Iterable[str], left: Collection[str] = (), title: str | None = None
) -> Table:
    """A table whose columns are flush right, but for those in `left`."""
    made = (Column(name, justify="left" if name in left else "right") for name in columns)
    return Table(*made, title=title, title_justify="left")


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Lines of names and values, the values below each other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def print_json(value: object, sort_keys: bool = False) -> None:
    """What commands print with --json."""
    print(json.dumps(value, indent=2, sort_keys=sort_keys))


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """What is to be called after each of `total` steps; nothing is left of the bar at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def waiting(seconds: float) -> None:
    """Standard error says that vLLM is at work, which takes half a minute or more."""
    print(f"vLLM reads the configuration, since {seconds:.0f} s", file=sys.stderr)
