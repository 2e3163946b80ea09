"""What the device can do at most: copy memory, and multiply matrices of bfloat16; both measured.

It does not know what is compared with it.
"""

from __future__ import annotations

import torch

from aserve.bench.device_rates import copy_rate, matrix_rate
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting


def measure(setting: Setting, _argument: str) -> Figures:
    where = torch.device(setting.device)
    return {
        "copy_gb_per_s": round(copy_rate(setting.sizes.copy_bytes, where) / 1e9, 1),
        "bf16_tflops": round(matrix_rate(setting.sizes.matrix, where) / 1e12, 3),
    }
