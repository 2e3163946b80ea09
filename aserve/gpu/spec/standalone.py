"""A small language model of the target's vocabulary drafts token by token, with KV of its own.

Its KV at a position depends on the tokens up to there alone, so after a step it computes the step's
own tokens, and drafting goes on from the accepted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import Attend, CausalModel, DraftModel
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.ngram_embedding import id_window_of
from aserve.gpu.models.recurrent import recurrent_layers_of
from aserve.gpu.spec.base import NO_HIDDEN, DraftRows, Drafts, Verified
from aserve.gpu.spec.checkpoint import DRAFT_PATH, check_vocabulary, check_windows
from aserve.gpu.spec.drafting import draw_drafts, extend_inputs
from aserve.gpu.spec.fused_chain import fuse_tokens
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree


class Standalone:
    """A chain of `max_drafts` tokens. It has nothing to relay."""

    __slots__ = ("fields", "inputs", "key_lookahead", "max_drafts", "model", "num_forwards", "tree")

    def __init__(self, model: DraftModel, max_drafts: int) -> None:
        self.model = model
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.inputs = NO_HIDDEN
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = max_drafts + 1

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        token, drafts = rows.roots, []
        for depth in range(1, rows.num_drafts + 1):
            batch = runner.init_forward(rows.tokens_at(depth - 1, token))
            logits = self.model.logits(runner.draft(batch))
            token = draw_drafts(runner, logits, rows, depth)
            drafts.append(token)
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        runner.draft(extend_inputs(step, verified, runner.relay).batch)
        return {}


class PlainDraftModel:
    """A language model as a `DraftModel`, which reads no hidden states of the target."""

    __slots__ = ("dtype", "layers", "logits", "model")

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.layers = model.layers
        self.dtype = model.dtype
        self.logits = model.logits

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        return self.model.forward(input_ids, positions, attend)


def load(request: DraftRequest) -> LoadedDrafter:
    model_dir = request.model_dir(bundled="small_lm")
    loader, code = make_loader(model_dir)
    model = loader.load(request.plan)
    if id_window_of(model) > 1:
        raise ConfigError(
            f"{model_dir}: a model with n-gram embeddings cannot draft, because a draft chain has "
            "no context on the device; use another draft model",
            param=DRAFT_PATH,
        )
    if recurrent_layers_of(model):
        raise ConfigError(
            f"{model_dir}: a model with recurrent layers cannot draft, because its state would "
            "keep the drafts that are not accepted; use another draft model",
            param=DRAFT_PATH,
        )
    check_vocabulary(model_dir, model.vocab_size, request.target)
    check_windows(model_dir, model.layers, request.target)
    draft_model = PlainDraftModel(model)
    num_drafts = request.chain_len(default=4)
    about = f"{num_drafts} tokens of {model_dir.name}, {code.name} code"
    drafter = Standalone(draft_model, num_drafts)
    return LoadedDrafter(drafter, draft_model, about, fuse=partial(fuse_tokens, model))
