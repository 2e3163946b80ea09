"""Layers and models that take over the weights of others in place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError, EngineError
from aserve.gpu.device.cpu.kernel_linear import QuantLinear, TiledLinear, with_codes
from aserve.gpu.device.cpu.linear import (
    Fp16StoredLinear,
    PackedLinear,
    PerToken,
    linear_per_expert,
)
from aserve.gpu.device.cpu.ops import CompiledNorm
from aserve.gpu.device.cuda.ops import prepare_grouped
from aserve.gpu.device.cuda.quantized import (
    PrepareQuantized,
    PrepareQuantizedExperts,
    WeightOnlyLinear,
    matrix_of,
)
from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.live_loader import LiveLoader
from aserve.gpu.replace_weights import copies
from aserve.gpu.weight_check import WeightChecker, hashes_of
from aserve.gpu.weights.experts import StoredExperts
from aserve.gpu.weights.quantized import rounded
from aserve.gpu.weights.source import CPU
from aserve.messages.changes import CheckWeights
from aserve_kernels.cpu.gemm import compile_packed_linear
from aserve_kernels.cpu.quant_codes import KINDS
from aserve_kernels.cpu.quant_linear import compile_quant_linear
from aserve_kernels.cpu.rms_norm import compile_rms_norm
from aserve_kernels.reference import rms_norm_ref
from tests.fakes.hash_model import HashModel

LINEARS: tuple[Callable[[Tensor, Tensor], LinearOp], ...] = (
    *(Linear, PackedLinear, Fp16StoredLinear, TiledLinear, QuantLinear.rounded),
    partial(QuantLinear.rounded, bits=4),
    lambda weight, bias: PerToken(Linear(weight, bias)),
)


@dataclass
class Holder:
    layers: list[Linear]
    tables: dict[str, Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """A kernel that another test has compiled for other types compiles no more by itself."""
    compile_packed_linear(torch.float32)
    compile_rms_norm(torch.float32)
    for kind in KINDS:
        compile_quant_linear(torch.float32, kind=kind)


@pytest.mark.parametrize("make", LINEARS)
def test_a_layer_computes_as_the_other_one(make: Callable[[Tensor, Tensor], LinearOp]) -> None:
    old, new = (make(drawn(seed, 32, 64), drawn(seed, 32)) for seed in (1, 2))
    x = drawn(3, 16, 64)
    expected = new(x)
    assert not torch.equal(old(x), expected)
    for copy in list(copies(old, new)):
        copy()
    assert torch.equal(old(x), expected)


def test_tensors_keep_their_addresses_and_norms_their_copies() -> None:
    plain = [CompiledNorm(drawn(seed, 8).bfloat16(), eps=1e-6) for seed in (1, 2)]
    heads = [HeadNorms(drawn(seed, 2, 4), eps=1e-6) for seed in (1, 2)]
    pairs: list[list[CompiledNorm] | list[HeadNorms]] = [plain, heads]
    for norm, other in pairs:
        address = norm.weight.data_ptr()
        for copy in list(copies(norm, other)):
            copy()
        assert norm.weight.data_ptr() == address
        assert torch.equal(norm.weight, other.weight)


def test_a_norm_that_is_a_kernel_with_its_weight_takes_over_the_other_one() -> None:
    """As on CUDA. The check of weights sees them, too."""
    old, new = (partial(rms_norm_ref, weight=drawn(seed, 8), eps=1e-6) for seed in (1, 2))
    weight, expected = old.keywords["weight"], new(drawn(3, 4, 8))
    assert hashes_of(old) != hashes_of(new)
    for copy in list(copies(old, new)):
        copy()
    assert old.keywords["weight"] is weight
    assert torch.equal(old(drawn(3, 4, 8)), expected)
    assert hashes_of(old) == hashes_of(new)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale", [1e-3, 0.4, 9.0])
def test_rounded_weights_of_another_size_are_those_of_the_other_layer(
    bits: int, scale: float
) -> None:
    """The unit of the scales stayed the old one, so products were wrong by a power of two."""
    old, new = (
        QuantLinear.rounded(drawn(seed, 32, 64) * size, None, bits=bits)
        for seed, size in ((1, 1.0), (1, scale))
    )
    x, unit = drawn(3, 16, 64), old.weight.unit
    for copy in list(copies(old, new)):
        copy()
    assert torch.equal(old(x), new(x))
    assert old.weight.unit == unit, "compiled steps have it as a number"


def test_rounded_weights_too_large_for_the_unit_are_refused() -> None:
    old, new = (QuantLinear.rounded(drawn(1, 32, 64) * size, None) for size in (1.0, 99.0))
    with pytest.raises(ConfigError, match="more than 16 times as large"):
        list(copies(old, new))


def test_layers_in_lists_and_dictionaries_are_taken_over() -> None:
    """The tables of n-gram embeddings are a list. They stayed those of the old model."""
    old, new = (Holder([Linear(drawn(n, 2, 4))], {"a": drawn(n, 3)}) for n in (1, 2))
    for copy in list(copies(old, new)):
        copy()
    assert torch.equal(old.layers[0].weight, new.layers[0].weight)
    assert torch.equal(old.tables["a"], new.tables["a"])


@pytest.mark.parametrize("other", [Linear(drawn(1, 3, 4)), Linear(drawn(1, 2, 4).double())])
def test_another_shape_or_dtype_is_refused_before_the_first_copy(other: Linear) -> None:
    with pytest.raises(ConfigError, match="cannot take over"):
        list(copies(Linear(drawn(2, 2, 4)), other))


@pytest.mark.parametrize("layers", [(1, 0), (0, 1)])
def test_codes_of_4_bits_with_offsets_and_without_are_not_taken_over(
    layers: tuple[int, int],
) -> None:
    """A layer of zeros has none; with those of another layer it would compute something else."""
    made = [
        WeightOnlyLinear(matrix_of(rounded(drawn(1, 8, 128) * scale, 4)), None, is_invariant=False)
        for scale in layers
    ]
    with pytest.raises(ConfigError, match="cannot take over"):
        list(copies(*made))


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_with_codes_are_taken_over(bits: int) -> None:
    """As CUDA multiplies them, and as one linear layer for each on the CPU."""
    stacks = [
        StoredExperts(
            tuple(rounded(each, bits) for each in drawn(n, 3, 32, 128)), CPU, torch.float32
        )
        for n in (1, 2)
    ]
    keeps = PrepareQuantized(prepare, None, has_fp8=False, is_invariant=False)
    groups = Groups(*(torch.tensor(each, dtype=torch.int32) for each in ([0, 2, 3], [2, 3, 6])))
    for make, own in (
        (PrepareQuantizedExperts(prepare_grouped, keeps), keeps),
        (linear_per_expert, with_codes(prepare)),
    ):
        old, new = (make(stack, None, own) for stack in stacks)
        for copy in list(copies(old, new)):
            copy()
        x = drawn(3, 6, 128)
        assert torch.equal(old(x, groups), new(x, groups))
        other = make(stacks[0].widened(), None, own)
        with pytest.raises(ConfigError, match="cannot take over"):
            list(copies(old, other))


class UnreadableWeights(WeightChecker):
    def take(self, model: object) -> None:
        raise RuntimeError("out of memory")


async def test_weights_that_cannot_be_read_fail_the_check_alone() -> None:
    loader = LiveLoader(HashModel(), checker=UnreadableWeights())
    died = asyncio.get_running_loop().create_future()
    failure = await loader.run(CheckWeights(1, compares=False), submit=never, died=died)
    assert failure == EngineError("the weights cannot be read: out of memory").info()


def never(job: Callable[[], None]) -> None:
    raise AssertionError("a check of weights takes no turn between two steps")
