"""Experts that a checkpoint has in 4 or 8 bits stay so on the CPU: no weight is widened, and memory
is asked for their bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aserve.gguf.model_dir import gguf_model_dir
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.kernel_linear import QuantLinear
from aserve.gpu.device.cpu.linear import LinearPerExpert
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.weights.experts import StoredExperts
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.int4 import CodedWeight, Method
from aserve.gpu.weights.source import LinearBits, Target
from aserve_kernels.cpu.quant_codes import BYTE_DOTS, dequantized
from tests.gguf_files.files import write_gguf
from tests.gpu.weights.mixtures import COUNT, MODEL, write_mixtures
from tests.gpu.weights.published import in_4_bits
from tests.gpu.weights.test_int4 import CONFIGS
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

TOKENS = torch.arange(20) * 37 % 2048
FREE_BYTES = 1 << 30
BASE = WeightRequest("float32", None, 1, stored_quantization="int4")


@dataclass
class Made:
    """The layers that were made, and the memory that was left beside them."""

    linears: list[LinearOp] = field(default_factory=list)
    grouped: list[GroupedLinearOp] = field(default_factory=list)
    left_bytes: int = 0

    def target(self, request: WeightRequest = BASE) -> Target:
        form = choose_cpu_format(request, read_isa())

        def prepare(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
            self.linears.append(form.prepare(linear, device, dtype=dtype))
            return self.linears[-1]

        def prepare_grouped(
            weights: ExpertWeights, biases: torch.Tensor | None, prepare: Prepare, /
        ) -> GroupedLinearOp:
            self.grouped.append(form.prepare_grouped(weights, biases, prepare))
            return self.grouped[-1]

        def note(_shapes: object, _dtype: object, left_bytes: int) -> None:
            self.left_bytes = left_bytes

        return Target(
            memory_bytes=FREE_BYTES,
            prepare=prepare,
            prepare_grouped=prepare_grouped,
            bits=LinearBits(form.stored_bits, form.factor_bits),
            check_added=note,
        )

    def experts(self) -> list[QuantLinear]:
        found = []
        for layer in self.grouped:
            assert isinstance(layer, LinearPerExpert)
            found += [each for each in layer.experts if isinstance(each, QuantLinear)]
        return found


def error_of(directory: Path, wide: Path, made: Made, request: WeightRequest = BASE) -> float:
    got = logits_of(load_model(directory, target=made.target(request)), TOKENS)
    wanted = logits_of(load_model(wide), TOKENS)
    return float((got - wanted).norm() / wanted.norm())


def refuse(_weight: CodedWeight) -> torch.Tensor:
    raise AssertionError("a weight was widened")


@pytest.mark.parametrize("method", CONFIGS)
def test_experts_of_4_bits_are_never_widened(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, wide = write_mixtures(tmp_path, in_4_bits(method, 32), CONFIGS[method])
    wanted, made = logits_of(load_model(wide), TOKENS), Made()
    monkeypatch.setattr(CodedWeight, "widened", refuse)
    got = logits_of(load_model(own, target=made.target()), TOKENS)
    assert (got - wanted).norm() <= (0.05 if BYTE_DOTS[4] else 1e-3) * wanted.norm()
    assert len(made.experts()) == 2 * COUNT

    quantized = [each for each in made.linears if isinstance(each, QuantLinear)]
    plain = [w for name, w in load_file(wide / "model.safetensors").items() if "_proj" not in name]
    weights = [each.weight for each in quantized]
    held_bytes = sum(each.codes.nbytes + each.factors.nbytes for each in weights)
    held_bytes += 4 * sum(each.numel() for each in plain)
    assert held_bytes == FREE_BYTES - made.left_bytes


def multiply(layer: QuantLinear, x: torch.Tensor) -> torch.Tensor:
    """The product with inputs that are not rounded, which could choose other experts."""
    return x @ dequantized(layer.weight).T + torch.from_numpy(layer.weight.bias)


@pytest.mark.parametrize(("kind", "bits", "most"), [("Q4_0", 4, 1e-5), ("Q8_0", 8, 0.02)])
def test_experts_of_gguf_are_never_widened(
    kind: str, bits: int, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 bits are rounded to a scale for each output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = gguf_model_dir(write_gguf(MODEL, tmp_path / "model.gguf", "qwen3moe", kind=kind))
    made = Made()
    monkeypatch.setattr(StoredExperts, "widened", refuse)
    monkeypatch.setattr(QuantLinear, "__call__", multiply)
    assert error_of(own, own, made) < most
    assert {each.weight.kind.bits for each in made.experts()} == {bits}
    assert len(made.experts()) == 6 * 2 * COUNT


def test_groups_that_cannot_be_multiplied_are_widened_expert_by_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 8 inputs are no whole vector."""
    own, wide = write_mixtures(tmp_path, in_4_bits("awq", 8), CONFIGS["awq"])
    made = Made()
    monkeypatch.setattr(StoredExperts, "widened", refuse)
    assert error_of(own, wide, made) <= 1e-5
    assert not any(isinstance(each, QuantLinear) for each in made.linears)


def test_codes_of_4_bits_are_rounded_to_8_where_that_is_asked_for(tmp_path: Path) -> None:
    own, wide = write_mixtures(tmp_path, in_4_bits("awq", 32), CONFIGS["awq"])
    made = Made()
    assert error_of(own, wide, made, replace(BASE, quantization="int8")) <= 0.05
    assert {each.weight.kind.bits for each in made.experts()} == {8}
