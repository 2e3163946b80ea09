"""Checkpoints of AWQ, GPTQ and compressed-tensors, against the same weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.int4 import Method
from aserve.gpu.weights.source import Target
from aserve_kernels.cpu.quant_codes import BYTE_DOTS
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

GROUP = 16
CONFIGS: dict[Method, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SIZES = {"hidden_size": 32, "intermediate_size": 64}


def packed(values: Tensor, order: list[int] | None = None) -> Tensor:
    """Packs values from 0 to 15 [rows, 8 n] into int32 [rows, n], as a loop over the bits."""
    words = torch.zeros((len(values), values.shape[1] // 8), dtype=torch.int64)
    for bit, place in enumerate(order or range(8)):
        words |= values[:, place::8].long() << (4 * bit)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def tensors_of(
    method: Method, q: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """q [out, in], zeros and scales [out, groups]."""
    if method == "compressed-tensors":
        yield "weight_packed", packed(q)
        yield "weight_scale", scales
        yield "weight_zero_point", packed(zeros.T).T.contiguous()
        yield "weight_shape", torch.tensor(q.shape)
        return
    if method == "awq":
        yield "qweight", packed(q.T.contiguous(), AWQ_ORDER)
        yield "qzeros", packed(zeros.T.contiguous(), AWQ_ORDER)
    else:
        yield "qweight", packed(q).T.contiguous()
        yield "qzeros", packed(zeros.T.contiguous() - int(method == "gptq"))
        yield "g_idx", group_of
    yield "scales", scales.T.contiguous()


def quantized(
    method: Method, *, is_shuffled: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights with their linear layers in 4 bits, and what they stand for."""
    stored = llama_weights(hidden_size=32, intermediate_size=64)
    meant = dict(stored)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in stored if "proj" in name]:
        rows, columns = stored.pop(name).shape
        group_of = torch.arange(columns, dtype=torch.int32) // GROUP
        if is_shuffled:
            group_of = group_of[torch.randperm(columns, generator=generator)]
        shape = (rows, columns // GROUP)
        q = torch.randint(16, (rows, columns), generator=generator)
        zeros = torch.randint(1, 16, shape, generator=generator)
        scales = (torch.rand(shape, generator=generator) + 0.5).to(torch.float16) / 16
        by_input = group_of.long()
        meant[name] = (q - zeros[:, by_input]) * scales[:, by_input].float()
        layer = name.removesuffix(".weight")
        for suffix, tensor in tensors_of(method, q, zeros, scales, group_of):
            stored[f"{layer}.{suffix}"] = tensor
    return stored, meant


def write(directory: Path, method: Method, weights: dict[str, Tensor]) -> Path:
    return write_checkpoint(directory, weights, quantization_config=CONFIGS[method], **SIZES)


@pytest.mark.parametrize(
    ("method", "is_shuffled"),
    [*((method, False) for method in CONFIGS), ("gptq", True), ("gptq_v2", True)],
)
def test_a_model_has_the_weights_that_its_codes_stand_for(
    method: Method, is_shuffled: bool, tmp_path: Path
) -> None:
    """Groups of neighbouring inputs are multiplied as they are, others are widened."""
    stored, meant = quantized(method, is_shuffled=is_shuffled)
    directory = write(tmp_path / "int4", method, stored)
    expected = load_model(write_checkpoint(tmp_path / "wide", meant, **SIZES))
    tokens = torch.arange(10)
    assert torch.equal(logits_of(load_model(directory), tokens), logits_of(expected, tokens))
    request = WeightRequest("float32", None, 1, stored_quantization="int4")
    form = choose_cpu_format(request, read_isa())
    kept = load_model(directory, target=Target(prepare=form.prepare))
    got, wanted = logits_of(kept, tokens), logits_of(expected, tokens)
    error = float((got - wanted).norm() / wanted.norm())
    if is_shuffled:
        assert error <= 1e-6
    else:  # inputs become integers, of 8 or 16 bits
        assert 1e-6 < error <= (0.05 if BYTE_DOTS[4] else 1e-3)


@pytest.mark.parametrize("method", CONFIGS)
def test_a_part_of_a_weight_has_its_own_codes(method: Method, tmp_path: Path) -> None:
    stored, meant = quantized(method)
    name = "model.layers.1.mlp.gate_proj.weight"
    with Checkpoint(write(tmp_path, method, stored), quantization=method) as checkpoint:
        for part in ((slice(4, 7), slice(0, 8)), (slice(0, 12), slice(2, 7))):
            assert torch.equal(checkpoint.read_part(name, part), meant[name][part])


@pytest.mark.parametrize("method", CONFIGS)
def test_a_rank_keeps_the_codes_of_whole_groups(method: Method, tmp_path: Path) -> None:
    stored, meant = quantized(method)
    name = "model.layers.1.mlp.down_proj.weight"  # [32, 64]
    with Checkpoint(write(tmp_path, method, stored), quantization=method) as checkpoint:
        for part in ((slice(8, 16), slice(0, 64)), (slice(0, 32), slice(32, 64))):
            found = checkpoint.read_quantized(name, part)
            assert found is not None
            assert torch.equal(found.widened(), meant[name][part])
        assert checkpoint.read_quantized(name, (slice(0, 32), slice(4, 64))) is None


def test_codes_and_scales_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized("awq")
    name = "model.layers.0.mlp.up_proj"
    for spoiled in ({f"{name}.scales": None}, {f"{name}.scales": torch.ones(3, 64)}):
        kept = {key: value for key, value in {**stored, **spoiled}.items() if value is not None}
        with pytest.raises(ConfigError, match=r"up_proj\.qweight is no weight of 4 bits of awq"):
            load_model(write(tmp_path, "awq", kept))


def test_other_numbers_of_bits_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized("gptq")
    config = {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    with pytest.raises(ConfigError, match=r"awq \(gemm\) or gptq of 4 bits"):
        load_model(write_checkpoint(tmp_path, stored, **config, **SIZES))


def test_another_layout_of_awq_is_refused(tmp_path: Path) -> None:
    stored, _ = quantized("awq")
    config = {"quantization_config": {**CONFIGS["awq"], "version": "gemv"}}
    with pytest.raises(ConfigError, match=r"awq \(gemm\) or gptq of 4 bits"):
        load_model(write_checkpoint(tmp_path, stored, **config, **SIZES))


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("g_idx", torch.zeros(32, dtype=torch.int32), "does not name 2 groups of equal sizes"),
        ("qzeros", torch.zeros((1, 4), dtype=torch.int32), r"zeros of \(32, 1\) do not fit"),
    ],
)
def test_groups_and_zeros_that_do_not_fit_the_scales_are_refused(
    suffix: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    stored, _ = quantized("gptq")
    stored[f"model.layers.0.mlp.up_proj.{suffix}"] = tensor
    with pytest.raises(ConfigError, match=message):
        load_model(write(tmp_path, "gptq", stored))
