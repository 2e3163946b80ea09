"""Measures short prompts of the small model, whose forwards take the device less time than their
launches take the host: in captured pieces, and operator by operator.
"""

from __future__ import annotations

from aserve.bench import one_batch
from aserve.bench.one_batch import Shape
from aserve.bench.result import median, spread
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of

OUTPUT_LEN = 2  # the prefill's token, and one decode step


def measure(setting: Setting, _argument: str) -> Figures:
    shape = Shape(1, setting.sizes.input_len, OUTPUT_LEN)
    eager_s = _prefills_s(setting, shape, is_eager=True)
    figures: Figures = {"eager_ms": round(median(eager_s) * 1e3, 3)}
    setting.keep(figures)
    pieces_s = _prefills_s(setting, shape, is_eager=False)
    return figures | {
        "pieces_ms": round(median(pieces_s) * 1e3, 3),
        "gain": round(median(eager_s) / median(pieces_s), 3),
        "spread": round(max(spread(eager_s), spread(pieces_s)), 3),
    }


def _prefills_s(setting: Setting, shape: Shape, *, is_eager: bool) -> list[float]:
    flags = setting.flags(setting.sizes.small, num_rows=1, max_len=shape.input_len + OUTPUT_LEN)
    resolved = resolved_of({**flags, "disable_piecewise_cuda_graph": is_eager})
    repeats = 1 + 2 * setting.sizes.repeats
    found = one_batch.measure([shape], resolved, repeats=repeats, prompt_seed=0)
    return [one.prefill_s for one in found.batches[shape]]
