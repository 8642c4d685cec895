"""Documents that are made from the code, wholly or table by table."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 100
"""Lines of prose are at most this long."""
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Returns `text` with each `<!-- table: NAME -->` block made anew.

    Raises KeyError where a block's name is not in `tables`.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n{match[3]}", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown: a row of heads, and one for each of `rows`."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def print_or_write(path: Path, text: str, about: str | None) -> int:
    """Run the command line of a module that makes one document. Returns its exit status."""
    return print_or_write_all({path: text}, about)


def print_or_write_all(texts: Mapping[Path, str], about: str | None) -> int:
    """Run the command line of a module that makes documents. Returns its exit status."""
    parser = argparse.ArgumentParser(description=about)
    names = ", ".join(f"docs/{path.name}" for path in texts)
    parser.add_argument("--write", action="store_true", help=f"write {names} instead of printing")
    is_writing = parser.parse_args().write
    for path, text in texts.items():
        if is_writing:
            path.write_text(text)
        else:
            print(text, end="")
    return 0
