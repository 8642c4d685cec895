"""Spans to an OpenTelemetry collector (OTLP over HTTP), for `hybridkv serve --traces URL`.

It needs the extra `hybridkv[otel]`. Each lookup is a trace, and its load is a child of it. Jobs of
tiers are traces of their own, because one job serves several lookups.
"""

import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, Status, StatusCode, set_span_in_context
from opentelemetry.trace.span import NonRecordingSpan

from hybridkv import __version__

DELAY_MS = 1000  # Spans are sent so long after the first of a batch.
EXPORT_SECONDS = 5  # A batch that a collector does not take within this time is lost.
CLOCK_STEP_NS = 1_000_000  # Reading both clocks takes less; a larger difference is a step.
SPANS_MAX = 1 << 12  # Spans that wait to be exported; more are dropped and counted.


class _CountingExporter(OTLPSpanExporter):
    left = 0  # Spans that left the processor's queue.

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.left += len(spans)
        return super().export(spans)


class SpanExporter:
    """Takes spans from one thread and never blocks or raises. A library's thread sends them."""

    def __init__(self, url: str, node: str, spans_max: int = SPANS_MAX) -> None:
        resource = Resource.create(
            {"service.name": "hybridkv", "service.version": __version__, "host.name": node}
        )
        self._exporter = _CountingExporter(endpoint=url, timeout=EXPORT_SECONDS)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=spans_max,
                schedule_delay_millis=DELAY_MS,
                max_export_batch_size=min(512, spans_max),
            )
        )
        self._tracer = self._provider.get_tracer("hybridkv.daemon", __version__)
        self._spans_max = spans_max
        self._entered = 0
        self._epoch_ns = 0  # The time of day when the daemon's clock was 0.
        self.dropped = 0  # Spans that were not taken because too many waited.

    def add_span(
        self,
        name: str,
        times: tuple[float, float],
        facts: Mapping[str, str | int],
        parent: object = None,
        error: str = "",
    ) -> SpanContext | None:
        """Add a span. `times` are its begin and end in monotonic seconds.

        Returns the context that its children name as `parent`. None = the span was dropped.
        """
        if self._entered - self._exporter.left >= self._spans_max:
            # The library's queue would drop its oldest span instead, and count nothing.
            self.dropped += 1
            return None
        epoch_ns = time.time_ns() - time.monotonic_ns()
        if abs(epoch_ns - self._epoch_ns) > CLOCK_STEP_NS:
            self._epoch_ns = epoch_ns
        start, end = (self._epoch_ns + int(at * 1e9) for at in times)
        context = None
        if isinstance(parent, SpanContext):
            context = set_span_in_context(NonRecordingSpan(parent))
        attributes = {f"hybridkv.{key}": value for key, value in facts.items()}
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span_context = span.get_span_context()
        self._entered += span_context.trace_flags.sampled
        span.end(end_time=max(start, end))
        return span_context

    def close(self, seconds: float) -> None:
        """Send the remaining spans, if the collector takes them within so many seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(seconds)
