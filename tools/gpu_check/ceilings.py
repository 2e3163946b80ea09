"""Measures the upper bounds of the device: its copy bandwidth and its bfloat16 matmul rate."""

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
