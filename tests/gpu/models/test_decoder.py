"""What the decoder promises to those who run it, on a hand-written checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.rope import apply_rope
from aserve.gpu.models.base import CausalModel, HiddenCapture
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

IDS = torch.tensor([5, 0, 23])
POSITIONS = torch.arange(3)


@pytest.fixture
def model(tmp_path: Path) -> CausalModel:
    return load_model(write_checkpoint(tmp_path, llama_weights()))


def test_a_capture_holds_what_was_asked_for_and_changes_nothing(model: CausalModel) -> None:
    capture = HiddenCapture(layer_ids=(1, 0), wants_before_norm=True)
    hidden = model.forward(IDS, POSITIONS, DenseAttend(), capture=capture)
    assert torch.equal(hidden, model.forward(IDS, POSITIONS, DenseAttend()))
    first, last = capture.layers
    assert first.shape == last.shape == (3, 8)
    assert not torch.equal(first, last)
    assert capture.before_norm is not None
    assert torch.equal(capture.before_norm, last)
    assert not torch.equal(capture.before_norm, hidden)
    one_layer = HiddenCapture(layer_ids=(1,))
    model.forward(IDS, POSITIONS, DenseAttend(), capture=one_layer)
    assert len(one_layer.layers) == 1
    assert one_layer.before_norm is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_of_the_models_dtype(dtype: str, tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, llama_weights()), dtype=dtype)
    hidden = model.forward(IDS, POSITIONS, DenseAttend())
    assert hidden.dtype == model.dtype
    logits = model.logits(hidden[:2])
    assert logits.shape == (2, 24)
    assert logits.dtype == model.dtype


def test_no_tokens_give_no_logits(model: CausalModel) -> None:
    def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        return torch.empty_like(inputs.heads[:, : layer.num_heads])

    empty = torch.empty(0, dtype=torch.int64)
    assert model.logits(model.forward(empty, empty, attend)).shape == (0, 24)


class NoHostReads(TorchDispatchMode):
    """Fails where a value of the device would have to reach the host; counts the other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func is not torch.ops.aten._local_scalar_dense.default
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_forward_never_waits_for_the_device(model: CausalModel) -> None:
    def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        assert inputs.rope is not None
        return apply_rope(inputs.heads[:, : -layer.num_kv_heads], inputs.rope)[:, : layer.num_heads]

    with NoHostReads() as mode, torch.inference_mode():
        model.logits(model.forward(IDS, POSITIONS, attend))
    assert mode.num_calls > 0
