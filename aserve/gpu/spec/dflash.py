"""DFlash: one forward drafts a whole block, from the target's hidden states of what is committed.

    c_i   = norm_h(W [h_i of the target's layers])        context features of the positions i < L
    block = [embedding(root), embedding(MASK), ...]       at the positions L to L + B - 1
    each layer: queries of the block, keys and values of the context and of the block
    p(t_{L+j}) = head(norm(x_j)), j = 1 to B - 1          with the target's embeddings and head

The rows of a block see the whole context and one another, in both directions, and row j predicts
the token at its own position. The KV cache of the draft model holds projections of c alone, written
by `extend` without queries. The block's own keys and values stand behind the context for one
forward, and the next `extend` overwrites all of them, as it covers the window's positions.

With fewer drafts than the block has, it is shorter than those that the model was trained on, and so
it is for a row that gets fewer drafts than others of its step.
Source: z-lab/dflash and its checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.config.layer_types import periodic_windows
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, Block
from aserve.gpu.models.decoder_spec import Biases, DecoderSpec, QkNorm
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.spec.base import DraftRows, Drafts, HiddenInputs, Verified
from aserve.gpu.spec.checkpoint import (
    DraftWeights,
    check_layer_ids,
    check_windows,
    decoder_name,
    embedding_factor_of,
    load_draft_model,
    read_draft_config,
    target_embeddings,
)
from aserve.gpu.spec.drafting import draw_drafts, extend_inputs
from aserve.gpu.spec.fused import FusedDrafter
from aserve.gpu.spec.fused_block import FusedBlock
from aserve.gpu.spec.recurrent_model import draft_rotary
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.gpu.weights.source import WeightSource
from aserve.messages.step import DraftTree


class BlockShape(msgspec.Struct, frozen=True):
    block_size: int  # the root included
    mask_id: int
    layer_ids: tuple[int, ...]  # of the target, whose hidden states are the context


class BlockModel:
    """A `DraftModel`, whose forward computes blocks."""

    __slots__ = (*("_fc", "_norm_context", "decoder", "dtype", "forward", "layers", "logits"),)

    def __init__(
        self, config: ModelConfig, shape: BlockShape, weights: DraftWeights, target: CausalModel
    ) -> None:
        source, size, eps = weights.source, config.hidden_size, config.rms_norm_eps
        spec = _decoder_spec(config)

        def norm_weight(name: str) -> Tensor:
            return source.tensor(f"{name}.weight", (size,))

        width = len(shape.layer_ids) * target.hidden_size
        self._fc = source.linear({"fc": size}, in_features=width, bias=weights.has_bias("fc"))
        self._norm_context = source.elementwise.norm(norm_weight("hidden_norm"), eps=eps)
        first_norm = source.elementwise.norm(norm_weight("model.layers.0.input_layernorm"), eps=eps)
        blocks = (Block(index, spec, source, rotary=0) for index in range(config.num_layers))
        self.dtype = source.dtype
        self.decoder = DraftDecoder(
            config,
            target,
            source.dtype,
            target_embeddings(target, config),
            tuple(blocks),
            (draft_rotary(config, source, target),),
            embedding_factor=embedding_factor_of(target),
            first_norm=first_norm,
        )
        self.layers = self.decoder.layers
        self.forward = self.decoder.forward
        self.logits = self.decoder.logits

    def context(self, features: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states [tokens, hidden] -> c [tokens, hidden]."""
        return self._norm_context(self._fc(torch.cat(features, dim=1)))

    def write_context(self, context: Tensor, positions: Tensor, store: Attend) -> None:
        """Stores the keys and values of `context`.

        PERF: the queries of the joined projection are computed and not used.
        """
        cos_sin = self.decoder.rotaries[0].at(positions)
        for block in self.decoder.blocks:
            attention = _attention(block)
            heads = attention.qkv(context).unflatten(1, (-1, attention.layer.head_dim))
            inputs = AttentionInputs(heads, RopeInputs(cos_sin, attention.head_norms))
            store(attention.layer, inputs)


def _decoder_spec(config: ModelConfig) -> DecoderSpec:
    """A Qwen3 decoder, whose rows see one another in both directions."""
    bias = config.attention_bias
    return DecoderSpec(
        config,
        windows=periodic_windows(config.fields, 1),
        mixers=(_bidirectional,) * config.num_layers,
        biases=Biases(qkv=bias, attention_out=bias),
        qk_norm=QkNorm(),
    )


def _bidirectional(index: int, spec: DecoderSpec, weights: WeightSource, /) -> Attention:
    attention = Attention(index, spec, weights)
    attention.layer = msgspec.structs.replace(attention.layer, mask=Mask.NONE)
    return attention


def _attention(block: Block) -> Attention:
    if not isinstance(block.mixer, Attention):
        raise BugError(f"a block drafter has attention in every layer, not {block.mixer}")
    return block.mixer


class BlockDrafter:
    """A chain of `max_drafts` tokens from one forward. It has nothing to relay."""

    __slots__ = (
        *("_mask_id", "_model", "fields", "key_lookahead", "max_drafts", "num_forwards", "tree"),
        "inputs",
    )

    def __init__(self, model: BlockModel, shape: BlockShape, max_drafts: int) -> None:
        self._model = model
        self._mask_id = shape.mask_id
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.inputs = HiddenInputs(shape.layer_ids)
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 1

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        masks = rows.roots.new_full((len(rows.roots), rows.num_drafts), self._mask_id)
        ids = torch.cat((rows.roots[:, None], masks), dim=1)
        batch = runner.init_forward(rows.block_at(0, ids))
        # Without a causal mask, all tokens of a block would see what lies behind a shorter one.
        batch = dataclasses.replace(batch, lens=rows.lens + rows.counts + 1)
        hidden = runner.draft(batch)
        logits = self._model.logits(hidden.view(*ids.shape, -1)[:, 1:].flatten(0, 1))
        by_depth = logits.view(len(ids), rows.num_drafts, -1).unbind(dim=1)
        drafts = [
            draw_drafts(runner, each, rows, depth) for depth, each in enumerate(by_depth, start=1)
        ]
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        inputs = extend_inputs(step, verified, runner.relay)
        store = _store_of(runner, inputs.batch)
        self._model.write_context(
            self._model.context(inputs.features), inputs.batch.rope_positions, store
        )
        return {}


def _store_of(runner: StepRunner, batch: ForwardBatch) -> Attend:
    """Returns what stores keys and values as attention does, and attends to nothing."""
    pools = runner.state.draft_pools
    if pools is None:
        raise BugError("a block drafter needs KV pools for its model")

    def store(layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        kv = pools.layers[layer.index]
        return kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])

    return store


def load(request: DraftRequest) -> LoadedDrafter:
    model_dir, target = request.model_dir(bundled="dflash"), request.target
    config = read_draft_config(model_dir)
    shape = _shape(config, target)
    num_drafts = request.chain_len(default=shape.block_size - 1)
    if num_drafts >= shape.block_size:
        raise ConfigError(
            f"the draft model {model_dir} makes blocks of {shape.block_size} tokens, the root "
            f"included, so at most {shape.block_size - 1} drafts, not {num_drafts}",
            param="speculative_num_steps",
        )
    model = load_draft_model(
        model_dir,
        request.plan,
        lambda weights: BlockModel(config, shape, weights, target),
        rename=decoder_name,
    )
    check_windows(model_dir, model.layers, target)
    about = f"blocks of {num_drafts} tokens of {model_dir.name}"
    drafter = BlockDrafter(model, shape, num_drafts)
    return LoadedDrafter(drafter, model, about, fuse=partial(_fuse, model, shape.mask_id))


def _fuse(
    model: BlockModel, mask_id: int, make: MakeFusedDraft, state: DeviceState
) -> FusedDrafter | None:
    made = make(model.decoder, state)
    if made is None:
        return None
    return FusedBlock(made, state.relay, mask_id=mask_id, context=model.context)


def _shape(config: ModelConfig, target: CausalModel) -> BlockShape:
    """Reads `dflash_config`, or the fields that a config of the speculators library has instead."""
    fields = config.fields
    own = fields.section("dflash_config") if fields.has("dflash_config") else fields
    if own.has("aux_hidden_state_layer_ids"):  # the layers that the streams enter
        layer_ids = tuple(index - 1 for index in own.integers("aux_hidden_state_layer_ids"))
    else:  # the layers that they leave
        layer_ids = own.integers("target_layer_ids")
    if sorted({*layer_ids}) != [*layer_ids]:
        fields.refuse("dflash_config", expected=f"ascending layer ids, not {layer_ids}")
    check_layer_ids(fields, layer_ids, target)
    return BlockShape(
        fields.integer("block_size", minimum=2),
        own.integer("mask_token_id", minimum=0),
        layer_ids,
    )
