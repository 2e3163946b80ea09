"""A draft model without meaning that reads hidden states, and the comparison of its KV with that of
a prefill from scratch. As in HashModel, every mistake shows.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend, CausalModel, DraftModel
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from tests.fakes.hash_model import HEAD_DIM, NUM_HEADS, VOCAB, HashModel
from tests.gpu.drive import Served
from tests.parity.dense_attend import DenseAttend

Kv: TypeAlias = dict[int, tuple[Tensor, Tensor]]  # by layer: keys and values, by position


class HiddenDraft:
    """Its KV holds a hash of (hidden state, token), and what it returns is a hash of what it reads.
    Hidden states have the size of HashModel's."""

    def __init__(self, *, index: int = 0, window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(11 + index)
        target = HashModel()
        self.layers: tuple[LayerSpec, ...] = (
            msgspec.structs.replace(target.layers[0], index=index, window=window),
        )
        self.dtype = target.dtype
        self.logits = target.logits
        self._hidden_size = target.hidden_size
        self._phases = torch.randn(VOCAB, HEAD_DIM, generator=generator, dtype=self.dtype)
        self._mix = torch.randn(self._hidden_size, HEAD_DIM, generator=generator, dtype=self.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        assert hidden is not None
        values = torch.sin(self._phases[input_ids] + hidden @ self._mix + positions[:, None])
        heads = values.new_zeros((len(values), NUM_HEADS + 2, HEAD_DIM))
        heads[:, -1] = values
        read = attend(self.layers[0], AttentionInputs(heads)).flatten(1)
        return torch.cat((read, read.roll(1, dims=1)), dim=1)[:, : self._hidden_size]


class HiddenModules:
    """Several of them as one draft model."""

    def __init__(self, num: int) -> None:
        self.modules = [HiddenDraft(index=index) for index in range(num)]
        self.layers = tuple(layer for module in self.modules for layer in module.layers)
        self.dtype = self.modules[0].dtype
        self.forward = self.modules[0].forward
        self.logits = self.modules[0].logits


def text_of(asked: AdmitRequest, served: Served) -> list[int]:
    return [*array_i32(asked.prompt_ids).tolist(), *served.outputs[asked.request_id, 0]]


def target_hidden(target: CausalModel, text: list[int]) -> Tensor:
    """[len(text), hidden]"""
    return target.forward(torch.tensor(text), torch.arange(len(text)), DenseAttend())


def scratch_kv(model: DraftModel, ids: Tensor, hidden: Tensor) -> Kv:
    """The keys and values of each layer after a prefill of `ids`, at positions from 0 on."""
    return scratch_run(model, ids, hidden)[1]


def scratch_run(model: DraftModel, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Kv]:
    """The same, and what the model returned."""
    attend = DenseAttend()
    hidden = model.forward(ids, torch.arange(len(ids)), attend, hidden=hidden)
    return hidden, {index: (attend.keys[index], attend.values[index]) for index in attend.keys}


def pool_kv(
    executor: TorchExecutor, text: list[int], *, group: int = 0, first: int = 0
) -> Kv | None:
    """The draft KV of the row that holds `text`, by layer, at every position from `first` to the
    last but one. None if the row was given to another request. All layers are in one group."""
    state = executor._runner.state
    assert state.draft_pools is not None
    positions = torch.arange(len(text) - 1)
    for row in range(1, len(state.pools.page_tables[0])):
        slots = state.pools.slots(0, torch.full_like(positions, row), positions)
        if state.pools.token_pool[slots].tolist() == text[:-1]:
            layers = state.draft_pools.layers
            slots = state.pools.slots(group, torch.full_like(positions, row), positions)[first:]
            return {index: (kv.keys[slots], kv.values[slots]) for index, kv in layers.items()}
    return None
