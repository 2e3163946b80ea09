"""N-gram embeddings: the embedding of a token depends on the ids before it.

Beside the table of single ids there are S tables for each length n = 2 to N. With the vocabulary
size V, table idx = (n - 2) S + s has M = floor(ratio V) + 2 idx + 1 rows, and the vector of token i
with the ids t is

    row_idx = sum_{j<n} t_{i-j} (V^j mod M)  mod M
    x_i     = mean of embed(t_i) and all table_idx[row_idx] P_idx

The sum ends at the beginning of the sequence, and before an end-of-sequence id: what stood before
does not count. Source: https://arxiv.org/abs/2601.21204, LongCat-Flash-Lite
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.weights.source import WeightSource

# Names of the fields in other checkpoints, by those that are read here.
OTHER_NAMES = {
    "emb_neighbor_num": "oe_neighbor_num",
    "emb_split_num": "oe_split_num",
    "ngram_vocab_size_ratio": "oe_vocab_size_ratio",
}


@runtime_checkable
class ReadsNgrams(Protocol):
    """A `CausalModel` whose `forward` is given int64 [tokens, id_window]: in column j the id that
    stands j places before the token, or -1 before the beginning."""

    @property
    def id_window(self) -> int: ...


def id_window_of(model: CausalModel) -> int:
    """The number of ids that the embedding of a token depends on."""
    return model.id_window if isinstance(model, ReadsNgrams) else 1


class NgramEmbedding:
    """All tables but that of single ids."""

    __slots__ = ("_end_ids", "_factors", "_num_rows", "_projections", "_tables", "id_window")

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        fields, vocab_size = config.fields.over({}, other_names=OTHER_NAMES), config.vocab_size
        self.id_window = fields.integer("emb_neighbor_num", minimum=2)
        num_splits = fields.integer("emb_split_num")
        ratio = fields.number("ngram_vocab_size_ratio")
        num_tables = (self.id_window - 1) * num_splits
        if config.hidden_size % num_tables:
            expected = f"a divisor of the hidden size {config.hidden_size}, times emb_neighbor_num"
            fields.refuse("emb_split_num", expected=f"{expected} - 1")
        width = config.hidden_size // num_tables
        num_rows = [int(ratio * vocab_size) + 2 * index + 1 for index in range(num_tables)]
        prefix = "model.ngram_embeddings"
        self._tables = [
            weights.tensor(f"{prefix}.embedders.{index}.weight", (count, width))
            for index, count in enumerate(num_rows)
        ]
        self._projections = [
            weights.linear(
                {f"{prefix}.post_projs.{index}": config.hidden_size}, in_features=width, bias=False
            )
            for index in range(num_tables)
        ]
        factors = [
            [pow(vocab_size, j, count) if j < 2 + index // num_splits else 0 for j in self._places]
            for index, count in enumerate(num_rows)
        ]
        self._factors = torch.tensor(factors, device=weights.device)  # [tables, id_window]
        self._num_rows = torch.tensor(num_rows, device=weights.device)
        self._end_ids = torch.tensor(_end_ids(fields), device=weights.device)

    def __call__(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """embedded [tokens, hidden], by single ids; ids as in `ReadsNgrams` -> [tokens, hidden]."""
        total = embedded
        rows = self.rows(ids).unbind(1)
        for table, project, own in zip(self._tables, self._projections, rows, strict=True):
            total = total + project(functional.embedding(own, table))
        return total / (1 + len(self._tables))

    def rows(self, ids: Tensor) -> Tensor:
        """-> int64 [tokens, tables]"""
        before = ids[:, 1:]
        is_text = (before >= 0) & ~torch.isin(before, self._end_ids)
        before = before * is_text.long().cumprod(dim=1)
        counted = torch.cat((ids[:, :1], before), dim=1)
        return (counted[:, None] * self._factors).sum(dim=2) % self._num_rows

    @property
    def _places(self) -> range:
        return range(self.id_window)


def _end_ids(fields: Fields) -> tuple[int, ...]:
    return fields.integers("eos_token_id", may_be_single=True)


class Text(Protocol):
    """A model that can begin at its embeddings."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: torch.dtype

    @property
    def embed(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def logits(self) -> Callable[[Tensor], Tensor]: ...

    def run(
        self, hidden: Tensor, positions: Tensor, attend: Attend, capture: HiddenCapture | None
    ) -> Tensor: ...


class NgramModel:
    """A `CausalModel` and `ReadsNgrams`: `text` with another embedding."""

    __slots__ = (
        *("dtype", "embedding", "hidden_size", "layers", "logits", "max_model_len"),
        *("id_window", "text", "vocab_size"),
    )

    def __init__(self, text: Text, embedding: NgramEmbedding) -> None:
        self.text = text
        self.embedding = embedding
        self.id_window = embedding.id_window
        self.layers = text.layers
        self.vocab_size = text.vocab_size
        self.hidden_size = text.hidden_size
        self.max_model_len = text.max_model_len
        self.dtype = text.dtype
        self.logits = text.logits

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        hidden = self.embedding(self.text.embed(input_ids[:, 0]), input_ids)
        return self.text.run(hidden, positions, attend, capture)
