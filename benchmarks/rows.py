"""What a benchmark prints: its rows, as a table or as JSON."""

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def print_rows(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    """Print rows that have the same columns: first a name, then figures.

    Raises IndexError where there are no rows and a table is asked for.
    """
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)
