"""Reads how a checkpoint's linear layers are quantized from config.json's `quantization_config`.

Which layers are not quantized (`ignored_layers`, `modules_to_not_convert`, `ignore`) is not read:
the tensors of each layer say it. Nor is whether scales of activations are static: the checkpoint
has an `input_scale` then.
"""

from __future__ import annotations

from aserve.gpu.models.config.fields import Fields
from aserve.gpu.weights.fp8 import Block, Fp8
from aserve.gpu.weights.int4 import BITS
from aserve.gpu.weights.quantized import Quantization

QUANTIZATION = "quantization_config"
READ = (
    "none, mxfp4, fp8 (E4M3), awq (gemm) or gptq of 4 bits, or compressed-tensors in the formats "
    "pack-quantized of 4 bits or float-quantized: other quantized checkpoints are unsupported"
)


def quantization_of(fields: Fields) -> Quantization | None:
    """Returns how linear layers, or experts, are quantized; None where they are not. Refuses any
    other quantization."""
    if not fields.has(QUANTIZATION):
        return None
    section = fields.section(QUANTIZATION)
    method = section.text("quant_method") if section.has("quant_method") else None
    if method == "mxfp4":
        return "mxfp4"
    if method == "gguf":
        return "gguf"
    if method == "fp8" and section.text("fmt", default="e4m3") in ("e4m3", "float8_e4m3fn"):
        return Fp8(_block(section, "weight_block_size"))
    has_layout = method != "awq" or section.text("version", default="gemm").lower() == "gemm"
    if method in ("awq", "gptq") and section.integer("bits") == BITS and has_layout:
        is_second = section.text("checkpoint_format", default="gptq") == "gptq_v2"
        return "awq" if method == "awq" else "gptq_v2" if is_second else "gptq"
    found = _of_groups(section) if method == "compressed-tensors" else None
    if found is None:
        fields.refuse(QUANTIZATION, expected=READ)
    return found


def _of_groups(section: Fields) -> Quantization | None:
    """Reads a compressed-tensors configuration, whose groups of layers must be alike."""
    groups = section.section("config_groups")
    weights = [groups.section(name).section("weights") for name in groups.names]
    match section.text("format", default=""):
        case "pack-quantized" if all(each.integer("num_bits", default=4) == 4 for each in weights):
            return "compressed-tensors"
        case "float-quantized" | "naive-quantized" if all(map(_is_fp8, weights)):
            blocks = {_block(each, "block_structure") for each in weights}
            return Fp8(blocks.pop()) if len(blocks) == 1 else None
        case _:
            return None


def _is_fp8(weights: Fields) -> bool:
    return weights.text("type", default="") == "float" and weights.integer("num_bits") == 8


def _block(section: Fields, name: str) -> Block | None:
    if not section.has(name):
        return None
    sizes = section.integers(name)
    if len(sizes) != 2 or min(sizes) < 1:
        section.refuse(name, expected="two positive integers")
    return sizes[0], sizes[1]
