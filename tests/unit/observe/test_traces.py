"""Spans, as a collector gets them."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import Client, is_written
from tests.waiting import until

trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
SpanExporter = pytest.importorskip("hybridkv.observe.traces").SpanExporter


class Collector(HTTPServer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Any] = []
        self.services: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    """Takes the batches of spans for a Collector."""

    def do_POST(self) -> None:
        """Keep the spans of one batch."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        batch = trace.ExportTraceServiceRequest.FromString(body)
        assert isinstance(self.server, Collector)
        for resource in batch.resource_spans:
            self.server.services |= {
                attribute.value.string_value
                for attribute in resource.resource.attributes
                if attribute.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{collector.server_port}/v1/traces"
        finally:
            collector.shutdown()
            thread.join()


def facts(span: Any) -> dict[str, Any]:
    return {
        attribute.key.removeprefix("hybridkv."): attribute.value.string_value
        or attribute.value.int_value
        for attribute in span.attributes
    }


def test_a_collector_gets_lookups_loads_and_what_tiers_did(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "daemon.sock")
    with collecting() as (collector, url):
        options = ["--disk", str(tmp_path / "disk"), "--disk-bytes", "16MiB", "--traces", url]
        with ForkedDaemon(socket_path, "16MiB", options=options), Client(socket_path) as client:
            client.store(1, 4)
            until(lambda: is_written(socket_path), "nothing is written")
            with ControlClient(socket_path) as control:
                control.clear_objects()
            assert client.look_up(1, 4, wait_ms=20_000).found.chunks == 4, "from the disk"
            assert client.look_up(2, 4).found.chunks == 0
            names = ("lookup", "load", "tier read", "tier write")
            until(
                lambda: set(names) <= {span.name for span in collector.spans}, "spans do not come"
            )
            until(
                lambda: sum(span.name == "lookup" for span in collector.spans) == 2,
                "a lookup's span does not come",
            )
    hit, miss = sorted(
        (span for span in collector.spans if span.name == "lookup"),
        key=lambda span: span.start_time_unix_nano,
    )
    (load,) = (span for span in collector.spans if span.name == "load")
    assert (facts(hit)["hit_tokens"], facts(hit)["chunks_from_disk"], facts(hit)["engine"]) == (
        512,
        4,
        "client",
    )
    assert facts(miss)["hit_tokens"] == 0
    assert (load.trace_id, load.parent_span_id) == (hit.trace_id, hit.span_id)
    assert miss.trace_id != hit.trace_id
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in collector.spans)
    reads = [span for span in collector.spans if span.name == "tier read"]
    assert all(facts(span)["tier"] == "disk" and facts(span)["bytes"] > 0 for span in reads)
    assert hit.start_time_unix_nano <= min(span.start_time_unix_nano for span in reads)
    assert collector.services == {"hybridkv"}


def test_a_collector_that_is_not_there_keeps_nobody(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "daemon.sock")
    running = ForkedDaemon(
        socket_path, "16MiB", options=["--traces", "http://127.0.0.1:9/v1/traces"]
    )
    with running, Client(socket_path) as client:
        client.store(1, 4)
        assert client.look_up(1, 4).found.chunks == 4


def test_what_nobody_takes_is_bounded() -> None:
    """The collector accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        spans = SpanExporter(url, "node", spans_max=8)
        put = [spans.add_span("lookup", (0.0, 1.0), {"tokens": 1}) for _ in range(100)]
        assert 100 - 2 * 8 <= spans.dropped <= 100 - 8, "one batch is on its way, and one waits"
        assert put.count(None) == spans.dropped
        spans.close(0.1)


def test_a_span_that_is_not_sampled_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans = SpanExporter("http://127.0.0.1:9/v1/traces", "node", spans_max=2)
    for _ in range(5):
        spans.add_span("lookup", (0.0, 1.0), {})
    assert spans.dropped == 0
    spans.close(1.0)


def test_a_url_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--socket", str(tmp_path / "x.sock"), "--ram", "16MiB"]
    assert main([*words, "--traces", "localhost:4318"]) == 2
    assert "http://127.0.0.1:4318/v1/traces" in capsys.readouterr().err
