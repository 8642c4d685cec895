"""Metrics: each family is declared once, by the package that counts it or has its value.

A package's table of families is all that pages, samples, payloads and tests know of its metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Read = Callable[[Any], float | Mapping[Any, float]]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """The meaning of one metric, with its unit. Prometheus appends `_total` to counters."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Its own labels. In the engine, vLLM gives every metric model_name and engine as well."""
    buckets: tuple[float, ...] = ()
    read: Read | None = None
    """Returns the number of its owner: with one label a number by the label's value, with several
    labels by a tuple of values. None = it is counted by its name."""
    is_sampled: bool = False  # Whether the daemon keeps what it was in the last hour.
    is_debug: bool = False  # Whether `hybridkv stats --debug` alone shows it.
    single_name: str = ""
    """What stands before the label in the name of a single value. Empty = the family's name."""


class Metric(NamedTuple):
    """One metric of a family: the family's key and the values of the family's own labels."""

    family: str
    labels: tuple[str, ...] = ()


class Values(dict[Metric, float]):
    """The numbers of the daemon at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.families: dict[str, MetricFamily] = {}  # Of all numbers, and of those not known.

    def add_numbers(
        self,
        families: Mapping[str, MetricFamily],
        owner: object,
        counted: Mapping[str, float],
        prefix: str = "",
        labels: tuple[str, ...] = (),
    ) -> None:
        """Add the numbers of an owner, whose `labels` are the same for all of these families.

        `counted` has the numbers of families that are not read of the owner. A counter that it
        lacks is 0, and a gauge is not known. `prefix` stands before the families' names.
        """
        for key, family in families.items():
            name = prefix + key
            self.families[name] = family
            number = counted.get(key) if family.read is None else family.read(owner)
            if isinstance(number, Mapping):
                for label, value in number.items():
                    own = label if isinstance(label, tuple) else (label,)
                    self[Metric(name, own)] = float(value)
            elif number is not None or family.kind == "counter":
                self[Metric(name, labels)] = float(number or 0)

    def of(self, family: str, *labels: str) -> float:
        """Returns a number, 0 where there is none."""
        return self.get(Metric(family, labels), 0.0)

    def named(self, with_debug: bool = True) -> dict[str, float]:
        """Returns the numbers by one name each: tier_bytes of "disk" -> "tier_disk_bytes"."""
        return {
            self._name_of(metric): number
            for metric, number in self.items()
            if with_debug or not self.families[metric.family].is_debug
        }

    def _name_of(self, metric: Metric) -> str:
        name, labels = metric
        start = self.families[name].single_name or name
        if self.families[name].labels == ("tier",) and start == name:
            return f"tier_{labels[0]}_{name.removeprefix('tier_')}"
        return "_".join([start, *labels])


def counter(text: str, read: Read | None = None, **facts: Any) -> MetricFamily:
    """Returns a family of counters that is described by `text`. `facts` are fields of it."""
    return MetricFamily("counter", text, read=read, **facts)


def gauge(text: str, read: Read | None = None, **facts: Any) -> MetricFamily:
    """Returns a family of gauges that is described by `text`. `facts` are fields of it."""
    return MetricFamily("gauge", text, read=read, **facts)


def histogram(text: str, read: Read | None = None, **facts: Any) -> MetricFamily:
    """Returns a family of histograms, of which the sum is read. `facts` are fields of it."""
    return MetricFamily("histogram", text, read=read, **facts)


def sampled(**families: MetricFamily) -> dict[str, MetricFamily]:
    """Returns families of whose numbers the daemon keeps the last hour."""
    return {name: replace(family, is_sampled=True) for name, family in families.items()}


def debug(**families: MetricFamily) -> dict[str, MetricFamily]:
    """Returns families of debug values."""
    return {name: replace(family, is_debug=True) for name, family in families.items()}


def labelled(label: str, families: Mapping[str, MetricFamily]) -> dict[str, MetricFamily]:
    """Returns families with a label, whose value is their owner's name."""
    return {name: replace(family, labels=(label,)) for name, family in families.items()}
