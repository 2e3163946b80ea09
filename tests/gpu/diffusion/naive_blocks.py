"""Block diffusion as one would explain it: one sequence, computed anew from its first token in
every pass; no pages, no KV that stays, no batch.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch

from aserve.gpu.diffusion.registry import Denoising
from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.models.base import CausalModel
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import RowInit
from aserve.scheduling.request import Sequence
from aserve.scheduling.table_writes import row_init
from tests.fakes.hash_model import FlakyModel
from tests.fakes.toy_device import forced_ids
from tests.gpu.naive_sampler import Floats, naive_token
from tests.parity.dense_attend import logits_of

BLOCK_LEN = 4
MASK_ID = 36


def block_model(*, fails: frozenset[int] = frozenset()) -> FlakyModel:
    """A hash model that sees whole blocks."""
    model = FlakyModel(fails)
    model.layers = tuple(
        msgspec.structs.replace(layer, mask=Mask.BLOCK_CAUSAL, block_len=BLOCK_LEN)
        for layer in model.layers
    )
    return model


class Written(NamedTuple):
    outputs: list[int]
    num_passes: int


def write(
    model: CausalModel,
    asked: AdmitRequest,
    denoising: Denoising,
    *,
    child: int = 0,
    block_len: int = BLOCK_LEN,
    mask_id: int = MASK_ID,
) -> Written:
    init = row_init(Sequence(asked, child=child, arrival=0))
    tokens: list[int] = array_i32(asked.prompt_ids).tolist()
    num_passes = 0
    while not _has_ended(asked, tokens[init.prompt_len :]):
        if forced := forced_ids(asked, tokens[init.prompt_len :]):
            tokens += forced
            continue
        start = len(tokens) // block_len * block_len
        block = _Block(tokens[start:], block_len, mask_id)
        is_done = False
        while not is_done:
            logits = logits_of(model, torch.tensor([*tokens[:start], *block.ids]))[start:]
            is_done = block.denoise(logits.double().numpy(), start, init, denoising)
            num_passes += 1
        for token in block.ids[len(tokens) - start :]:
            tokens.append(token)
            outputs = tokens[init.prompt_len :]
            if _has_ended(asked, outputs) or forced_ids(asked, outputs):
                break
    return Written(tokens[init.prompt_len :][: asked.sampling.max_tokens], num_passes)


def _has_ended(asked: AdmitRequest, outputs: list[int]) -> bool:
    assert asked.sampling.max_tokens is not None
    is_stop = bool(outputs) and outputs[-1] in asked.end_ids
    return is_stop or len(outputs) >= asked.sampling.max_tokens


class _Block:
    def __init__(self, known: list[int], block_len: int, mask_id: int) -> None:
        num_open = block_len - len(known)
        self.ids = known + [mask_id] * num_open
        self.num_known = len(known)
        self.open = set(range(len(known), block_len))
        self.num_edits = 0
        self.mask_id = mask_id

    def denoise(self, logits: Floats, start: int, init: RowInit, denoising: Denoising) -> bool:
        """Returns whether this has ended the block."""
        drawn = [self._draw(row, place, start, init, denoising) for place, row in enumerate(logits)]
        changes = {place for place in self.open if drawn[place][1] > denoising.threshold}
        if self.open:
            changes.add(min(self.open, key=lambda place: (-drawn[place][1], place)))
        else:
            self.num_edits += 1
        if denoising.edit_threshold is not None and self.num_edits <= denoising.max_post_edit_steps:
            changes |= {
                place
                for place in range(self.num_known, len(self.ids))
                if place not in self.open
                and drawn[place][1] > denoising.edit_threshold
                and drawn[place][0] != self.ids[place]
            }
        for place in changes:
            self.ids[place] = drawn[place][0]
        self.open -= changes
        may_edit = denoising.edit_threshold is not None
        may_edit &= self.num_edits < denoising.max_post_edit_steps
        return not self.open and not (changes and may_edit)

    def _draw(
        self, logits: Floats, place: int, start: int, init: RowInit, denoising: Denoising
    ) -> tuple[int, float]:
        logits = logits.copy()
        if place:
            logits[self.ids[place - 1]] -= denoising.penalty_lambda
        logits[self.mask_id] = -np.inf
        scaled = logits / (init.temperature or 1)
        token = naive_token(logits, start + place, init)
        return token, float(np.exp(scaled[token] - np.logaddexp.reduce(scaled)))
