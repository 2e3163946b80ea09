"""Drafts that continue the longest suffix of a row's tokens where it occurred before: prompt lookup
(Saxena, 2023) over the row's own history, or over a text that the client predicts.

Place e of a source matches with length k if the k tokens up to e are the last k tokens of the row.
The longest match wins, and of equal ones the nearest to a given place. Searching all places for
the longest suffix finds what a suffix automaton of the row would find; it keeps no state between
steps, so there is nothing to build again after a retraction or a hit of the prefix cache.

These are the references in plain torch. Their shapes depend on bounds alone, so that a CUDA graph
can capture them; cpu/suffix_match.py has the kernels of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from aserve_kernels.histories import Histories
from aserve_kernels.shared_table import TORCH_SHARED_TABLE, SharedTableOps


@dataclass(frozen=True, slots=True)
class MatchWindow:
    """The lengths of a match, in tokens. A longer one counts as `longest`."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Texts:
    """The text that is predicted for each of n rows, and how many outputs it has."""

    table: Tensor  # int32 [max_rows + 1, max text]
    lens: Tensor  # int64 [n], tokens of each row's text
    num_outputs: Tensor  # int64 [n], the root included


def continue_history_ref(
    histories: Histories, window: MatchWindow, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Returns the tokens after the latest of the longest matches, int64 [n, num_drafts], and the
    lengths of the matches, int64 [n]. A match that reaches the end of the history goes on
    periodically. Without a match the root repeats, and the length is 0.
    """
    lens = histories.lens[:, None]
    tokens = _tokens(histories)
    ends, lengths = _longest_match(
        tokens, histories.lens, _suffixes(tokens, lens, window.longest), histories.lens - 1
    )
    steps = torch.arange(num_drafts, device=tokens.device)
    ahead = 1 + steps % (lens - ends[:, None]).clamp(min=1)
    drafts = tokens.gather(1, (ends[:, None] + ahead).clamp(max=tokens.shape[1] - 1))
    is_match = lengths >= window.shortest
    drafts = torch.where(is_match[:, None], drafts, histories.roots[:, None])
    return drafts, torch.where(is_match, lengths, 0)


def continue_text_ref(
    histories: Histories, texts: Texts, window: MatchWindow, num_drafts: int
) -> Tensor:
    """Returns the tokens of the text after the longest match, int64 [n, num_drafts]. Of equal
    matches it takes the nearest to the place that has as many tokens before it as the row has
    outputs; without a match it goes on there. Behind the text, and without one, the root repeats.
    """
    tokens = _tokens(histories)
    suffixes = _suffixes(tokens, histories.lens[:, None], window.longest)
    numbers = torch.arange(window.longest, 0, -1, device=tokens.device)
    suffixes = torch.where(numbers <= texts.num_outputs[:, None], suffixes, -1)
    text = texts.table.index_select(0, histories.rows).to(torch.int64)
    near = torch.minimum(texts.num_outputs, texts.lens) - 1
    ends, lengths = _longest_match(text, texts.lens, suffixes, near)
    ends = torch.where(lengths >= window.shortest, ends, near)
    places = ends[:, None] + 1 + torch.arange(num_drafts, device=text.device)
    drafts = text.gather(1, places.clamp(max=text.shape[1] - 1))
    return torch.where(places < texts.lens[:, None], drafts, histories.roots[:, None])


def _tokens(histories: Histories) -> Tensor:
    """Returns the tokens of each row with its root, int64 [n, >= max_len]."""
    size = histories.page_size
    pages = histories.page_table[histories.rows, : -(-histories.max_len // size)]
    tokens = histories.token_pool.view(-1, size).index_select(0, pages.flatten())
    tokens = tokens.view(len(histories.rows), -1).to(torch.int64)
    return tokens.scatter(1, histories.lens[:, None], histories.roots[:, None])


def _suffixes(tokens: Tensor, lens: Tensor, size: int) -> Tensor:
    """Returns the last `size` tokens of each row, int64 [n, size]; -1 before its first."""
    places = lens - torch.arange(size - 1, -1, -1, device=tokens.device)
    return torch.where(places >= 0, tokens.gather(1, places.clamp(min=0)), -1)


def _longest_match(
    sources: Tensor, num_places: Tensor, suffixes: Tensor, near: Tensor
) -> tuple[Tensor, Tensor]:
    """sources int64 [n, width], suffixes int64 [n, longest] -> the end of the longest match among
    the first `num_places` places of each row, and its length, int64 [n] each.
    """
    width, longest = sources.shape[1], suffixes.shape[1]
    lengths = torch.zeros_like(sources)
    is_same = torch.ones_like(sources, dtype=torch.bool)
    for back in range(longest):
        before = pad(sources, (back, 0), value=-2)[:, :width]
        is_same = is_same & (before == suffixes[:, longest - 1 - back, None])
        lengths += is_same
    places = torch.arange(width, device=sources.device)
    scores = lengths * (2 * width) - (places - near[:, None]).abs()
    scores = torch.where(places < num_places[:, None], scores, torch.iinfo(torch.int64).min)
    ends = scores.argmax(dim=1)
    found = lengths.gather(1, ends[:, None])[:, 0]
    return ends, torch.where(num_places > 0, found, 0)


# The signatures of the two references.
ContinueHistory: TypeAlias = Callable[[Histories, MatchWindow, int], tuple[Tensor, Tensor]]
ContinueText: TypeAlias = Callable[[Histories, Texts, MatchWindow, int], Tensor]


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The operators that look up drafts, as a device has them."""

    history: ContinueHistory = continue_history_ref
    text: ContinueText = continue_text_ref
    shared: SharedTableOps = TORCH_SHARED_TABLE


TORCH_SUFFIX_MATCH = SuffixMatch()
