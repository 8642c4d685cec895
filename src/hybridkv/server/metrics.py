"""The daemon's counters in Prometheus form, on loopback only."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = frozenset(
    (
        "objects",
        "bytes_committed",
        "bytes_writing",
        "bytes_held",
        "bytes_protected",
        "tenants",
        "lookups_waiting",
        "writes_waiting",
        "bytes_reserved",
        "bytes_arena",
        "sessions",
        "watching",
        "leases",
        "connections",
    )
)
"""Values that may go down; every other value of Daemon.values is a counter, but for those of tiers."""
TIER_GAUGES = frozenset(
    (
        "bytes",
        "bytes_max",
        "bytes_per_second",
        "objects",
        "objects_of_others",
        "jobs_running",
        "discards_waiting",
        "is_open",
        "breaker_open",
    )
)
"""The same of a tier's, whose names begin with "tier_" and the tier's own."""
SHORTAGE_SECONDS = 0.2
"""After a scraper could not be accepted."""


class DaemonCollector(Collector):
    """Reads the daemon's values at scrape time."""

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """One metric per value, named hybridkv_daemon_*."""
        for name, value in sorted(self._values().items()):
            of_tier = name.split("_", 2)[2] if name.startswith("tier_") else ""
            family = GaugeMetricFamily if name in GAUGES or of_tier in TIER_GAUGES else CounterMetricFamily
            yield family(f"hybridkv_daemon_{name}", name.replace("_", " "), value=value)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left; who waits stays in the queue, and would be offered again at once.
            time.sleep(SHORTAGE_SECONDS)
            raise


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


def serve_metrics(values: Callable[[], Mapping[str, float]], port: int) -> str:
    """Serve /metrics on 127.0.0.1 in a thread; returns the URL. A taken port is replaced by a free one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(values))
    application = make_wsgi_app(registry)
    try:
        server = make_server("127.0.0.1", port, application, _Server, _Silent)
    except OSError:
        server = make_server("127.0.0.1", 0, application, _Server, _Silent)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/metrics"
