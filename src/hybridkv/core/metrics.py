"""How a metric is described, for the daemon's page and for vLLM's alike."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """What one metric means, with its unit. Prometheus appends `_total` to names of counters."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its own; in the engine vLLM gives every metric model_name and engine as well."""
    buckets: tuple[float, ...] = ()


def counter(text: str, *labels: str) -> MetricFamily:
    """A family of counters."""
    return MetricFamily("counter", text, labels)


def gauge(text: str, *labels: str) -> MetricFamily:
    """A family of gauges."""
    return MetricFamily("gauge", text, labels)
