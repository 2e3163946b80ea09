"""Rates that a device reaches: bytes per second of a copy, operations per second of a product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from aserve.bench.result import median

WARM_UPS = 3
TRIES = 20


def copy_rate(size_bytes: int, where: torch.device) -> float:
    """Bytes per second of one large copy within the device, those read and those written; the
    median of the tries. The values are random, and no cache holds both buffers.
    """
    source = torch.randint(256, (size_bytes,), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return 2 * size_bytes / median(times_s(lambda: target.copy_(source), where))


def matrix_rate(size: int, where: torch.device) -> float:
    """Operations per second of a product of two square matrices of random bfloat16, 2 size**3 each;
    the median of the tries. Zeros would be faster than what a model has.
    """
    left, right = (torch.randn(size, size, device=where).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median(times_s(lambda: torch.mm(left, right, out=out), where))


def times_s(work: Callable[[], object], where: torch.device) -> list[float]:
    """Of each try, by the device's own events where it has such, after some that don't count."""
    for _ in range(WARM_UPS):
        work()
    if where.type != "cuda":
        return [_host_s(work) for _ in range(TRIES)]
    marks = [_marked(work) for _ in range(TRIES)]
    torch.cuda.synchronize(where)
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
