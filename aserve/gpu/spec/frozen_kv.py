"""A drafter without KV of its own: an assistant of Gemma 4, whose layers have queries only.

    z      = W_pre [sqrt(B) * emb(t) ; h]        with the target's embeddings, of size B
    layer    x = s * (y + norm(mlp(norm(y)))), y = x + norm(attention(norm(x)))
    logits = head(norm(x)), next h = W_post norm(x)

Each layer attends to the keys and values that the target's last layer of the same window stored.
All drafts of a step have the position of the target's last one, L - 1, and see its keys 0 to L - 1.
The first draft is made of the last known token and the target's hidden state at L - 1, after the
final norm; the next ones of the draft before and the drafter's own h. After a step nothing is
computed: the hidden state at the last accepted token is kept.

Some assistants have a head that looks at the tokens of a few clusters only: those of the centroids
that have the largest product with norm(x). Source: gemma4_assistant in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import Rotary
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL, SLIDING
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention, Block
from aserve.gpu.models.decoder_spec import NORMS_AROUND, DecoderSpec, MakeMixer
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs, ScaledSum
from aserve.gpu.spec.base import AFTER_NORM, DraftRows, Drafts, Verified
from aserve.gpu.spec.checkpoint import (
    DRAFT_PATH,
    EMBEDDINGS,
    DraftWeights,
    check_target_hidden,
    check_vocabulary,
    load_draft_model,
    read_draft_config,
    read_integers,
    target_embeddings,
)
from aserve.gpu.spec.drafting import draw_drafts
from aserve.gpu.spec.fused_chain import fuse_frozen
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.weights.source import WeightSource
from aserve.messages.step import DraftTree

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
LAST_HIDDEN = "last_hidden"  # the target's hidden state at each row's last position
ORDERING = "masked_embedding.token_ordering"
DEFAULT_STEPS = 4


class FrozenKv:
    """A `Drafter` of chains."""

    __slots__ = ("fields", "inputs", "key_lookahead", "max_drafts", "model", "num_forwards", "tree")

    def __init__(self, model: AssistantModel, max_drafts: int) -> None:
        self.model = model
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.inputs = AFTER_NORM
        self.fields: tuple[RelayField, ...] = (
            RelayField(LAST_HIDDEN, (model.backbone_size,), model.dtype),
        )
        self.key_lookahead = 0
        self.num_forwards = max_drafts

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        """NOTE: the forwards differ in their token alone, so they share positions and attention."""
        token, drafts = rows.roots, list[Tensor]()
        hidden = runner.relay.read(LAST_HIDDEN, rows.rows)
        batch = runner.init_forward(rows.tokens_at(-1, token))
        attend = runner.draft_attention(batch)
        for depth in range(1, rows.num_drafts + 1):
            normed = self.model.forward(token, batch.rope_positions, attend, hidden=hidden)
            token = draw_drafts(runner, self.model.logits(normed), rows, depth)
            hidden = self.model.next_hidden(normed)
            drafts.append(token)
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        (hidden,) = verified.features
        return {LAST_HIDDEN: hidden.index_select(0, verified.starts + verified.counts - 1)}


class AssistantModel:
    """A `DraftModel`, whose forward returns norm(x)."""

    __slots__ = (
        *("backbone_size", "decoder", "dtype", "forward", "layers", "logits", "next_hidden"),
    )

    def __init__(
        self,
        weights: DraftWeights,
        *,
        config: ModelConfig,
        layers: tuple[LayerSpec, ...],
        target: CausalModel,
        token_ordering: Tensor | None,
    ) -> None:
        source, size, fields = weights.source, config.hidden_size, config.fields
        self.dtype = source.dtype
        self.layers = layers
        self.backbone_size = target.hidden_size
        embeddings = target_embeddings(
            target, dataclasses.replace(config, hidden_size=self.backbone_size)
        )
        wide = 2 * self.backbone_size
        projection = source.linear({"pre_projection": size}, in_features=wide, bias=False)
        parts = {"post_projection": self.backbone_size}
        self.next_hidden = source.linear(parts, in_features=size, bias=False)
        own = source.tensor(f"{EMBEDDINGS}.weight", (config.vocab_size, size))
        head = source.tied_linear("lm_head", own)
        if token_ordering is not None:
            clusters = ClusteredHead(fields, token_ordering, source, hidden_size=size)
            head = clusters.over(head)
        blocks = _blocks(config, layers, source)
        names = [f"model.layers.{layer.index}" for layer in layers]
        scalars = [source.tensor(f"{name}.layer_scalar", (1,)) for name in names]
        first_norm, *norms = (
            source.elementwise.norm(
                source.tensor(f"{name}.weight", (size,)), eps=config.rms_norm_eps
            )
            for name in (*(f"{name}.input_layernorm" for name in names), "model.norm")
        )
        for block, norm, scalar in zip(blocks, norms, scalars, strict=True):
            block.before_next = ScaledSum(norm, scalar)
        self.decoder = DraftDecoder(
            config,
            target,
            source.dtype,
            embeddings,
            blocks,
            tuple(_rotary(config, layer, source, target) for layer in layers),
            JoinedInputs(projection=projection),
            embedding_factor=self.backbone_size**0.5,
            first_norm=first_norm,
            head=head,
            next_hidden=self.next_hidden,
        )
        self.forward = self.decoder.forward
        self.logits = self.decoder.logits


def _rotary(
    config: ModelConfig, layer: LayerSpec, source: WeightSource, target: CausalModel
) -> Rotary:
    return Rotary(
        config.rope if layer.window is None else config.sliding_rope,
        config.rotary_dim,
        max_model_len=target.max_model_len,
        dtype=source.dtype,
        device=source.device,
    )


class ClusteredHead:
    """Admits the tokens of the `top_k` clusters whose centroids have the largest products with the
    hidden state. All clusters have the same number of tokens."""

    __slots__ = ("_centroids", "_cluster_of", "_num", "_top_k")

    def __init__(
        self, fields: Fields, token_ordering: Tensor, source: WeightSource, *, hidden_size: int
    ) -> None:
        """token_ordering int64 [vocab]: the tokens of the first cluster, of the second, ..."""
        self._num = fields.integer("num_centroids")
        self._top_k = fields.integer("centroid_intermediate_top_k")
        vocab_size = len(token_ordering)
        if vocab_size % self._num:
            fields.refuse("num_centroids", expected=f"a divisor of {vocab_size} tokens")
        parts = {"masked_embedding.centroids": self._num}
        self._centroids = source.linear(parts, in_features=hidden_size, bias=False)
        indices = torch.arange(vocab_size, device=token_ordering.device)
        clusters = torch.div(indices, vocab_size // self._num, rounding_mode="floor")
        self._cluster_of = torch.empty_like(clusters).index_copy_(0, token_ordering, clusters)

    def over(self, head: LinearOp) -> LinearOp:
        """Returns the head of all tokens with this mask over its logits."""
        return lambda hidden: self.masked(head(hidden), hidden)

    def masked(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """logits [n, vocab], hidden [n, hidden] -> logits, -inf for tokens of other clusters."""
        products = self._centroids(hidden)
        chosen = products.topk(self._top_k, dim=1).indices
        is_chosen = torch.zeros_like(products, dtype=torch.bool).scatter_(1, chosen, True)
        return logits.masked_fill(~is_chosen[:, self._cluster_of], -torch.inf)


class QueryAttention(Attention):
    """Attention whose keys and values are those of another layer, so that it has queries only."""

    __slots__ = ()

    def __init__(
        self, index: int, spec: DecoderSpec, weights: WeightSource, /, *, layer: LayerSpec
    ) -> None:
        prefix, size = f"model.layers.{index}.self_attn", spec.config.hidden_size
        q_size = layer.num_heads * layer.head_dim
        self.layer = layer
        self.qkv = weights.linear({f"{prefix}.q_proj": q_size}, in_features=size, bias=False)
        weight = weights.tensor(f"{prefix}.q_norm.weight", (layer.head_dim,))
        heads = weight.expand(layer.num_heads, -1)
        self.head_norms = HeadNorms(heads, eps=spec.config.rms_norm_eps)
        self.joint_norm = self.sinks = None
        self.has_query_scale = False
        self.out = weights.linear({f"{prefix}.o_proj": size}, in_features=q_size, bias=False)


def load(request: DraftRequest) -> LoadedDrafter:
    target = request.target
    model_dir = request.model_dir(bundled="frozen_kv")
    config = read_draft_config(model_dir)
    fields = config.fields
    check_vocabulary(model_dir, config.vocab_size, target)
    backbone_size = fields.integer("backbone_hidden_size")
    check_target_hidden(fields, "backbone_hidden_size", backbone_size, target)
    if fields.integer("hidden_size_per_layer_input", default=0, minimum=0):
        fields.refuse("hidden_size_per_layer_input", expected="0: such layers are not supported")
    if fields.flag("enable_moe_block"):
        fields.refuse("enable_moe_block", expected="false: experts are not supported")
    token_ordering = None
    if fields.flag("use_ordered_embeddings"):
        token_ordering = read_integers(model_dir, ORDERING, request.plan.target.device)
    build = partial(
        AssistantModel,
        config=config,
        layers=layers_of(config, target),
        target=target,
        token_ordering=token_ordering,
    )
    model = load_draft_model(
        model_dir, request.plan, build, rename=lambda name: None if name == ORDERING else name
    )
    num_drafts = request.chain_len(default=DEFAULT_STEPS)
    about = f"{num_drafts} tokens of {model_dir.name}"
    compiled = partial(fuse_frozen, model.decoder, LAST_HIDDEN)
    return LoadedDrafter(FrozenKv(model, num_drafts), model, about, fuse=compiled)


def is_assistant(fields: Fields) -> bool:
    """Whether a checkpoint with this config is such a drafter."""
    return fields.text("model_type", default="") in MODEL_TYPES


def layers_of(config: ModelConfig, target: CausalModel) -> tuple[LayerSpec, ...]:
    """Each layer reads what the target's last layer of the same kind reads."""
    kinds = (FULL,) * config.num_layers
    if config.fields.has("layer_types"):
        kinds = config.fields.texts("layer_types", length=config.num_layers)
    layers = []
    for index, kind in enumerate(kinds):
        same = [layer for layer in target.layers if (layer.window is not None) == (kind == SLIDING)]
        if not same:
            raise ConfigError(
                f"{config.fields.source}: layer {index} has {kind}, which no layer of the model "
                "has; use a drafter that was trained for this model",
                param=DRAFT_PATH,
            )
        last = same[-1]
        if last.value_dim is not None:
            raise ConfigError(
                f"{config.fields.source}: the drafter reads the keys and values of the model, "
                "whose KV are latents (MLA); take another --speculative-algorithm",
                param=DRAFT_PATH,
            )
        head_dim = config.head_dim
        if kind == FULL and config.fields.has("global_head_dim"):
            head_dim = config.fields.integer("global_head_dim")
        if head_dim != last.head_dim or config.num_heads % last.num_kv_heads:
            raise ConfigError(
                f"{config.fields.source}: layer {index} has {config.num_heads} heads of {head_dim} "
                f"elements, but reads {last.num_kv_heads} KV heads of {last.head_dim}",
                param=DRAFT_PATH,
            )
        layers.append(
            LayerSpec(
                index=index,
                num_heads=config.num_heads,
                num_kv_heads=last.num_kv_heads,
                head_dim=last.head_dim,
                scale=1.0,
                window=last.window,
                kv_scales=last.kv_scales,
                kv_layer=last.index if last.kv_layer is None else last.kv_layer,
            )
        )
    return tuple(layers)


def _blocks(
    config: ModelConfig, layers: tuple[LayerSpec, ...], source: WeightSource
) -> tuple[Block, ...]:
    """NOTE: a block owns the norm that follows it. Here a factor comes before that norm, so the
    blocks have none, and the spec has one layer more than there are."""
    mixers: list[MakeMixer] = [partial(QueryAttention, layer=layer) for layer in layers]
    spec = DecoderSpec(
        config,
        windows=(*(layer.window for layer in layers), None),
        mixers=tuple(mixers),
        norms=msgspec.structs.replace(NORMS_AROUND, before_attention=None),
    )
    return tuple(Block(layer.index, spec, source, rotary=layer.index) for layer in layers)
