"""Every metric that documents, dashboard and alerts may name."""

from collections.abc import Mapping

from hybridkv.connector.metrics import FAMILIES
from hybridkv.connector.metrics import PREFIX as ENGINE_PREFIX
from hybridkv.core.metrics import MetricFamily
from hybridkv.observe.catalog import PREFIX, SNAPSHOT_METRICS, VALUES

_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def known() -> dict[str, MetricFamily]:
    """Returns each of the daemon's metrics by its whole name, without the `_total` of counters."""
    return {
        f"{PREFIX}{name}": described for name, described in {**VALUES, **SNAPSHOT_METRICS}.items()
    }


def exposed() -> dict[str, MetricFamily]:
    """Returns every name of the daemon's that a query may contain, with its metric."""
    return _exposed(known())


def exposed_by_engines() -> dict[str, MetricFamily]:
    """Returns every name of the connector's that a query may contain, with its metric."""
    return _exposed({f"{ENGINE_PREFIX}{name}": family for name, family in FAMILIES.items()})


def find_metric(name: str) -> MetricFamily | None:
    """Returns the metric that a page names, a histogram without its suffix, or None."""
    families = exposed() | exposed_by_engines()
    return families.get(name) or families.get(f"{name}_bucket")


def _exposed(families: Mapping[str, MetricFamily]) -> dict[str, MetricFamily]:
    return {
        f"{name}{suffix}": family
        for name, family in families.items()
        for suffix in _SUFFIXES[family.kind]
    }
