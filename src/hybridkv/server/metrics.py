"""The daemon's counters in Prometheus form, on loopback only."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = frozenset(
    (
        "objects",
        "bytes_committed",
        "bytes_writing",
        "bytes_reserved",
        "bytes_arena",
        "sessions",
        "leases",
        "connections",
    )
)
"""Values that may go down; every other value of Daemon.values is a counter."""


class DaemonCollector(Collector):
    """Reads the daemon's values at scrape time."""

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """One metric per value, named hybridkv_daemon_*."""
        for name, value in sorted(self._values().items()):
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(f"hybridkv_daemon_{name}", name.replace("_", " "), value=value)


def serve_metrics(values: Callable[[], Mapping[str, float]], port: int) -> str:
    """Serve /metrics on 127.0.0.1 in a thread; returns the URL. A taken port is replaced by a free one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(values))
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError:
        server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
    return f"http://127.0.0.1:{server.server_port}/metrics"
