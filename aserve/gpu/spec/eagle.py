"""The draft model of EAGLE-1: one Llama layer that predicts the target's next hidden state.

    x_i     = W [emb(t_{i+1}) ; h_i] + b
    h_{i+1} = layer(x_i)           without an input norm in the first layer and without a final norm
    logits  = the target's head(h_{i+1})

h_i is the target's hidden state after its final norm. Checkpoints have the architecture of the
target or `LlamaForCausalLMEagle`; source: cnets.py of SafeAILab/EAGLE.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.models.config.model import ModelConfig, read_fields
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs
from aserve.gpu.spec.base import AFTER_NORM, HiddenInputs
from aserve.gpu.spec.checkpoint import (
    HEAD,
    DraftWeights,
    check_target_hidden,
    check_vocabulary,
    decoder_name,
    load_draft_model,
    read_draft_config,
)
from aserve.gpu.spec.frozen_kv import is_assistant
from aserve.gpu.spec.frozen_kv import load as load_assistant
from aserve.gpu.spec.recurrent_model import draft_rotary, recurrent_blocks, recurrent_drafter
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.spec.token_map import read_token_map, reduced


class Eagle1Model:
    """A `RecurrentModel`."""

    __slots__ = (
        *("decoder", "dtype", "forward", "hidden_size", "layers", "logits", "token_ids", "inputs"),
    )

    def __init__(
        self, weights: DraftWeights, *, config: ModelConfig, request: DraftRequest
    ) -> None:
        source, size = weights.source, config.hidden_size
        self.dtype = source.dtype
        self.hidden_size = size
        self.inputs: HiddenInputs = AFTER_NORM
        embeddings = weights.embeddings(config, request.target)
        fc = source.linear({"fc": size}, in_features=2 * size, bias=weights.has_bias("fc"))
        blocks = recurrent_blocks(config, weights)
        head: LinearOp | None = None
        if weights.has(HEAD):
            head = source.linear({HEAD: config.vocab_size}, in_features=size, bias=False)
        decoder = DraftDecoder(
            config,
            request.target,
            source.dtype,
            embeddings,
            blocks,
            (draft_rotary(config, source, request.target),),
            JoinedInputs(projection=fc),
            head=head,
        )
        self.take(decoder)

    def take(self, decoder: DraftDecoder) -> None:
        """Sets the layers."""
        self.decoder = decoder
        self.token_ids = decoder.token_ids
        self.layers = decoder.layers
        self.forward = decoder.forward
        self.logits = decoder.logits

    def fuse(self, features: tuple[Tensor, ...]) -> Tensor:
        (hidden,) = features
        return hidden


def load(request: DraftRequest) -> LoadedDrafter:
    model_dir = request.model_dir(bundled="eagle")
    if is_assistant(read_fields(model_dir)):
        request.refuse_token_map()
        return load_assistant(request)
    config = read_draft_config(model_dir)
    check_vocabulary(model_dir, config.vocab_size, request.target)
    check_target_hidden(config.fields, "hidden_size", config.hidden_size, request.target)
    build = partial(Eagle1Model, config=config, request=request)
    model = load_draft_model(model_dir, request.plan, build, rename=decoder_name)
    if request.options.token_map is not None:
        ids = read_token_map(request.options.token_map, vocab_size=config.vocab_size)
        model.take(reduced(model.decoder, ids, request.plan))
    return recurrent_drafter(model, model_dir, request)
