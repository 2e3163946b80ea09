"""Draft models whose output takes the place of the target's hidden states: the layers that they
share, and the drafter that is made of one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from aserve.gpu.layers.rope import Rotary
from aserve.gpu.models.base import CausalModel, DraftModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Block
from aserve.gpu.models.decoder_spec import (
    NORMS_BEFORE,
    Biases,
    DecoderSpec,
    LayerNorms,
    MakeMixer,
    QkNorm,
)
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.spec.base import HiddenInputs
from aserve.gpu.spec.checkpoint import DraftWeights, check_windows, draft_windows
from aserve.gpu.spec.fixed_tree import fixed_tree
from aserve.gpu.spec.fused_chain import fuse_recurrent
from aserve.gpu.spec.recurrent import HIDDEN, RecurrentChain
from aserve.gpu.spec.recurrent_tree import RecurrentTree, TreeShape
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.spec.tree_growth import tree_size
from aserve.gpu.weights.source import WeightSource

DEFAULT_STEPS = 4
WITHOUT_INPUT_NORM = LayerNorms(before_mlp=NORMS_BEFORE.before_mlp)


class RecurrentModel(DraftModel, Protocol):
    decoder: DraftDecoder
    hidden_size: int
    inputs: HiddenInputs
    token_ids: Tensor | None  # int64 [draft vocab], the target's ids; None: the same vocabulary

    def fuse(self, features: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states, [tokens, target hidden] each -> [tokens, hidden]."""


def recurrent_drafter(
    model: RecurrentModel, model_dir: Path, request: DraftRequest
) -> LoadedDrafter:
    """Returns the drafter of a chain or of a tree, as the options ask for."""
    check_windows(model_dir, model.layers, request.target)
    shape = _tree_shape(request)
    max_drafts = request.chain_len(default=DEFAULT_STEPS) if shape is None else shape.num_drafts
    chain = RecurrentChain(
        model,
        max_drafts,
        hidden_size=model.hidden_size,
        inputs=model.inputs,
        token_ids=model.token_ids,
        fuse=model.fuse,
    )
    if shape is None:
        compiled = partial(fuse_recurrent, model.decoder, model.fuse, HIDDEN)
        about = f"{max_drafts} tokens of {model_dir.name}"
        return LoadedDrafter(chain, model, about, fuse=compiled)
    kind = "fixed trees" if request.options.token_tree else "trees"
    about = f"{kind} of {max_drafts} tokens, {shape.depth} deep with {shape.topk} branches, of"
    return LoadedDrafter(RecurrentTree(chain, shape), model, f"{about} {model_dir.name}")


def _tree_shape(request: DraftRequest) -> TreeShape | None:
    options = request.options
    if options.token_tree is not None:
        return fixed_tree(options, request.plan.target.device)
    return None if options.topk in (None, 1) else tree_size(options)


def recurrent_blocks(
    config: ModelConfig, weights: DraftWeights, *, first_mixer: MakeMixer | None = None
) -> tuple[Block, ...]:
    """Returns Llama's layers. The first has no input norm, and no norm follows the last one.

    NOTE: a block owns the norm that follows it, which is the input norm of the next layer. So the
    spec has one layer more than there are, and the last block's spec has no input norms.
    """
    attention = "model.layers.0.self_attn"
    spec = DecoderSpec(
        config,
        windows=(*draft_windows(config.fields), None),
        biases=Biases(
            qkv=weights.has_bias(f"{attention}.q_proj"),
            attention_out=weights.has_bias(f"{attention}.o_proj"),
            mlp=weights.has_bias("model.layers.0.mlp.gate_proj"),
        ),
        qk_norm=QkNorm() if weights.has(f"{attention}.q_norm") else None,
    )
    last = config.num_layers - 1
    blocks = []
    for index in range(config.num_layers):
        norms = WITHOUT_INPUT_NORM if index == last else NORMS_BEFORE
        mixers = (first_mixer,) if first_mixer is not None and index == 0 else ()
        own = msgspec.structs.replace(spec, norms=norms, mixers=mixers)
        blocks.append(Block(index, own, weights.source, rotary=0))
    return tuple(blocks)


def draft_rotary(config: ModelConfig, source: WeightSource, target: CausalModel) -> Rotary:
    """Returns rotary positions as many as the target has: a drafter's own limit says only how far
    it was trained."""
    return Rotary(
        config.rope,
        config.rotary_dim,
        max_model_len=target.max_model_len,
        dtype=source.dtype,
        device=source.device,
    )
