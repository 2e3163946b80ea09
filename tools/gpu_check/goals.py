"""Compares each measure with its goal. A missed goal says by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aserve.gpu.spec.registry import ALGORITHMS
from tools.gpu_check.peers import PEERS
from tools.gpu_check.records import Record
from tools.gpu_check.speculation import BUNDLED

TESTS = "tests"
DRY = "dry run: no verdict"
UNDER = " > "  # between the names of a figure
SERIES: Mapping[str, str] = {
    "": "",
    "_http": " with streaming clients",
    "_two_processes": " with streaming clients, two processes",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a part, with its goal. `figure` is its path of names in the part's figures. At
    most one of `low` and `high` is set; without both the figure is only reported. `beside` are
    published figures of other engines.
    """

    about: str
    part: str
    figure: str
    form: str = "{:,.3f}"
    low: float | None = None
    high: float | None = None
    beside: str = ""

    @property
    def goal(self) -> str:
        if self.low is not None:
            return "at least " + self.form.format(self.low)
        return "at most " + self.form.format(self.high) if self.high is not None else "reported"

    def judge(self, value: float) -> str:
        if self.low is not None and value < self.low:
            return f"missed by {1 - value / self.low:.1%}"
        if self.high is not None and value > self.high:
            return f"missed by {value / self.high - 1:.1%}"
        return "reported" if self.goal == "reported" else "reached"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measure's value and verdict. Without a figure `value` is empty, and `text` says why."""

    measure: Measure
    value: str
    text: str


def _decode(part: str, model: str, lows: Mapping[int, float]) -> Iterator[Measure]:
    for batch, low in lows.items():
        what = f"decode, {model}, batch {batch}"
        over = f"_over_replay_b{batch}"
        yield Measure(f"{what}: executor over the bare replay", part, f"executor{over}", low=low)
        yield Measure(
            f"{what}: engine with actors and text over the bare replay", part, f"engine{over}"
        )
        yield Measure(f"{what}: tokens/s", part, f"executor_tok_s_b{batch}", "{:,.0f}")


def _speculation(name: str) -> Iterator[Measure]:
    part = f"speculation-{name}"
    yield Measure(
        f"{name}, bundled model, float32: outputs that equal plain decoding",
        *(part, "equal_outputs"),
        low=1.0,
    )
    if name in BUNDLED:
        yield Measure(
            f"{name}: verify steps over those of plain PyTorch, difference to 1",
            *(part, "acceptance_error"),
            high=0.02,
        )
    yield Measure(f"{name}: decode steps that are replayed", part, "replayed_share", low=0.9)
    yield Measure(f"{name}, batch 1: tokens/s over plain decoding", part, "gain_b1")
    yield Measure(f"{name}, batch 1: step with drafts over plain step", part, "step_cost_b1")


def _quantized(name: str, low: float) -> Iterator[Measure]:
    part = f"quantized-{name}"
    what = f"weights of {name}, Qwen3-8B shape"
    yield Measure(f"{what}, batch 1: tokens/s over bfloat16", part, "gain_b1", low=low)
    yield Measure(f"{what}, batch 64: tokens/s over bfloat16", part, "gain_b64")
    yield Measure(f"{what}, batch 1: GB/s of weights", part, "gb_per_s_b1", "{:,.0f}")


MEASURES: tuple[Measure, ...] = (
    *_decode("decode-small", "Qwen3-0.6B shape", {1: 0.97, 64: 0.98, 256: 0.98}),
    *_decode("decode-large", "Qwen3-8B shape", {1: 0.98, 64: 0.98, 256: 0.98}),
    *(measure for name in ALGORITHMS for measure in _speculation(name)),
    *_quantized("fp8", 1.6),
    *_quantized("int8", 1.6),
    *_quantized("int4", 2.5),
    Measure(
        "device idle between two decode steps while work waits, us, batch 256",
        *("decode-small", "idle_us_b256", "{:,.1f}"),
        high=15.0,
    ),
    Measure(
        "decode bandwidth, Qwen3-8B shape, batch 1: weight bytes over copy bandwidth",
        *("decode-large", "bandwidth_share_b1"),
        low=0.80,
    ),
    Measure(
        "prefill of 8,192 tokens, Qwen3-8B shape: FLOP/s over the bf16 matrix rate",
        *("prefill", "matrix_share"),
        low=0.60,
    ),
    Measure(
        "prompt of 128 tokens, Qwen3-0.6B shape: time of an eager prefill over one in pieces",
        *("pieces", "gain"),
        low=1.5,
    ),
    Measure(
        "offline, 256 requests of 100 to 1,024 in and out, Qwen3-0.6B shape: output tokens/s",
        *("offline", "output_tok_s", "{:,.0f}"),
        beside="; ".join(f"{peer}: {figure}" for peer, figure in PEERS.items()),
    ),
    Measure(
        "overlap: depth 2 over depth 1, Qwen3-0.6B shape, batch 256",
        *("overlap", "gain"),
        low=1.15,
    ),
    *(
        Measure(
            f"{about}, bundled model, float32: outputs that equal those without ranks",
            *(f"ranks-{name}", "equal_outputs"),
            low=1.0,
        )
        for name, about in (("one", "one rank"), ("two", "two ranks"))
    ),
    Measure("two GPUs over one, Qwen3-0.6B shape: decode tokens/s", "ranks-two", "gain"),
    Measure(
        "256 streaming clients through HTTP over the engine's own rate",
        *("http", "http_over_engine"),
        low=0.90,
    ),
    Measure("seconds until the server is ready, Qwen3-0.6B shape", "start", "ready_s", "{:,.1f}"),
    *(
        Measure(
            f"simulated device busy, 2 steps in flight, {case}{where}",
            *("bench-overlap-sim", f"busy{series} > {case}"),
            low=0.97,
        )
        for series, where in SERIES.items()
        for case in ("2ms/64", "10ms/256")
    ),
    Measure("host step of 256 rows, us", "bench-host-step", "rows > 256", "{:,.0f}", high=1500),
    Measure(
        "relay: event to token, idle loop, p50, us",
        *("bench-relay", "idle > resolve_p50_us", "{:,.0f}"),
        high=300,
    ),
    Measure(
        "relay: event to token, saturated loop, p99, us",
        *("bench-relay", "saturated > resolve_p99_us", "{:,.0f}"),
        high=2000,
    ),
    Measure("copy bandwidth, GB/s read and written", "limits", "copy_gb_per_s", "{:,.0f}"),
    Measure("bf16 matrix rate, TFLOP/s", "limits", "bf16_tflops", "{:,.0f}"),
)


def judge_all(records: Mapping[str, Record]) -> list[Verdict]:
    return [_tests(records), *(_judge(measure, records) for measure in MEASURES)]


def _judge(measure: Measure, records: Mapping[str, Record]) -> Verdict:
    record = records.get(measure.part)
    if record is None:
        return Verdict(measure, "", "not run")
    value = _figure(record, measure)
    if isinstance(value, int | float):
        text = DRY if record.is_dry else measure.judge(value)
        return Verdict(measure, measure.form.format(value), text)
    status = "no figure" if record.status == "done" else record.status
    return Verdict(measure, "", f"{status}: {record.reason}" if record.reason else status)


def _figure(record: Record, measure: Measure) -> object:
    found: object = record.figures
    for name in measure.figure.split(UNDER):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _tests(records: Mapping[str, Record]) -> Verdict:
    """Judges all test files together. Only a file that ran to its end counts as passed."""
    measure = Measure("tests marked gpu that do not pass", TESTS, "", "{:,.0f}", high=0)
    of_tests = [record for name, record in records.items() if name.startswith(f"{TESTS}-")]
    ran = [record for record in of_tests if record.status != "not run"]
    if not ran:
        reasons = sorted({record.reason for record in of_tests})
        return Verdict(measure, "", f"not run: {'; '.join(reasons)}" if reasons else "not run")
    passed, failed = (sum(_count(one, name) for one in ran) for name in ("passed", "failed"))
    lost = [record.part for record in of_tests if record.status != "done"]
    text = "reached" if not failed and not lost else f"missed: {failed} failed"
    if lost:
        text += f", no result of {', '.join(lost)}"
    return Verdict(measure, f"{failed:,} of {passed + failed:,}", text)


def _count(record: Record, name: str) -> int:
    value = record.figures.get(name, 0)
    return value if isinstance(value, int) else 0
