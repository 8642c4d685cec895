"""Every metric that documents, dashboard and alerts may name, from the packages' own tables."""

from collections.abc import Mapping

from hybridkv.connector.metrics import FAMILIES
from hybridkv.connector.metrics import PREFIX as ENGINE_PREFIX
from hybridkv.core.metrics import MetricFamily
from hybridkv.daemon.metrics import DAEMON
from hybridkv.observe.ceiling import CEILING
from hybridkv.observe.web import ANSWERING, PAGE, PAGES_FAILED, PREFIX
from hybridkv.store.metrics import STORE
from hybridkv.tiers.metrics import DEMOTION, PROMOTION, TIER, TIER_PREFIX

OF_THE_DAEMON: Mapping[str, MetricFamily] = {
    **{"answering": ANSWERING, "pages_failed": PAGES_FAILED},
    **DAEMON,
    **STORE,
    **PROMOTION,
    **DEMOTION,
    **CEILING,
    **PAGE,
    **{TIER_PREFIX + name: family for name, family in TIER.items()},
}
"""The daemon's families by their names without PREFIX."""
_SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def exposed() -> dict[str, MetricFamily]:
    """Returns every name of the daemon's that a query may contain, with its metric."""
    return _exposed(PREFIX, OF_THE_DAEMON)


def exposed_by_engines() -> dict[str, MetricFamily]:
    """Returns every name of the connector's that a query may contain, with its metric."""
    return _exposed(ENGINE_PREFIX, FAMILIES)


def find_metric(name: str) -> MetricFamily | None:
    """Returns the metric that a page names, a histogram without its suffix, or None."""
    families = exposed() | exposed_by_engines()
    return families.get(name) or families.get(f"{name}_bucket")


def _exposed(prefix: str, families: Mapping[str, MetricFamily]) -> dict[str, MetricFamily]:
    return {
        f"{prefix}{name}{suffix}": family
        for name, family in families.items()
        if not family.is_debug
        for suffix in _SUFFIXES[family.kind]
    }
