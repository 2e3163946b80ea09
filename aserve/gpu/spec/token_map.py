"""A drafter's head over the most frequent tokens alone: FR-Spec (Zhao et al., 2025).

The head is most of a small drafter's work, and most of its rows are tokens that text hardly ever
has. With the ids of the frequent tokens, the drafter computes their logits alone:

    logits[j] = head[ids[j]] . hidden        [draft vocab]

It then never drafts any other token. The model still emits all of them: a token outside the map
ends the accepted drafts of its window, and answers stay the same.

A map is a file as FR-Spec and SGLang have it: a tensor or a list of token ids, saved by torch.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.spec.checkpoint import decoder_of
from aserve.gpu.spec.request import TOKEN_MAP, TOKEN_MAP_OPTION

# The errors of torch.load for files that are something else, or hold more than values.
UNREADABLE = (
    *(OSError, ValueError, TypeError, RuntimeError, EOFError),
    torch.serialization.pickle.UnpicklingError,  # type: ignore[attr-defined]  # torch's import
)
ROWS_AT_ONCE = 256  # of the identity that reads the head


def read_token_map(path: Path, *, vocab_size: int) -> Tensor:
    """Returns the ids in `path`, ascending, int64 [draft vocab] on the host."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        ids = torch.as_tensor(stored)
    except UNREADABLE:
        _refuse(path, "it is not a tensor or a list of token ids, as torch.save writes them")
    if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int64, torch.int32):
        _refuse(path, f"it has {ids.dtype} values of the shape {tuple(ids.shape)}, not token ids")
    ids = ids.to(torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        _refuse(path, f"it has ids outside the model's {vocab_size} tokens")
    unique: Tensor = ids.unique()
    if len(unique) < len(ids):
        _refuse(path, f"{len(ids) - len(unique)} of its ids are there more than once")
    return unique


def reduced(decoder: DraftDecoder, token_ids: Tensor, plan: LoadPlan) -> DraftDecoder:
    """Returns the same drafter with logits of the tokens `token_ids` alone.

    Where the drafter has no head of its own, the logits are those that the target gives to these
    tokens, with its scale and cap.
    """
    ids = token_ids.to(plan.target.device)
    if decoder.head is not None:
        head = _rows_of(decoder.head, ids, decoder, plan)
        return dataclasses.replace(decoder, head=head, token_ids=ids)
    whole = decoder_of(decoder.target)
    if whole is None:
        raise ConfigError(
            f"{TOKEN_MAP_OPTION}: the drafter has no head of its own, and that of a model without "
            "native code cannot be reduced; leave the option out",
            param=TOKEN_MAP,
        )
    target = copy.copy(whole)
    target.head = _rows_of(whole.head, ids, decoder, plan)
    target.vocab_size = len(ids)
    return dataclasses.replace(decoder, target=target, token_ids=ids)


def _rows_of(head: LinearOp, ids: Tensor, decoder: DraftDecoder, plan: LoadPlan) -> LinearOp:
    """Returns a layer of some rows of a head without a bias, in the order of `ids`.

    A device packs the weights of its layers in its own way, and a rank has a part of them. So they
    are read through the layer: what it makes of the identity is its weight.
    """
    device = plan.target.device
    identity = torch.eye(decoder.config.hidden_size, dtype=decoder.dtype, device=device)
    columns = [head(part).index_select(1, ids) for part in identity.split(ROWS_AT_ONCE)]
    weight = torch.cat(columns).T.contiguous()
    return plan.target.prepare(Linear(weight), device, dtype=decoder.dtype)


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigError(f"{TOKEN_MAP_OPTION} {path}: {why}", param=TOKEN_MAP)
