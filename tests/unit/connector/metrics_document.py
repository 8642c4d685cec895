"""`python -m tests.unit.connector.metrics_document [--write]`: tables of docs/METRICS.md.

Prints the document as it should be, or writes it. The code makes what stands between
`<!-- table: NAME -->` and `<!-- end -->`.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import ModuleType

from hybridkv.connector import metrics
from hybridkv.connector.connector import SOURCES
from hybridkv.connector.metrics import (
    FAMILIES,
    PREFIX,
    Shed,
    audited,
    daemon_refused,
    daemon_unsent,
    declined,
    hits_limited,
    loaded_from,
    stores_shed,
)
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.metrics import Metric, MetricFamily
from hybridkv.multi import stats as multi
from hybridkv.multi.counters import (
    BLOCK_ERRORS,
    LOADS_FAILED,
    LOADS_GIVEN_UP,
    LOOKUPS_LATE_ROOM,
    PASSED_OVER,
    REPORTS_ABSORBED,
    SOURCES_WRONG,
    SYNC_DECLINED,
    CounterKey,
)
from hybridkv.observe.status import DECLINES
from hybridkv.vllm import hook_guard
from hybridkv.vllm.hook_guard import BEGUN_ANEW, QUARANTINED, SLOW_HOOKS, SWITCHED_OFF, event, fault
from hybridkv.wire.messages import Decline
from tests.documents import DOCS, filled, print_or_write, table

DOCUMENT = DOCS / "METRICS.md"
MULTI_EVENTS: Mapping[Metric, str] = {
    QUARANTINED: "the connector was switched off; it still is where `begun_anew` is smaller",
    BEGUN_ANEW: "the connector is asked again after its pause",
    SWITCHED_OFF: "a hook was not called, because the connector is switched off",
    fault("*"): "the connector raised in this hook",
    fault("aggregate"): "the connector could not merge the messages of several workers",
    fault("kv_events"): "the connector could not merge the KV events of several workers",
    fault("withdraw"): "the connector was switched off and could not withdraw its KV events",
    fault("shutdown"): "the connector raised as it was shut down",
    fault("stats"): "the connector raised in its statistics, which are then incomplete",
    SYNC_DECLINED: "a hit was declined: it loads within the step, in a model with several groups",
    SLOW_HOOKS: "the engine's scheduler waited a second or longer for the connector",
    PASSED_OVER: "a request waited for the connector's answer in vain",
    LOADS_GIVEN_UP: "a load was failed, because its connector is switched off",
    LOADS_FAILED: "a load failed",
    LOOKUPS_LATE_ROOM: "other loads left no room in the engine's block pool",
    SOURCES_WRONG: "a connector's tokens by source were not those of its load",
    REPORTS_ABSORBED: "a report of a transfer that nobody waited for was kept from the engine",
    BLOCK_ERRORS: "block errors failed all loads, as blocks had several groups",
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


def counters() -> list[Metric]:
    """Return all counters of the connector, by family. A label of any value is `*`."""
    known = {metric for module in (metrics, hook_guard) for metric in constants(module)}
    known |= {*map(stores_shed, Shed), *map(audited, AuditOutcome), *map(declined, Decline)}
    open_sets = (fault, hits_limited, loaded_from, daemon_refused, daemon_unsent)
    known |= {*(counter("*") for counter in open_sets), event("transition_ignored_*")}
    families = list(FAMILIES)
    return sorted(known, key=lambda metric: (families.index(metric.family), metric.labels))


def constants(module: ModuleType) -> list[Metric]:
    """Return the counters that are constants of a module."""
    return [value for value in vars(module).values() if isinstance(value, Metric)]


def _counters() -> str:
    values: defaultdict[Metric, list[str]] = defaultdict(list)
    for metric in counters():
        if metric.labels:
            values[Metric(metric.family, metric.labels[:-1])].append(f"`{metric.labels[-1]}`")
    rows = [
        [f"`{_selector(first)}`", f"`{FAMILIES[first.family].labels[-1]}`", ", ".join(last)]
        for first, last in values.items()
    ]
    return table(["metric", "label", "values"], rows)


def _selector(metric: Metric) -> str:
    """Return the metric as PromQL selects it, by the labels that it has."""
    labels = zip(FAMILIES[metric.family].labels, metric.labels, strict=False)
    selected = ", ".join(f'{label}="{value}"' for label, value in labels)
    return f"{metric.family}{{{selected}}}" if selected else metric.family


def _declines() -> str:
    reasons = [(declined(reason), why) for reason, why in DECLINES.items()]
    rows = [[f"`{m.labels[-1]}`", why] for m, why in reasons if m.family == "lookups"]
    return table(["reason", "meaning"], rows)


def _sources() -> str:
    rows = [[f"`{tier}`", f"`{source.value}`"] for tier, source in SOURCES]
    return table(["tier", "source"], [*rows, ["any other", "`external_unspecified`"]])


def _multi() -> str:
    return _family_rows(multi.PREFIX, multi.FAMILIES)


def _multi_events() -> str:
    events = [(CounterKey("", metric).event, why) for metric, why in MULTI_EVENTS.items()]
    return table(["event", "meaning"], [[f"`{event}`", why] for event, why in events])


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
