"""The draft model of EAGLE-3: a layer over three hidden streams of the target.

    u_i     = W [h_i^low ; h_i^mid ; h_i^high]           the residual streams after three layers
    y_i     = u_i + attention([norm(emb(t_{i+1})) ; norm(u_i)])        queries and keys of 2d inputs
    h_{i+1} = y_i + mlp(norm(y_i))
    logits  = head(norm(h_{i+1}))                        over a reduced vocabulary

While it drafts, h takes the place of u. Further layers, if any, are Llama's. Draft id j is the
target's id j + d2t[j]. Published heads vary:

    norm_before_fc          one norm over the joined streams, before W
    fc_norm, use_aux_norm   one norm for each stream, before W
    norm_before_residual    the residual is norm(u_i) in place of u_i
    norm_output             norm(h) takes the place of u, not h

Sources: cnets.py of SafeAILab/EAGLE; the configs of SpecForge and of vllm-project/speculators. The
latter count a stream by the layer that it enters, the others by the layer that it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.norm import AddNorm, Norm
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Attention
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs, unchanged
from aserve.gpu.spec.base import HiddenInputs
from aserve.gpu.spec.checkpoint import (
    DRAFT_PATH,
    HEAD,
    DraftWeights,
    check_layer_ids,
    check_target_hidden,
    check_vocabulary,
    decoder_name,
    load_draft_model,
    num_layers_of,
    read_draft_config,
    read_integers,
)
from aserve.gpu.spec.recurrent_model import draft_rotary, recurrent_blocks, recurrent_drafter
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    decoder: ModelConfig
    target_hidden_size: int
    layer_ids: tuple[int, ...]  # streams are what leaves these layers, in this order
    draft_vocab_size: int
    joined_norm: bool
    stream_norms: bool
    norm_before_residual: bool
    norm_output: bool


class Eagle3Model:
    """A `RecurrentModel`."""

    __slots__ = (
        *("_fc", "_joined_norm", "_order", "_stream_norms"),
        *("decoder", "dtype", "forward", "hidden_size", "layers", "logits", "token_ids", "inputs"),
    )

    def __init__(
        self,
        weights: DraftWeights,
        *,
        config: Eagle3Config,
        request: DraftRequest,
        token_ids: Tensor | None,
    ) -> None:
        source, size = weights.source, config.decoder.hidden_size
        num_streams = len(config.layer_ids)
        ordered = tuple(sorted({*config.layer_ids}))
        self._order = tuple(map(ordered.index, config.layer_ids))
        self.inputs = HiddenInputs(layer_ids=ordered)
        self.dtype = source.dtype
        self.hidden_size = size
        self.token_ids = token_ids

        def norm(name: str, width: int = size) -> Norm:
            weight = source.tensor(f"{name}.weight", (width,))
            return source.elementwise.norm(weight, eps=config.decoder.rms_norm_eps)

        joined = num_streams * config.target_hidden_size
        self._joined_norm = norm("input_norm", joined) if config.joined_norm else None
        self._stream_norms: tuple[Norm, ...] = ()
        if config.stream_norms:
            names = (f"fc_norm.{number}" for number in range(num_streams))
            self._stream_norms = tuple(norm(name, config.target_hidden_size) for name in names)
        self._fc = source.linear({"fc": size}, in_features=joined, bias=weights.has_bias("fc"))
        embeddings = weights.embeddings(config.decoder, request.target)
        inputs = JoinedInputs(
            norm("model.layers.0.input_layernorm"),
            norm("model.layers.0.hidden_norm"),
            keeps_normed=config.norm_before_residual,
        )
        wide = partial(Attention, width=2 * size)
        blocks = recurrent_blocks(config.decoder, weights, first_mixer=wide)
        last_norm, head = norm("model.norm"), None
        if config.norm_output:
            blocks[-1].before_next = AddNorm(last_norm, scale=1.0)
        if weights.has(HEAD):
            head = source.linear({HEAD: config.draft_vocab_size}, in_features=size, bias=False)
        self.decoder = DraftDecoder(
            config.decoder,
            request.target,
            source.dtype,
            embeddings,
            blocks,
            (draft_rotary(config.decoder, source, request.target),),
            inputs,
            head_norm=unchanged if config.norm_output else last_norm,
            head=head,
            token_ids=token_ids,
        )
        self.layers = self.decoder.layers
        self.forward = self.decoder.forward
        self.logits = self.decoder.logits

    def fuse(self, features: tuple[Tensor, ...]) -> Tensor:
        streams = [features[place] for place in self._order]
        if self._stream_norms:
            pairs = zip(self._stream_norms, streams, strict=True)
            streams = [norm(stream) for norm, stream in pairs]
        joined = torch.cat(streams, dim=1)
        return self._fc(joined if self._joined_norm is None else self._joined_norm(joined))


def load(request: DraftRequest) -> LoadedDrafter:
    model_dir = request.model_dir(bundled="eagle3")
    config = read_config(model_dir, request.target)
    token_ids = _read_token_ids(model_dir, config, request)
    build = partial(Eagle3Model, config=config, request=request, token_ids=token_ids)
    model = load_draft_model(model_dir, request.plan, build, rename=_name)
    return recurrent_drafter(model, model_dir, request)


def read_config(model_dir: Path, target: CausalModel) -> Eagle3Config:
    decoder = read_draft_config(model_dir)
    fields = decoder.fields
    own = fields.merged_with("eagle_config")
    check_vocabulary(model_dir, decoder.vocab_size, target)
    name = "target_hidden_size" if own.has("target_hidden_size") else "hidden_size"
    target_hidden_size = own.integer(name)
    check_target_hidden(own, name, target_hidden_size, target)
    if not own.flag("use_aux_hidden_state", default=True):
        own.refuse("use_aux_hidden_state", expected="true: the drafter reads three hidden streams")
    is_speculators = own.has("speculators_model_type")
    return Eagle3Config(
        decoder=decoder,
        target_hidden_size=target_hidden_size,
        layer_ids=_layer_ids(own, target, first=1 if is_speculators else 0),
        draft_vocab_size=own.integer("draft_vocab_size", default=decoder.vocab_size),
        joined_norm=own.flag("norm_before_fc"),
        stream_norms=own.flag("fc_norm") or own.flag("use_aux_norm"),
        norm_before_residual=own.flag("norm_before_residual", default=is_speculators),
        norm_output=own.flag("norm_output"),
    )


def _layer_ids(fields: Fields, target: CausalModel, *, first: int) -> tuple[int, ...]:
    """Returns the layers after which the streams are read. `first`: the number of the stream that
    leaves the first layer."""
    num_layers = num_layers_of(target)
    layer_ids: tuple[int, ...] = (1, num_layers // 2 - 1, num_layers - 4)
    if fields.has(LAYER_IDS):
        layer_ids = tuple(number - first for number in fields.integers(LAYER_IDS))
    if fields.integer("num_aux_hidden_states", default=len(layer_ids)) != len(layer_ids):
        fields.refuse("num_aux_hidden_states", expected=f"{len(layer_ids)}, as many as layer ids")
    check_layer_ids(fields, layer_ids, target)
    return layer_ids


def _read_token_ids(model_dir: Path, config: Eagle3Config, request: DraftRequest) -> Tensor | None:
    """The target's ids of the reduced vocabulary, int64 [draft vocab]."""
    vocab_size, draft_vocab_size = config.decoder.vocab_size, config.draft_vocab_size
    offsets = read_integers(model_dir, "d2t", torch.device("cpu"))
    if offsets is None:
        if draft_vocab_size == vocab_size:
            return None
        raise ConfigError(
            f"{model_dir}: the drafter has {draft_vocab_size} of the model's {vocab_size} tokens, "
            "but no tensor d2t that names them",
            param=DRAFT_PATH,
        )
    if offsets.shape != (draft_vocab_size,):
        raise ConfigError(
            f"{model_dir}: d2t has the shape {tuple(offsets.shape)}, and draft_vocab_size is "
            f"{draft_vocab_size}",
            param=DRAFT_PATH,
        )
    token_ids = torch.arange(draft_vocab_size, device=offsets.device) + offsets
    if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
        raise ConfigError(
            f"{model_dir}: d2t leads out of the model's {vocab_size} tokens; it must hold the "
            "differences between the target's ids and the drafter's",
            param=DRAFT_PATH,
        )
    return token_ids.to(request.plan.target.device)


def _name(name: str) -> str | None:
    """The name of a tensor in this file. The tables of the vocabulary are read apart."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    if name in ("d2t", "t2d"):
        return None
    layer, _, kind = name.rpartition(".")
    if layer in OLD_NORMS:
        return f"{OLD_NORMS[layer]}.{kind}"
    return decoder_name(name)
