"""Measures decode steps of the large model with quantized weights against the same in bfloat16: the
rate of the executor at the smaller batch sizes, and the bandwidth at which a step of one row reads
its weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from aserve.bench import one_batch
from aserve.bench.one_batch import Measured, Shape
from aserve.bench.result import median
from aserve.gpu.device.cuda.quantized import BITS
from aserve.gpu.weights.fp8 import FP8
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of
from tools.gpu_check.shapes import BYTES_PER_WEIGHT
from tools.gpu_check.worker import NOT_RUN


def measure(setting: Setting, name: str) -> Figures:
    """`name` is a value of --quantization."""
    if setting.device == "cpu" and name == FP8:
        return {NOT_RUN: "the CPU does not multiply fp8"}
    sizes = setting.sizes
    shapes = [Shape(batch, sizes.input_len, sizes.output_len) for batch in sizes.batches[:2]]
    plain = _steps(setting, shapes, {})
    setting.keep({"plain_ms": _ms(plain[shapes[0]])})
    own = _steps(setting, shapes, {"quantization": name})
    figures: Figures = {}
    for shape in shapes:
        batch, step_s = shape.num_rows, median([one.step_s for one in own[shape]])
        plain_s = median([one.step_s for one in plain[shape]])
        figures |= {
            f"tok_s_b{batch}": round(batch / step_s, 1),
            f"gain_b{batch}": round(plain_s / step_s, 3),
        }
    step_bytes = sizes.large.step_bytes * BITS[name] / (8 * BYTES_PER_WEIGHT)
    step_s = median([one.step_s for one in own[shapes[0]]])
    return figures | {"gb_per_s_b1": round(step_bytes / step_s / 1e9, 1)}


def _steps(
    setting: Setting, shapes: list[Shape], options: Mapping[str, object]
) -> Mapping[Shape, list[Measured]]:
    sizes = setting.sizes
    num_rows = max(shape.num_rows for shape in shapes)
    max_len = sizes.input_len + sizes.output_len
    flags = setting.flags(sizes.large, num_rows=num_rows, max_len=max_len)
    resolved = resolved_of({**flags, **options})
    return one_batch.measure(shapes, resolved, repeats=sizes.repeats, prompt_seed=0).batches


def _ms(steps: list[Measured]) -> float:
    return round(median([one.step_s for one in steps]) * 1e3, 3)
