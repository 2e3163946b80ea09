"""Measures the prefill of one long prompt in one step: its FLOP/s over the matmul rate that the
same process measured. The time is from the launch of the step to its token.
"""

from __future__ import annotations

import torch

from aserve.bench import one_batch
from aserve.bench.device_rates import matrix_rate
from aserve.bench.one_batch import Shape
from aserve.bench.result import median, spread
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of

OUTPUT_LEN = 2  # the prefill's token, and one decode step


def measure(setting: Setting, _argument: str) -> Figures:
    sizes = setting.sizes
    num_tokens = sizes.prefill_len
    rate = matrix_rate(sizes.matrix, torch.device(setting.device))
    flags = setting.flags(sizes.large, num_rows=1, max_len=num_tokens + OUTPUT_LEN)
    shape = Shape(1, num_tokens, OUTPUT_LEN)
    resolved = resolved_of(flags | {"max_num_batched_tokens": num_tokens})
    found = one_batch.measure([shape], resolved, repeats=1 + 2 * sizes.repeats, prompt_seed=0)
    times_s = [one.prefill_s for one in found.batches[shape]]
    flops = sizes.large.prefill_flops(num_tokens)
    return {
        "prefill_ms": round(median(times_s) * 1e3, 3),
        "prefill_tok_s": round(num_tokens / median(times_s), 1),
        "flops": flops,
        "tflops": round(flops / median(times_s) / 1e12, 3),
        "bf16_tflops": round(rate / 1e12, 3),
        "matrix_share": round(flops / median(times_s) / rate, 4),
        "spread": round(spread(times_s), 3),
        "engine": found.about,
    }
