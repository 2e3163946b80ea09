"""Small Llamas in the formats of published quantized checkpoints, drawn at random.

The tensors are written by hand from the formats' descriptions, and what they stand for by plain
loops, so that a reader's mistake is not in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.gpu.weights.checkpoints import llama_weights
from tests.gpu.weights.test_int4 import CONFIGS, tensors_of

HIDDEN, INNER = 256, 128
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 1}
Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Published:
    """`quantize` yields the tensors of a layer, and at last, named "", what they stand for."""

    device_name: str
    config: Mapping[str, Any]
    quantize: Callable[[Tensor, torch.Generator], Tensors] = field(repr=False)


def in_fp8(block: tuple[int, int] | None, suffix: str, *, has_input_scale: bool = False) -> Any:
    """Blocks of (0, 0): one scale for the weight; None: one for each row."""

    def quantize(weight: Tensor, generator: torch.Generator) -> Tensors:
        rows, columns = weight.shape
        height, width = block or (1, columns)
        height, width = height or rows, width or columns
        scales = torch.rand((-(-rows // height), -(-columns // width)), generator=generator) + 0.5
        elements = weight.to(torch.float8_e4m3fn)
        meant = elements.float()
        for row in range(rows):
            for at in range(0, columns, width):
                meant[row, at : at + width] *= scales[row // height, at // width]
        yield "weight", elements
        yield f"weight{suffix}", scales.reshape(()) if block == (0, 0) else scales
        if has_input_scale:
            yield "input_scale", torch.tensor(0.05)
        yield "", meant

    return quantize


def in_4_bits(method: Any, group: int) -> Any:
    def quantize(weight: Tensor, generator: torch.Generator) -> Tensors:
        rows, columns = weight.shape
        group_of = torch.arange(columns, dtype=torch.int32) // group
        shape = (rows, columns // group)
        q = torch.randint(16, (rows, columns), generator=generator)
        zeros = torch.randint(1, 16, shape, generator=generator)
        scales = (torch.rand(shape, generator=generator) + 0.5).to(torch.float16) / 64
        yield from tensors_of(method, q, zeros, scales, group_of)
        yield "", (q - zeros[:, group_of.long()]) * scales[:, group_of.long()].float()

    return quantize


def of_groups(strategy: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FORMATS = {
    "fp8 in blocks": Published("fp8", IN_BLOCKS, in_fp8((128, 128), "_scale_inv")),
    "fp8 per tensor": Published("fp8", STATIC, in_fp8((0, 0), "_scale", has_input_scale=True)),
    "compressed-tensors per tensor": Published(
        "fp8", of_groups("tensor"), in_fp8((0, 0), "_scale")
    ),
    "compressed-tensors per channel": Published(
        "fp8", of_groups("channel"), in_fp8(None, "_scale")
    ),
    "compressed-tensors in blocks": Published(
        "fp8", of_groups("block", block_structure=[128, 128]), in_fp8((128, 128), "_scale")
    ),
    "awq": Published("int4", CONFIGS["awq"], in_4_bits("awq", 128)),
    "gptq": Published("int4", CONFIGS["gptq"], in_4_bits("gptq", 64)),
    "gptq_v2": Published("int4", CONFIGS["gptq_v2"], in_4_bits("gptq_v2", 32)),
    "compressed-tensors of 4 bits": Published(
        "int4", CONFIGS["compressed-tensors"], in_4_bits("compressed-tensors", 128)
    ),
}


def quantized(form: Published) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns a checkpoint, and the weights that its tensors stand for."""
    stored = llama_weights(num_layers=1, hidden_size=HIDDEN, intermediate_size=INNER)
    meant = dict(stored)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in stored if "proj" in name]:
        weight = stored.pop(name) / HIDDEN**0.5
        layer = name.removesuffix(".weight")
        for suffix, tensor in form.quantize(weight, generator):
            if suffix:
                stored[f"{layer}.{suffix}"] = tensor
            else:
                meant[name] = tensor
    return stored, meant
