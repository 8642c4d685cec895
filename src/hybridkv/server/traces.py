"""Spans to an OpenTelemetry collector (OTLP over HTTP), by a thread of its own: `hybridkv serve --traces URL`.

Needs the extra `hybridkv[otel]`.  Each lookup is a trace, its load a child of it; what tiers do are traces of their
own, for one job serves several lookups.
"""

import threading
import time
from collections import OrderedDict

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, Status, StatusCode, set_span_in_context
from opentelemetry.trace.span import NonRecordingSpan

from hybridkv import __version__
from hybridkv.server.spans import Span, Spans

TAKE_SECONDS = 0.5
EXPORT_SECONDS = 5
"""A collector that takes longer loses what it was sent."""
PARENTS_MAX = 4096
"""Spans that others may still belong to."""


class Exporter:
    """Takes spans out of the queue until `close`."""

    def __init__(self, url: str, spans: Spans, node: str) -> None:
        resource = Resource.create({"service.name": "hybridkv", "service.version": __version__, "host.name": node})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS), schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("hybridkv.daemon", __version__)
        self._spans = spans
        self._parents: OrderedDict[int, SpanContext] = OrderedDict()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Send what is left, if the collector takes it in so much time."""
        self._over.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._over.wait(TAKE_SECONDS):
            self._export()
        self._export()
        self._provider.shutdown()

    def _export(self) -> None:
        # The loop's clock is not that of the day.
        epoch = time.time() - time.monotonic()
        for span in self._spans.take():
            self._tell(span, epoch)

    def _tell(self, span: Span, epoch: float) -> None:
        parent = self._parents.get(span.parent)
        context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        facts = {f"hybridkv.{name}": value for name, value in span.facts.items()}
        started, ended = (int((epoch + at) * 1e9) for at in (span.started_at, span.ended_at))
        told = self._tracer.start_span(span.name, context, attributes=facts, start_time=started)
        if span.error:
            told.set_status(Status(StatusCode.ERROR, span.error))
        told.end(end_time=max(started, ended))
        self._parents[span.number] = told.get_span_context()
        if len(self._parents) > PARENTS_MAX:
            self._parents.popitem(last=False)
