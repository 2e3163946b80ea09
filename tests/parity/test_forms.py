"""Each form in which the CPU may hold weights against the plain product in float32, on the same
rounded weights: relative in norm over the logits of a prompt and what follows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.linear import prepare_fp16_stored
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.layers.linear import Prepare, prepare
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.source import Target
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import logits_of
from tests.parity.references import MAX_MODEL_LEN, Reference

KINDS = ("llama-tied", "qwen3-tied")


def rounded(reference: Reference, dtype: torch.dtype, directory: Path) -> Path:
    """A copy whose weights are all exact in `dtype`."""
    weights = load_file(reference.directory / "model.safetensors")
    kept = {name: tensor.to(dtype).float() for name, tensor in weights.items()}
    save_file(kept, directory / "model.safetensors")
    (directory / "config.json").write_bytes((reference.directory / "config.json").read_bytes())
    return directory


def form_logits(
    directory: Path, form: Prepare, tokens: Tensor, *, dtype: str = "float32"
) -> Tensor:
    ops = CpuDevice().ops(getattr(torch, dtype), is_deterministic=False)
    target = Target(prepare=form, elementwise=ops.elementwise)
    model = load_model(directory, dtype=dtype, max_model_len=MAX_MODEL_LEN, target=target)
    return logits_of(model, tokens)


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 3e-2)])
def test_half_the_bytes_give_logits_near_those_of_float32(
    kind: str, dtype: str, tolerance: float, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    """float16 is only stored; bfloat16 is what products are of, too."""
    reference = reference_of(kind)
    directory = rounded(reference, getattr(torch, dtype), tmp_path)
    expected = form_logits(directory, prepare, reference.tokens)
    if dtype == "float16":
        got = form_logits(directory, prepare_fp16_stored, reference.tokens)
    else:
        form = choose_cpu_format(WeightRequest("bfloat16", None, 0), read_isa())
        got = form_logits(directory, form.prepare, reference.tokens, dtype="bfloat16")
    assert distance(got, expected) < tolerance
