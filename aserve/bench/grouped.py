"""`aserve bench grouped` measures the grouped products of a mixture of experts.

One product is that of the up projections of a layer: tokens * top_k rows, sorted by expert, times
[experts, intermediate, hidden]. It is compared with a loop of plain torch over the experts that
have rows, whose bounds are known to the loop. The implementations take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aserve.bench.options import GroupedOptions, integers
from aserve.bench.result import BenchResult, Table, median, progress, spread
from aserve.config import Resolved
from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import has_tiles, read_isa
from aserve.gpu.device.cpu.linear import linear_per_expert, prepare_packed
from aserve.gpu.layers.grouped_linear import GroupedLinearOp, Groups
from aserve.gpu.layers.linear import prepare
from aserve.gpu.moe.dispatch import sort_by_expert
from aserve.gpu.weights.format import parse_dtype

TITLE = "grouped products, us"
LOOP = "loop of torch"

Work = Callable[[], object]


def run(options: GroupedOptions, _resolved: Resolved) -> BenchResult:
    torch.set_num_threads(1)
    token_counts = integers(options.tokens, flag="--tokens")
    _check(options)
    bench = _Bench(options)
    figures: dict[str, Mapping[str, float]] = {}
    rows: list[list[str]] = []
    with torch.inference_mode(), progress(TITLE, len(token_counts)) as done:
        for num_tokens in token_counts:
            num_active, works = bench.works(num_tokens)
            times = _times_us(works, options.repeats, bench.device)
            figures[str(num_tokens)] = {name: median(values) for name, values in times.items()}
            shown = [f"{median(values):,.0f} ±{spread(values):.0%}" for values in times.values()]
            rows.append([str(num_tokens), str(num_active), *shown])
            done()
    note = (
        f"{options.experts} experts of {options.hidden} x {options.intermediate} in "
        f"{options.dtype}, {options.top_k} for each token, on {bench.device.type}, one thread of "
        f"the host; medians of {options.repeats} repeats in turns, ±(largest - smallest) / median"
    )
    columns = ["tokens", "experts with rows", LOOP, *bench.layers]
    return BenchResult({"us": figures}, (Table(TITLE, columns, rows),), (note,))


def _check(options: GroupedOptions) -> None:
    if options.top_k > options.experts:
        raise ConfigError(f"--top-k {options.top_k}: there are {options.experts} --experts")
    is_multiplied = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if options.dtype == "bfloat16" and not is_multiplied:
        raise ConfigError("--dtype bfloat16: oneDNN needs AVX-512 for it; choose float32")


class _Bench:
    def __init__(self, options: GroupedOptions) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(0)
        self._dtype = parse_dtype(options.dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = (options.experts, options.intermediate, options.hidden)
        self._weights = torch.empty(shape, dtype=self._dtype, device=self.device)
        for expert in self._weights:  # one after the other, as float32 takes twice the memory
            expert.copy_(torch.randn(shape[1:], generator=self._generator))
        self.layers = _layers(self._weights)

    def works(self, num_tokens: int) -> tuple[int, dict[str, Work]]:
        """Returns the number of experts with rows, and the call of each implementation."""
        options, draw = self._options, self._generator
        scores = torch.rand(num_tokens, options.experts, generator=draw)
        groups = sort_by_expert(scores.topk(options.top_k).indices, options.experts).groups
        bounds = [*zip(*(each.tolist() for each in groups), strict=True)]
        x = torch.randn(num_tokens * options.top_k, options.hidden, generator=draw)
        x = x.to(self.device, self._dtype)
        there = Groups(*(each.to(self.device) for each in groups))
        works: dict[str, Work] = {LOOP: lambda: _loop(x, self._weights, bounds)}
        for name, layer in self.layers.items():
            works[name] = _bound(layer, x, there)
        return sum(start < end for start, end in bounds), works


def _layers(weights: Tensor) -> dict[str, GroupedLinearOp]:
    """The device's grouped layers by name."""
    if weights.is_cuda:
        from aserve.gpu.device.cuda.ops import prepare_grouped

        return {"triton": prepare_grouped(weights, None, prepare)}
    layers: dict[str, GroupedLinearOp] = {
        "oneDNN per expert": linear_per_expert(weights, None, prepare_packed)
    }
    if has_tiles(weights.dtype, read_isa()):
        from aserve.gpu.device.cpu.kernel_linear import prepare_experts, prepare_tiled

        layers["tiles, one call"] = prepare_experts(weights, None, prepare_tiled)
    return layers


def _bound(layer: GroupedLinearOp, x: Tensor, groups: Groups) -> Work:
    return lambda: layer(x, groups)


def _loop(x: Tensor, weights: Tensor, bounds: list[tuple[int, ...]]) -> Tensor:
    out = x.new_empty(len(x), weights.shape[1])
    for weight, (start, end) in zip(weights, bounds, strict=True):
        if start < end:
            out[start:end] = functional.linear(x[start:end], weight)
    return out


def _times_us(
    works: Mapping[str, Work], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """The first call of each, which may compile, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                times[name].append((time.perf_counter() - start_s) * 1e6)
    return times
