"""The connector's statistics at the API server: its line in the log, and its metrics.

The scheduler role counts, and adds what its workers report. How the numbers get there:
`vllm/prometheus.py`.
"""

from typing import Any

from hybridkv.connector import metrics
from hybridkv.core.metrics import Metric
from hybridkv.vllm.prometheus import EngineMetrics, MetricStats


class HybridKVStats(MetricStats):
    """What one engine's connector counted and measured in an interval."""

    def reduce(self) -> dict[str, int | float]:
        """Return the values of one interval for vLLM's log line, by their text."""
        counters = self.counters

        def total(family: str, *labels: str) -> int:
            """Sum the counters of a family whose first labels have these values."""
            values = (
                value
                for metric, value in counters.items()
                if metric.family == family and metric.labels[: len(labels)] == labels
            )
            return round(sum(values))

        line: dict[str, int | float] = {
            "Lookup hits": total("lookups", "hit"),
            "misses": total("lookups", "miss"),
            "declined": total("lookups", "declined"),
            "Tokens loaded": round(counters.get(metrics.TOKENS_LOADED, 0)),
        }
        for metric, value in sorted(counters.items()):
            if metric.family == "loaded_tokens_by_tier":
                line[f"from {metric.labels[0]}"] = round(value)
        line["MB loaded"] = round(counters.get(metrics.BYTES_LOADED, 0) / 1e6, 1)
        line["MB stored"] = round(counters.get(metrics.BYTES_STORED, 0) / 1e6, 1)
        waits = self.observed.get(Metric("load_seconds"))
        if waits:
            line["Avg load (ms)"] = round(1e3 * sum(waits) / len(waits), 2)
        troubles = {
            "Failed loads": round(counters.get(metrics.LOADS_FAILED, 0)),
            "Objects shed": total("stores_shed"),
            "Daemon losses": round(counters.get(metrics.DAEMON_LOSSES, 0)),
            "Faults": total("faults"),
        }
        return line | {name: count for name, count in troubles.items() if count}


def export_metrics(*vllm_arguments: Any) -> EngineMetrics:
    """Return what exports the connector's metrics at the API server's /metrics."""
    exported = EngineMetrics(
        metrics.PREFIX, metrics.FAMILIES, metrics.STATS_MALFORMED, *vllm_arguments
    )
    for metric in metrics.ZERO_INITIALIZED:
        exported.zero(metric)
    return exported
