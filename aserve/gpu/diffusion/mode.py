"""`BlockDiffusion`: the decode mode of diffusion language models, which write block after block."""

# Theory of operation
#
# The sequence is cut into blocks from position 0 on, the prompt included. A position sees all
# blocks before its own and the whole of its own, so the KV of a block depends on all its tokens. A
# block begins with what is known of it, which is the end of the prompt or nothing, and a mask in
# each other place. Passes over the block fill the places, the surest first. One pass is one step:
#
#   read     the block's ids and what is still masked, which the last pass left in the relay
#   forward  computes the whole block, and writes its KV, at its place behind the finished blocks
#   draw     a token for each position, with the noise of the position
#   denoise  fills masked places, and may edit filled ones (algorithm.py)
#   publish  the new length, if the pass has filled the last place and so has finished the block;
#            all other passes leave the length as it is
#   stash    the ids and masks for the next pass; after the end of a block these are all masks
#
# The pass that finishes a block has computed its KV with masks among its tokens. The first pass
# over the next block therefore computes the finished one as well: each layer writes the KV of its
# final tokens, and then the next block attends to it. So a block takes no pass more than those that
# fill it. The device alone knows which rows have just finished a block, and a step's shapes come
# from the host. So a pass of this kind, which is called folded, has twice as many tokens, of which
# those of rows that have finished nothing are padding. Up to `max_folded_tokens` a forward mostly
# waits for the weights, so that these tokens cost little. In a larger step it would cost more than
# it saves: there a row with a finished block computes that block alone, and the next one after it.
# Until then the scheduler neither shares the finished block nor counts on its KV
# (`TokenLog.final_len`).
#
# A pass emits the whole block or nothing, so rows whose blocks need different numbers of passes
# share their steps, and prompts are computed beside them. The host launches the next pass before it
# knows the result of this one: it takes pages for the case that this pass ends the block, and tells
# an upper bound of the length. The prompt's last tokens, behind its last whole block, are computed
# with the prompt for the token pool alone: each pass over their block computes their KV anew.
#
# A row that is new to the device, as after a retraction or a failed step, begins its block anew.
# Its result is the same, because nothing but the tokens before the block, the logits and the noise
# of positions has an influence on it.

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.diffusion.algorithm import denoise, draw
from aserve.gpu.diffusion.blocks import (
    IS_FINISHED,
    IS_OPEN,
    NUM_EDITS,
    forward_of,
    read_blocks,
    relay_fields,
)
from aserve.gpu.diffusion.registry import ALGORITHMS, DEFAULT, NAME, Denoising
from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceStep
from aserve.gpu.step.results import Packed, pack
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps, EngineSpec

MAX_FOLDED_TOKENS = 256


class BlockDiffusion:
    """A `DecodeMode`."""

    __slots__ = (
        *("_denoising", "_mask_id", "_max_folded_tokens", "can_fuse", "caps", "fields"),
        *("graph_widths", "num_draft_forwards", "num_forwards"),
    )

    def __init__(
        self,
        denoising: Denoising,
        *,
        block_len: int,
        mask_id: int,
        max_folded_tokens: int = MAX_FOLDED_TOKENS,
    ) -> None:
        self._denoising = denoising
        self._mask_id = mask_id
        self._max_folded_tokens = max_folded_tokens
        self.caps = DecodeCaps(
            min_tokens_per_step=0,
            max_tokens_per_step=block_len,
            root_len=0,
            whole_windows=True,
            block_len=block_len,
        )
        self.can_fuse = False
        self.fields = relay_fields(block_len)
        self.num_forwards = 1
        self.num_draft_forwards = 0
        self.graph_widths: tuple[int, ...] = ()  # its forwards are not those of the plan

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        pass

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        blocks = read_blocks(runner, step, mask_id=self._mask_id)
        is_folded = self._is_folded(step.plan)
        batch, places = forward_of(runner, step, blocks, is_folded=is_folded)
        hidden = runner.forward(batch)
        if not len(blocks.rows):
            publish(step.batch.lens)
            return _packed(blocks.ids, blocks.lens, places > 0)
        settings, plan = self._denoising, step.plan.logits
        drawn = draw(runner, blocks, hidden.index_select(0, places), plan, settings.penalty_lambda)
        after, has_ended = denoise(blocks, drawn, settings, is_folded=is_folded)
        counts = torch.where(has_ended, blocks.block_len - blocks.num_known, 0)
        drafting = step.arrays.ints("drafting")
        publish(step.batch.lens.index_copy(0, drafting, blocks.lens + counts))
        is_open = (after.is_open | has_ended[:, None]).to(torch.int64)
        fields = {
            DRAFTS: after.ids,
            IS_OPEN: is_open,
            NUM_EDITS: after.num_edits.masked_fill(has_ended, 0),
            IS_FINISHED: after.has_finished.to(torch.int64),
        }
        runner.relay.stash(blocks.rows, fields, iteration=step.iteration)
        # What the end of a prompt has taken of a block is not emitted.
        order = (blocks.offsets + blocks.num_known[:, None]).clamp_(max=blocks.block_len - 1)
        is_valid = drawn.is_valid.all(dim=1).repeat_interleave(
            step.arrays.ints("windows"), output_size=len(plan.tokens)
        )
        return _packed(after.ids.gather(1, order), counts, is_valid)

    def _is_folded(self, plan: StepPlan) -> bool:
        num_blocks = int(np.count_nonzero(plan.num_drafts))
        num_tokens = int(plan.query_lens.sum()) + num_blocks * self.caps.block_len
        return num_tokens <= self._max_folded_tokens

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        raise BugError(f"step {held.plan.iteration}: a block diffusion mode holds no rows")


def _packed(tokens: Tensor, counts: Tensor, is_valid: Tensor) -> Packed:
    """tokens int64 [n, block_len], counts int64 [n], is_valid bool [logits rows]."""
    nothing = tokens.new_zeros(0)
    table = nothing.view(0, 0)
    return pack(tokens, counts, Sampled(nothing, is_valid, nothing.float(), table, table.float()))


def diffusion_mode(
    model: CausalModel, denoising: Denoising | None, *, beside: Mapping[str, bool]
) -> BlockDiffusion | None:
    """Returns the mode of a model with block-causal layers, and None for any other model.
    `denoising`: as asked; None: the default. `beside`: options that do not go with blocks, and
    whether they were given."""
    block_lens = {layer.block_len for layer in model.layers if layer.mask is Mask.BLOCK_CAUSAL}
    if not block_lens:
        if denoising is not None:
            message = "--dllm-algorithm is for diffusion language models, and this is none"
            raise ConfigError(f"{message}; leave it out", param=NAME)
        return None
    for option in (option for option, is_given in beside.items() if is_given):
        message = f"{option} does not go with a diffusion language model, which fills blocks"
        raise ConfigError(f"{message}; leave it out")
    if not isinstance(model, Decoder) or len(block_lens) > 1:
        raise BugError(f"a diffusion model is a decoder with blocks of one length, not {model}")
    mask_id = model.spec.config.fields.integer("mask_token_id", minimum=0)
    if mask_id >= model.vocab_size:
        model.spec.config.fields.refuse("mask_token_id", expected="an id of the vocabulary")
    denoising = denoising or ALGORITHMS[DEFAULT]
    return BlockDiffusion(denoising, block_len=block_lens.pop(), mask_id=mask_id)


def in_blocks(spec: EngineSpec) -> EngineSpec:
    """Returns the spec with its context length in whole blocks. Raises ConfigError if a step has no
    room for a block, or if pages and blocks do not end together."""
    block_len, page_size = spec.decode.block_len, spec.page_size
    if page_size % block_len and block_len % page_size:
        raise ConfigError(
            f"--page-size {page_size} and the model's blocks of {block_len} tokens do not end "
            f"together; take a divisor or a multiple of {block_len}",
            param="page_size",
        )
    if spec.max_batched_tokens < block_len:
        raise ConfigError(
            f"--max-num-batched-tokens {spec.max_batched_tokens} is less than a block of the "
            f"model, {block_len} tokens",
            param="max_num_batched_tokens",
        )
    return msgspec.structs.replace(spec, max_model_len=spec.max_model_len // block_len * block_len)
