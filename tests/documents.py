"""Documents that are made from the code, wholly or table by table: each module prints its own, or writes it."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The text with what is between `<!-- table: NAME -->` and `<!-- end -->` made anew; KeyError for other names."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n{match[3]}", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def print_or_write(path: Path, made: str, about: str | None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help=f"write docs/{path.name} instead of printing it")
    if parser.parse_args().write:
        path.write_text(made)
    else:
        print(made, end="")
    return 0
