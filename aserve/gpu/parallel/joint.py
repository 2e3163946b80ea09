"""The forward of data-parallel ranks: each computes attention for rows of its own, and all of them
compute each MLP together, of which every rank has a part.

    normed_r  = norm(h_r + attention(h_r))                     on rank r, for its tokens
    x         = the tokens of all ranks                         gathered
    y         = sum over ranks of mlp_part(x)                   as in tensor or expert parallelism
    h_r       = h_r + the rows of y that are the rank's own     sliced

All ranks get the batches of all, so each of them knows how many tokens the others have, and nobody
has to ask. A rank without rows, or whose step has failed, gives zeros or nothing for its tokens,
and takes its part in every MLP: no rank waits for one that has nothing to do. A step that fails in
an MLP leaves what has been gathered for it, and the end of the step goes on from there. So no rank
gathers twice, and the others get the right sums.

The tokens travel in one of two ways, which all ranks choose by the same numbers:

    max   each rank pads its tokens to the largest count m, and all gather the D equal parts
    sum   each rank copies its tokens into a buffer of all t tokens, and all add up the buffers

A collective reads what all D ranks have written. So with the sum at the end of the MLP, `max` reads
D m rows and D times D m rows, and `sum` reads twice D times t rows.

LoRA adapters of an MLP are added to the tokens of all ranks, each to those of its own slot. The
slots travel once in a step, as the tokens do.

Source: SGLang's data-parallel attention (layers/dp_attention.py), which has both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.parallel.collectives import Collectives


class JointForward:
    """The tokens of all ranks in one step. It is written by the executor's thread alone."""

    __slots__ = ("_counts", "_decoder", "_gathered", "_loras", "_num_done", "_ranks", "_slots")

    def __init__(
        self, decoder: Decoder, ranks: Collectives, loras: LoraTables | None = None
    ) -> None:
        self._decoder = decoder
        self._ranks = ranks
        self._loras = loras
        self._counts: tuple[int, ...] | None = None  # None: all have as many as this rank
        self._restart()

    def _restart(self) -> None:
        self._num_done = 0  # MLPs of this step that this rank has computed
        self._slots: Tensor | None = None  # of the tokens of all ranks
        # The tokens of all ranks for the MLP that runs, and the first row of this rank.
        self._gathered: tuple[Tensor, int] | None = None

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def begin(self, counts: tuple[int, ...]) -> None:
        """A step begins, in which the ranks have so many tokens."""
        self._counts = counts
        self._restart()

    def finish(self) -> None:
        """The step has ended. Takes this rank's part in the MLPs that it has not computed.

        NOTE: a step that has failed between two collectives of one MLP, or behind its last one,
        enters too many of them here, and the ranks lose each other.
        """
        assert self._counts is not None
        decoder = self._decoder
        shape = (self._counts[self.rank], decoder.hidden_size)
        nothing = decoder.embeddings.new_zeros(shape)
        if self._loras is not None:
            self._loras.token_slots = None
        for block in decoder.blocks[self._num_done :]:
            self.run(block.mlp, nothing)
        self._counts = None

    def run(self, mlp: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """x [tokens of this rank, hidden] -> the same shape."""
        if self._counts is None:
            self._restart()
        counts = self._counts or (len(x),) * self._ranks.num_ranks
        if any(counts):
            x = self._run(mlp, x, counts)
        self._num_done += 1
        return x

    def _run(self, mlp: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]) -> Tensor:
        loras = self._loras
        if loras is not None and self._slots is None:
            self._slots = self._gather_slots(loras.slots_of(x), counts)
        if self._gathered is None:
            gather = self._gather_padded if pads_to_most(counts) else self._gather_sum
            self._gathered = gather(x, counts)
        every, start = self._gathered
        bound = nullcontext() if loras is None or self._slots is None else loras.bound(self._slots)
        with bound:
            own = mlp(every)[start : start + len(x)]
        self._gathered = None
        return own

    def _gather_padded(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, int]:
        """Returns [ranks * most, hidden], and the first row of this rank."""
        most = max(counts)
        padded = functional.pad(x, (0, 0, 0, most - len(x)))
        every = self._ranks.concat(padded.flatten())
        return every.view(-1, x.shape[1]), self.rank * most

    def _gather_sum(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, int]:
        """Returns [tokens of all ranks, hidden], and the first row of this rank."""
        start = sum(counts[: self.rank])
        own = x.new_zeros((sum(counts), x.shape[1]))
        own[start : start + len(x)] = x
        return self._ranks.sum(own), start

    def _gather_slots(self, slots: Tensor, counts: Sequence[int]) -> Tensor:
        """slots int64 [tokens of this rank] -> those of the tokens that the MLP gets."""
        most = max(counts)
        every = self._ranks.concat(functional.pad(slots, (0, most - len(slots))))
        if pads_to_most(counts):
            return every
        parts = zip(every.view(-1, most), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])


def pads_to_most(counts: Sequence[int]) -> bool:
    """Returns whether padding to the largest count moves no more rows than the sum does."""
    return (1 + len(counts)) * max(counts) <= 2 * sum(counts)


class JointDecoder:
    """A `CausalModel` whose MLPs all ranks compute together."""

    def __init__(
        self, model: CausalModel, ranks: Collectives, loras: LoraTables | None = None
    ) -> None:
        """Raises ConfigError for a model that is not divided in this way."""
        if not isinstance(model, Decoder):
            raise ConfigError(
                "--enable-dp-attention is for models of native code that generate text, with an "
                "MLP or experts behind the attention of each layer; leave it out",
                param="enable_dp_attention",
            )
        self.layers = model.layers
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.max_model_len = model.max_model_len
        self.dtype = model.dtype
        self.joint = JointForward(model, ranks, loras)
        self._decoder = model

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        decoder = self._decoder
        hidden = decoder.embed(input_ids)
        normed = decoder.first_norm(hidden)
        cos_sin = [rotary.at(positions) for rotary in decoder.rotaries]
        for index, block in enumerate(decoder.blocks):
            hidden, normed = block.attended(hidden, normed, cos_sin[block.rotary], attend)
            change = self.joint.run(block.mlp, normed)
            hidden, normed = block.before_next(hidden, block.after_mlp(change))
            if capture is not None and index in capture.layer_ids:
                capture.layers.append(hidden)
        if capture is not None and capture.wants_before_norm:
            capture.before_norm = hidden
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)
