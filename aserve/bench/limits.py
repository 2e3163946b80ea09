"""The machine's memory bandwidth and matrix rate, read from a file or measured."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import read_isa

READ_BYTES = 1 << 28
MATRIX = 2048
TRIES = 3
GIGA = 1e9
READ = re.compile(r"read.*_GBps")
MATMUL = re.compile(r"matmul.*_GFLOPs")


class MachineLimits(msgspec.Struct, frozen=True):
    read_gb_per_s: float
    matmul_gflops: float  # a multiplication and an addition are two operations


class _Rate(msgspec.Struct):
    median: float


def read_limits(path: Path) -> MachineLimits:
    """Reads a JSON object of rates, each a number or {"median": number}. The limits are the largest
    rate named read..._GBps and the largest named matmul..._GFLOPs.
    """
    try:
        rates = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        reads, products = (_rates(rates, names) for names in (READ, MATMUL))
        return MachineLimits(max(reads), max(products))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--limits {path}: no read and matmul rates in it: {error}") from None


def measure_limits() -> MachineLimits:
    """Measures the limits with torch in a second or two. WHY bfloat16 is optional: its products
    take many seconds on a processor without the instructions.
    """
    values = torch.ones(READ_BYTES // 4)
    has_bf16 = read_isa().bf16_products is not None
    dtypes = (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)
    products = [_product_gflops(dtype) for dtype in dtypes]
    return MachineLimits(READ_BYTES / _best_s(values.sum) / GIGA, max(products))


def _product_gflops(dtype: torch.dtype) -> float:
    matrix = torch.ones(MATRIX, MATRIX, dtype=dtype)
    return 2 * MATRIX**3 / _best_s(lambda: matrix @ matrix) / GIGA


def _best_s(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(TRIES):
        start_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _rates(rates: dict[str, msgspec.Raw], names: re.Pattern[str]) -> list[float]:
    found = []
    for name, raw in rates.items():
        if names.fullmatch(name):
            rate = msgspec.json.decode(raw, type=_Rate | float)
            found.append(rate.median if isinstance(rate, _Rate) else rate)
    return found
