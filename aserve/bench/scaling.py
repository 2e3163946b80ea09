"""`aserve bench scaling` measures how cost grows: a decode step with the context, a prefill with
the prompt, a host step with the rows, and start and memory with the size of the model.

Each curve is another benchmark's measurement at several sizes. `report` draws them.
"""

from __future__ import annotations

import asyncio

from aserve.bench import host_step, one_batch
from aserve.bench.chart import CURVES, Curve
from aserve.bench.one_batch import Found, Shape
from aserve.bench.options import HostStepOptions, ScalingOptions, integers
from aserve.bench.result import BenchResult, Table, median, progress
from aserve.bench.roofline import count_parameters
from aserve.bench.server_start import ServerStart, start_server
from aserve.config import Resolved
from aserve.host.hub import resolve_model_dir


def run(options: ScalingOptions, resolved: Resolved) -> BenchResult:
    decodes = [
        Shape(options.decode_rows, length, options.steps + 1)
        for length in integers(options.contexts, flag="--contexts")
    ]
    prefills = [Shape(1, length, 2) for length in integers(options.prefills, flag="--prefills")]
    starts = asyncio.run(_start_curves(options, resolved))  # first, because a start may fail
    found = one_batch.measure(
        [*decodes, *prefills], resolved, repeats=options.repeats, prompt_seed=0, may_leave_out=True
    )
    curves = {
        "decode": _decode_curve(decodes, found),
        "prefill": _prefill_curve(prefills, found),
        "host-step": _host_curve(options),
        **starts,
    }
    left_out = [shape.input_len for shape in found.left_out]
    notes = [f"{resolved.model_name}: {found.about}"]
    if left_out:
        notes.append(f"lengths left out, because they exceed the context or KV cache: {left_out}")
    figures = {"curves": curves, "engine": found.about, "left_out": left_out}
    return BenchResult(figures, tuple(map(_table, curves, curves.values())), tuple(notes))


def _decode_curve(shapes: list[Shape], found: Found) -> Curve:
    """Returns ms per step by tokens of context."""
    return {
        shape.input_len: median([one.step_s for one in found.batches[shape]]) * 1e3
        for shape in shapes
        if shape in found.batches
    }


def _prefill_curve(shapes: list[Shape], found: Found) -> Curve:
    """Returns ms per token by tokens of the prompt."""
    return {
        shape.input_len: median([one.prefill_s for one in found.batches[shape]])
        / shape.input_len
        * 1e3
        for shape in shapes
        if shape in found.batches
    }


def _host_curve(options: ScalingOptions) -> Curve:
    """Returns ms per host step by running requests."""
    found = host_step.measure(HostStepOptions(rows=options.rows, repeats=options.repeats))
    return {
        num_rows: median([one.median_us for one in repeats]) / 1e3
        for num_rows, repeats in found.items()
    }


async def _start_curves(options: ScalingOptions, resolved: Resolved) -> dict[str, Curve]:
    """Returns the seconds until a server is ready and its memory in GB, by million parameters."""
    starts: dict[float, ServerStart] = {}
    models = options.models.split(",") if options.models else [resolved.model_source]
    with progress("starts", len(models)) as done:
        for model in models:
            starts[_millions(model, resolved)] = await start_server(*_flags(model, resolved))
            done()
    return {
        "start": {size: start.ready_s for size, start in sorted(starts.items())},
        "memory": {size: start.memory_bytes / 1e9 for size, start in sorted(starts.items())},
    }


def _flags(model: str, resolved: Resolved) -> list[str]:
    """Returns the flags of `aserve serve` that describe a model."""
    given = resolved.model
    flags = ["--model", model, "--load-format", given.load_format, "--model-impl", given.model_impl]
    flags += ["--dtype", given.dtype]
    if given.max_model_len is not None:
        flags += ["--max-model-len", str(given.max_model_len)]
    return [*flags, "--quantization", given.quantization] if given.quantization else flags


def _millions(model: str, resolved: Resolved) -> float:
    is_dummy = resolved.model.load_format == "dummy"
    counted = count_parameters(resolve_model_dir(model, has_weights=not is_dummy))
    return (counted.body + counted.head) / 1e6


def _table(name: str, curve: Curve) -> Table:
    axes = CURVES[name]
    rows = [[f"{size:,g}", f"{value:,.3f}"] for size, value in curve.items()]
    return Table(axes.title, (axes.x_label, axes.y_label), rows)
