"""Exports OpenTelemetry spans of requests, with --otlp-traces-endpoint: one for the request, and
below it one for each phase of its timeline (see latency.py).

Names and attributes follow the semantic conventions for generative AI. No text is in them. The
packages are those of `aserve[otel]`, and are imported when the option is given.
"""

from __future__ import annotations

import time
from typing import Any

from aserve.errors import ConfigError
from aserve.messages.output import OutputChunk
from aserve.observability.latency import Timeline

NS = 1_000_000_000


class Tracing:
    """`provider` is a TracerProvider of OpenTelemetry's SDK."""

    def __init__(self, provider: Any, *, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("aserve")
        self._model_name = model_name
        self._offset_s = time.time() - time.monotonic()  # to the time since 1970

    def record(self, timeline: Timeline, chunk: OutputChunk) -> None:
        """Makes the spans of a request that has ended, with its last chunk."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": timeline.traceparent})
        span = self._tracer.start_span(
            f"{timeline.operation} {self._model_name}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=self._ns(timeline.started_s),
            attributes=self._attributes(timeline, chunk),
        )
        within = trace.set_span_in_context(span, parent)
        for phase in timeline.phases:
            child = self._tracer.start_span(
                phase.name, context=within, start_time=self._ns(phase.start_s)
            )
            child.end(end_time=self._ns(phase.end_s))
        if chunk.error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, chunk.error.code))
        span.end(end_time=self._ns(timeline.since_s))

    def close(self) -> None:
        """Sends the last spans. NOTE: with a collector that is slow or gone this takes most of a
        minute, since an export under way has no limit but its own, so nobody waits for its end.
        """
        self._provider.shutdown()

    def _attributes(self, timeline: Timeline, chunk: OutputChunk) -> dict[str, Any]:
        sampling, times = timeline.sampling, timeline.times
        end = chunk.error.code if chunk.error is not None else str(chunk.finish_reason)
        attributes = {
            "gen_ai.operation.name": timeline.operation,
            "gen_ai.provider.name": "aserve",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": (end,),
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.usage.input_tokens": chunk.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.num_tokens,
            "gen_ai.latency.e2e": sum(times.values()),
            "aserve.cached_tokens": chunk.usage.cached_tokens,
            "aserve.prefill_chunks": timeline.num_chunks,
            "aserve.retractions": timeline.num_retractions,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if chunk.error is not None:
            attributes["error.type"] = chunk.error.code
        return attributes

    def _ns(self, at_s: float) -> int:
        return int((at_s + self._offset_s) * NS)


def open_tracing(endpoint: str, *, model_name: str) -> Tracing:
    """Raises ConfigError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs a package that is not installed ({error.name}): "
            "pip install 'aserve[otel]'"
        ) from None
    resource = Resource.create({"service.name": "aserve"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, model_name=model_name)
