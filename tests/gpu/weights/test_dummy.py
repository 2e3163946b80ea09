"""Random weights from a configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.dummy import STD, DummyWeights
from aserve.gpu.weights.source import HOST, LoadProgress, Target
from tests.gpu.weights.checkpoints import write_config
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

IDS = torch.tensor([3, 1, 20, 7])


def logits_of(model: CausalModel) -> Tensor:
    return model.logits(model.forward(IDS, torch.arange(len(IDS)), DenseAttend()))


def source(dtype: torch.dtype = torch.float32) -> DummyWeights:
    return DummyWeights(HOST, dtype=dtype, progress=LoadProgress(0, dtype=dtype))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_configuration_alone_makes_the_same_model_each_time(
    architecture: str, tmp_path: Path
) -> None:
    directory = write_config(tmp_path, architectures=[architecture])
    first, again = (logits_of(load_model(directory, load_format="dummy")) for _ in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, again)


def test_a_weight_depends_on_its_name_and_not_on_what_came_before() -> None:
    late = source()
    late.tensor("a.weight", (5, 7))
    assert torch.equal(late.tensor("b.weight", (5, 7)), source().tensor("b.weight", (5, 7)))
    assert not torch.equal(source().tensor("a.weight", (9,)), source().tensor("b.weight", (9,)))


def test_dtypes_differ_by_rounding_alone() -> None:
    exact, half = source().tensor("w", (4, 4)), source(torch.bfloat16).tensor("w", (4, 4))
    assert torch.equal(exact.to(torch.bfloat16), half)


@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [("mlp.weight", (64, 64), 0.0), ("norm.weight", (4096,), 1.0), ("q_proj.bias", (4096,), 0.0)],
)
def test_matrices_and_biases_lie_around_zero_and_scales_around_one(
    name: str, shape: tuple[int, ...], mean: float
) -> None:
    drawn = source().tensor(name, shape)
    assert drawn.mean().item() == pytest.approx(mean, abs=STD / 8)
    assert drawn.std().item() == pytest.approx(STD, rel=0.1)


def test_every_product_goes_through_the_device_s_own_form(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def noting(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        shapes.append(tuple(linear.weight.shape))
        return prepare(linear, device, dtype=dtype)

    directory = write_config(tmp_path, num_hidden_layers=1)
    load_model(directory, load_format="dummy", target=Target(prepare=noting))
    assert shapes == [(16, 8), (8, 8), (24, 8), (8, 12), (24, 8)]
