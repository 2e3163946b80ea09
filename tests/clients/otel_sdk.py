"""OpenTelemetry's SDK takes the spans of a request: `python otel_sdk.py ADDRESS MODEL`.

It needs no server: the timeline is made here, and the SDK's exporter keeps the spans.
"""

from __future__ import annotations

import sys

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from aserve.errors import QueueFull
from aserve.messages.output import OutputChunk, Usage, failed_chunk
from aserve.messages.requests import SamplingParams
from aserve.observability.latency import Timeline
from aserve.observability.tracing import Tracing, open_tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xyzzy"
STATES = [
    *[("tokenize", 11.0), ("queue_rows", 12.0), ("queue_pages", 13.0), ("prefill", 14.0)],
    *[("decode", 15.0), ("grammar", 16.0), ("decode", 17.0), ("retracted", 18.0)],
    *[("prefill", 19.0), ("decode", 20.0), ("flush", 21.0), ("", 22.0)],
]
PHASES = [
    *("receive", "tokenize", "queue", "prefill", "decode", "retracted"),
    *("prefill", "decode", "flush"),
]
LAST = OutputChunk("r-0", 0, SECRET, b"", Usage(7, 5, 2), finish_reason="stop", is_last=True)


def spans_of(traceparent: str, chunk: OutputChunk, model: str) -> list[ReadableSpan]:
    """Returns the spans in the order in which they began."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sampling = SamplingParams(seed=1, temperature=0.5, max_tokens=9, stop=(SECRET,))
    timeline = Timeline(10.0, sampling, "chat", traceparent)
    for state, at_s in STATES:
        timeline.enter(state, at_s)
    timeline.num_tokens = 5
    tracing = Tracing(provider, model_name=model)
    tracing.record(timeline, chunk)
    tracing.close()
    return sorted(exporter.get_finished_spans(), key=lambda span: (span.start_time, span.end_time))


def check_request(spans: list[ReadableSpan], model: str) -> ReadableSpan:
    """The children lie one after the other in the span of the request."""
    [root] = [span for span in spans if span.name == f"chat {model}"]
    children = [span for span in spans if span is not root]
    assert [span.name for span in children] == PHASES, children
    assert root.kind is SpanKind.SERVER
    times = [root.start_time, *[span.end_time for span in children]]
    assert [span.start_time for span in children] == times[:-1]
    assert times[-1] == root.end_time
    assert all(span.parent.span_id == root.context.span_id for span in children)
    assert SECRET not in "".join(span.to_json() for span in spans)
    return root


def main(_: str, model: str) -> None:
    root = check_request(spans_of(f"00-{TRACE}-{PARENT}-01", LAST, model), model)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.model"] == model
    assert root.attributes["gen_ai.request.max_tokens"] == 9
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.status.status_code is StatusCode.UNSET
    for wrong in ("", "00-nothing", "x" * 55):
        assert check_request(spans_of(wrong, LAST, model), model).parent is None
    failed = failed_chunk("r-0", QueueFull("full").info())
    root = check_request(spans_of("", failed, model), model)
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "queue_full"
    assert spans_of(f"00-{TRACE}-{PARENT}-00", LAST, model) == [], "the client did not sample it"
    open_tracing("http://127.0.0.1:1/v1/traces", model_name=model)


if __name__ == "__main__":
    main(*sys.argv[1:])
