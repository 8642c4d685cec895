"""`python -m tests.connector.metrics_document [--write]`: the tables of docs/METRICS.md that are made from the code.

Prints the document as it should be, or writes it; what is between `<!-- table: NAME -->` and `<!-- end -->` is ours.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hybridkv.connector.hybrid import SOURCES
from hybridkv.connector.scheduler import DECLINES
from hybridkv.connector.stats import EXACT, FAMILIES, PREFIX, PREFIXES, What

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"
_BLOCK = re.compile(r"(<!-- table: (engine_\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def document(text: str) -> str:
    """The text with every table of the engine's made anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    """Print or write the document."""
    parser = argparse.ArgumentParser(prog="python -m tests.connector.metrics_document", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name} instead of printing it")
    text = document(DOCUMENT.read_text())
    if parser.parse_args().write:
        DOCUMENT.write_text(text)
    else:
        print(text, end="")
    return 0


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _metrics() -> str:
    return _table(
        ["metric", "kind", "labels", "what"],
        [
            [
                f"`{PREFIX}{name}{'_total' if family.what is What.COUNTER else ''}`",
                family.what,
                ", ".join(f"`{label}`" for label in family.labels),
                family.about,
            ]
            for name, family in FAMILIES.items()
        ],
    )


def _counters() -> str:
    rows = [[f"`{counter}`", f"`{family}`", _labels(family, labels)] for counter, (family, labels) in EXACT.items()]
    rows += [[f"`{prefix}*`", f"`{family}`", _labels(family, (*labels, "*"))] for prefix, family, labels in PREFIXES]
    rows.append(["any other", "`events`", _labels("events", ("*",))])
    return _table(["counter", "metric", "labels"], rows)


def _labels(family: str, values: tuple[str, ...]) -> str:
    return ", ".join(f'{label}="{value}"' for label, value in zip(FAMILIES[family].labels, values, strict=True))


def _declines() -> str:
    reasons = [(name.removeprefix("lookups_"), why) for name, why in DECLINES.items() if name.startswith("lookups_")]
    return _table(["reason", "meaning"], [[f"`{reason}`", why] for reason, why in reasons])


def _sources() -> str:
    rows = [[f"`{tier}`", f"`{source.value}`"] for tier, source in SOURCES]
    return _table(["tier", "source"], [*rows, ["any other", "`external_unspecified`"]])


TABLES: Mapping[str, Callable[[], str]] = {
    "engine_metrics": _metrics,
    "engine_counters": _counters,
    "engine_declines": _declines,
    "engine_sources": _sources,
}


if __name__ == "__main__":
    sys.exit(main())
