"""Fuses a decoder's sums over ranks with the norms behind them (fused_norm.py).

A model is built with products that sum and norms that do not. Here the pairs of a decoder that have
nothing between them are connected. Objects stay what they are, so that new weights find them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.norm import SumAndNorm
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Attention, Block, Decoder
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.device_collectives import DeviceCollectives
from aserve.gpu.parallel.fused_norm import FusedSumNorm, RankAddNorm, with_fusable_norms
from aserve.gpu.parallel.source import SummedLinear
from aserve.gpu.weights.source import Target

logger = logging.getLogger(__name__)


def with_fusable_sums(target: Target, ranks: Collectives) -> Target:
    """Returns the target whose models `with_fused_sums` takes."""
    if not isinstance(ranks, DeviceCollectives):
        return target
    return replace(target, elementwise=with_fusable_norms(target.elementwise, ranks))


def with_fused_sums(model: CausalModel, ranks: Collectives, *, is_plain: bool) -> CausalModel:
    """Fuses the sums of a model in place, if its ranks have a kernel for that. `is_plain`: nothing
    else runs between attention and MLP."""
    if not is_plain or not isinstance(ranks, DeviceCollectives) or ranks.make_fused is None:
        return model
    fused = ranks.make_fused(model.hidden_size, model.dtype)
    count = 0 if fused is None else fuse_sums(model, fused)
    logger.info("sums over ranks that are fused with norms: %d", count)
    return model


def fuse_sums(model: CausalModel, fused: FusedSumNorm) -> int:
    """Returns how many sums are now part of the norm behind them."""
    if not isinstance(model, Decoder) or model.spec.residual_scale != 1.0:
        return 0
    pairs = (pair for block in model.blocks for pair in _pairs(block, model))
    return sum(_fuse(product, norm, fused) for product, norm in pairs)


def _pairs(block: Block, model: Decoder) -> list[tuple[object, SumAndNorm]]:
    """The last product of each sublayer and the norm behind it, where nothing is between them."""
    norms, pairs = model.spec.norms, list[tuple[object, SumAndNorm]]()
    if norms.after_attention is None and isinstance(block.mixer, Attention):
        pairs.append((block.mixer.out, block.before_mlp))
    if norms.after_mlp is None and isinstance(block.mlp, GatedMlp):
        pairs.append((block.mlp.down, block.before_next))
    return pairs


def _fuse(product: object, norm: SumAndNorm, fused: FusedSumNorm) -> bool:
    if not isinstance(product, SummedLinear) or not isinstance(norm, RankAddNorm):
        return False
    if product.bias is not None:
        return False
    product.is_summed_later = True
    norm.fused = fused
    return True
