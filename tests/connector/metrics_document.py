"""`python -m tests.connector.metrics_document [--write]`: the tables of docs/METRICS.md that are made from the code.

Prints the document as it should be, or writes it; what is between `<!-- table: NAME -->` and `<!-- end -->` is ours.
"""

import sys
from collections.abc import Callable, Mapping

from hybridkv.connector.hybrid import SOURCES
from hybridkv.connector.scheduler import DECLINES
from hybridkv.connector.stats import EXACT, FAMILIES, PREFIX, PREFIXES, What
from tests.documents import DOCS, filled, print_or_write, table

DOCUMENT = DOCS / "METRICS.md"


def document(text: str) -> str:
    """The text with every table of the engine's made anew."""
    return filled(text, TABLES)


def main() -> int:
    """Print or write the document."""
    return print_or_write(DOCUMENT, document(DOCUMENT.read_text()), __doc__)


def _metrics() -> str:
    return table(
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
    return table(["counter", "metric", "labels"], rows)


def _labels(family: str, values: tuple[str, ...]) -> str:
    return ", ".join(f'{label}="{value}"' for label, value in zip(FAMILIES[family].labels, values, strict=True))


def _declines() -> str:
    reasons = [(name.removeprefix("lookups_"), why) for name, why in DECLINES.items() if name.startswith("lookups_")]
    return table(["reason", "meaning"], [[f"`{reason}`", why] for reason, why in reasons])


def _sources() -> str:
    rows = [[f"`{tier}`", f"`{source.value}`"] for tier, source in SOURCES]
    return table(["tier", "source"], [*rows, ["any other", "`external_unspecified`"]])


TABLES: Mapping[str, Callable[[], str]] = {
    "engine_metrics": _metrics,
    "engine_counters": _counters,
    "engine_declines": _declines,
    "engine_sources": _sources,
}


if __name__ == "__main__":
    sys.exit(main())
