"""The description of metrics, for the daemon's page and for vLLM's."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """The meaning of one metric, with its unit. Prometheus appends `_total` to counters."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Its own labels. In the engine, vLLM gives every metric model_name and engine as well."""
    buckets: tuple[float, ...] = ()


class Metric(NamedTuple):
    """One metric of a family: the family's key and the values of the family's own labels."""

    family: str
    labels: tuple[str, ...] = ()


def counter(text: str, *labels: str) -> MetricFamily:
    """Returns a family of counters that is described by `text`."""
    return MetricFamily("counter", text, labels)


def gauge(text: str, *labels: str) -> MetricFamily:
    """Returns a family of gauges that is described by `text`."""
    return MetricFamily("gauge", text, labels)
