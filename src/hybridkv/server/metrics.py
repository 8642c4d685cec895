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
        "bytes_reserved",
        "bytes_arena",
        "sessions",
        "leases",
        "connections",
    )
)
"""Values that may go down; every other value of Daemon.values is a counter."""
SHORTAGE_SECONDS = 0.2
"""After a scraper could not be accepted."""


class DaemonCollector(Collector):
    """Reads the daemon's values at scrape time."""

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """One metric per value, named hybridkv_daemon_*."""
        for name, value in sorted(self._values().items()):
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
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
