"""Layers of experts in every format of the CPU, and the kernel of CUDA, against plain products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve.gpu.device.cpu.isa import has_tiles, read_isa
from aserve.gpu.device.cpu.kernel_linear import TiledExperts
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.device.cuda.ops import GroupedKernel, prepare_grouped
from aserve.gpu.layers.grouped_linear import Groups, linear_per_expert
from aserve.gpu.layers.linear import prepare
from aserve.gpu.weights.format import WeightRequest

LARGE = 1 << 30  # weights of a model that takes the libraries' products
BASE = WeightRequest("float32", None, 0)
FORMATS = {
    "tiles": BASE,
    "tiles of bfloat16": replace(BASE, dtype="bfloat16"),
    "packed by a library": replace(BASE, num_weights=LARGE),
    "float64": replace(BASE, dtype="float64"),
    "eight bits": replace(BASE, num_weights=LARGE, quantization="int8"),
    "each token alone": replace(BASE, is_deterministic=True),
}
TOLERANCES = {"tiles of bfloat16": 2e-2, "eight bits": 3e-2}
STARTS, ENDS = [0, 4, 4, 7], [4, 4, 5, 9]  # rows 5 and 6 belong to no expert
GROUPS = Groups(*(torch.tensor(bounds, dtype=torch.int32) for bounds in (STARTS, ENDS)))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def expected(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), weights.shape[1])
    for expert, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        y[start:end] = x[start:end].float() @ weights[expert].float().t() + biases[expert].float()
    return y


@pytest.mark.parametrize("name", FORMATS)
def test_each_experts_rows_meet_its_own_weight(name: str) -> None:
    form = choose_cpu_format(FORMATS[name], read_isa())
    x, weights, biases = (
        each.to(form.dtype) for each in (draw(9, 34), draw(4, 40, 34) / 6, draw(4, 40))
    )
    layer = form.prepare_grouped(weights, biases, form.prepare)
    is_tiled = name.startswith("tiles") and has_tiles(form.dtype, read_isa())
    assert isinstance(layer, TiledExperts) == is_tiled
    y = layer(x, GROUPS)
    own = [0, 1, 2, 3, 4, 7, 8]
    tolerance = TOLERANCES.get(name, 1e-5)
    torch.testing.assert_close(
        y[own].float(), expected(x, weights, biases)[own], atol=tolerance, rtol=tolerance
    )


def test_the_kernel_of_cuda_and_the_default_do_the_same() -> None:
    x, weights, biases = draw(9, 34), draw(4, 40, 34) / 6, draw(4, 40)
    kernel = prepare_grouped(weights, biases, prepare)
    assert isinstance(kernel, GroupedKernel)
    own = [0, 1, 2, 3, 4, 7, 8]
    for layer in (kernel, linear_per_expert(weights, biases, prepare)):
        y = layer(x, GROUPS)[own]
        torch.testing.assert_close(y, expected(x, weights, biases)[own], atol=1e-4, rtol=1e-4)
    wide = prepare_grouped(weights.double(), biases.double(), prepare)
    assert not isinstance(wide, GroupedKernel)
