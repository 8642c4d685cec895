"""`python -m tests.unit.connector.metrics_document [--write]`: tables of docs/METRICS.md.

Prints the document as it should be, or writes it. The code makes what stands between
`<!-- table: NAME -->` and `<!-- end -->`.
"""

import sys
from collections.abc import Callable, Mapping

from hybridkv.connector.connector import SOURCES
from hybridkv.connector.stats import EXACT, FAMILIES, PREFIX, PREFIXES
from hybridkv.core.metrics import MetricFamily
from hybridkv.multi import stats as multi
from hybridkv.observe.status import DECLINES
from tests.documents import DOCS, filled, print_or_write, table

DOCUMENT = DOCS / "METRICS.md"
MULTI_EVENTS = {
    "quarantined": "the connector was switched off; it still is where `begun_anew` is smaller",
    "begun_anew": "the connector is asked again after its pause",
    "switched_off": "a hook was not called, because the connector is switched off",
    "fault_*": "the connector raised in this hook",
    "fault_aggregate": "the connector could not merge the messages of several workers",
    "fault_kv_events": "the connector could not merge the KV events of several workers",
    "fault_withdraw": "the connector was switched off and could not withdraw its KV events",
    "fault_shutdown": "the connector raised as it was shut down",
    "fault_stats": "the connector raised in its statistics, which are then incomplete",
    "sync_declined": "a hit was declined: it loads within the step, in a model with several groups",
    "slow_hooks": "the engine's scheduler waited a second or longer for the connector",
    "passed_over": "a request waited for the connector's answer in vain",
    "loads_given_up": "a load was failed, because its connector is switched off",
    "loads_failed": "a load failed",
    "lookups_late_room": "other loads left no room in the engine's block pool",
    "sources_wrong": "a connector's tokens by source were not those of its load",
    "reports_absorbed": "a report of a transfer that nobody waited for was kept from the engine",
    "block_errors_of_several_groups": "block errors failed all loads, as blocks had several groups",
}
"""The counters of MultiConnector: those of a connector first, then those of label ""."""


def document(text: str) -> str:
    """The text with every table of the engine's made anew."""
    return filled(text, TABLES)


def main() -> int:
    """Print or write the document."""
    return print_or_write(DOCUMENT, document(DOCUMENT.read_text()), __doc__)


def _metrics() -> str:
    return _family_rows(PREFIX, FAMILIES)


def _family_rows(prefix: str, families: Mapping[str, MetricFamily]) -> str:
    return table(
        ["metric", "kind", "labels", "what"],
        [
            [
                f"`{prefix}{name}{'_total' if family.kind == 'counter' else ''}`",
                family.kind,
                ", ".join(f"`{label}`" for label in family.labels),
                family.help,
            ]
            for name, family in families.items()
        ],
    )


def _counters() -> str:
    rows = [
        [f"`{counter}`", f"`{family}`", _labels(family, labels)]
        for counter, (family, labels) in EXACT.items()
    ]
    rows += [
        [f"`{prefix}*`", f"`{family}`", _labels(family, (*labels, "*"))]
        for prefix, family, labels in PREFIXES
    ]
    rows.append(["any other", "`events`", _labels("events", ("*",))])
    return table(["counter", "metric", "labels"], rows)


def _labels(family: str, values: tuple[str, ...]) -> str:
    return ", ".join(
        f'{label}="{value}"' for label, value in zip(FAMILIES[family].labels, values, strict=True)
    )


def _declines() -> str:
    reasons = [
        (name.removeprefix("lookups_"), why)
        for name, why in DECLINES.items()
        if name.startswith("lookups_")
    ]
    return table(["reason", "meaning"], [[f"`{reason}`", why] for reason, why in reasons])


def _sources() -> str:
    rows = [[f"`{tier}`", f"`{source.value}`"] for tier, source in SOURCES]
    return table(["tier", "source"], [*rows, ["any other", "`external_unspecified`"]])


def _multi() -> str:
    return _family_rows(multi.PREFIX, multi.FAMILIES)


def _multi_events() -> str:
    return table(["event", "meaning"], [[f"`{name}`", why] for name, why in MULTI_EVENTS.items()])


TABLES: Mapping[str, Callable[[], str]] = {
    "engine_metrics": _metrics,
    "engine_counters": _counters,
    "engine_declines": _declines,
    "engine_sources": _sources,
    "engine_multi": _multi,
    "engine_multi_events": _multi_events,
}


if __name__ == "__main__":
    sys.exit(main())
