"""What commands print: text of others as it is and obeyed by nobody, tables, and JSON."""

import json
from collections.abc import Collection, Iterable, Mapping

from rich.console import Console
from rich.table import Table

from hybridkv.core.findings import Verdict

STYLES: Mapping[Verdict, str | None] = {
    Verdict.OK: None,
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
}


def plain(text: str) -> str:
    """`text` without the characters that a terminal obeys; clients may name anything so."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


class PlainConsole(Console):
    """Standard output on which no word is markup."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Left to the command, which ends as it does without this library."""
        raise BrokenPipeError


def plain_console(width: int) -> PlainConsole:
    """A console that is `width` columns wide where it is no terminal."""
    console = PlainConsole()
    if not console.file.isatty():
        console.width = width
    return console


def new_table(
    columns: Iterable[str], left: Collection[str] = (), title: str | None = None
) -> Table:
    """A table whose columns are flush right, but for those in `left`."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def pairs(rows: Iterable[tuple[str, object]]) -> Iterable[str]:
    """Lines of names and values, the values below each other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def print_json(value: object) -> None:
    """What every command prints with --json."""
    print(json.dumps(value, indent=2))
