"""Measures a device's rates: bytes per second of a copy and FLOP/s of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from aserve.bench.result import median

WARM_UPS = 3
TRIES = 20


def copy_rate(size_bytes: int, device: torch.device) -> float:
    """Returns the bytes per second, read plus written, of a copy within the device.

    NOTE: the buffers must be larger than the device's caches.
    """
    source = torch.randint(256, (size_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / median(times_s(lambda: target.copy_(source), device))


def matrix_rate(size: int, device: torch.device) -> float:
    """Returns the FLOP/s of a product of two square bfloat16 matrices, which takes 2 size**3
    operations. WHY random values: a device may compute zeros faster.
    """
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median(times_s(lambda: torch.mm(left, right, out=out), device))


def times_s(work: Callable[[], object], device: torch.device) -> list[float]:
    """Runs `work` several times after a warm-up and returns the seconds of each run. On CUDA they
    are measured by events.
    """
    for _ in range(WARM_UPS):
        work()
    if device.type != "cuda":
        return [_host_s(work) for _ in range(TRIES)]
    marks = [_marked(work) for _ in range(TRIES)]
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _marked(work: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    return begin, end


def _host_s(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
