"""Both forms of the suffix match against a search that a reader can check."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from aserve_kernels.cpu.suffix_match import compile_suffix_match, continue_history, continue_text
from aserve_kernels.histories import Histories
from aserve_kernels.suffix_match import (
    TORCH_SUFFIX_MATCH,
    MatchWindow,
    SuffixMatch,
    Texts,
)

PAGE_SIZE, NUM_PAGES, NUM_DRAFTS = 4, 12, 6
FORMS = [TORCH_SUFFIX_MATCH, SuffixMatch(continue_history, continue_text)]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_suffix_match()


def paged(rows: list[list[int]]) -> Histories:
    """The histories of rows 1, 2, ... with their pages in any order, and stale tokens behind."""
    chance = random.Random(len(rows))
    pages = chance.sample(range(1, len(rows) * NUM_PAGES + 1), len(rows) * NUM_PAGES)
    table = torch.zeros((len(rows) + 1, NUM_PAGES), dtype=torch.int64)
    table[1:] = torch.tensor(pages).view(len(rows), NUM_PAGES)
    pool = torch.randint(0, 3, ((len(pages) + 1) * PAGE_SIZE,), dtype=torch.int32)
    for row, tokens in enumerate(rows, start=1):
        for place, token in enumerate(tokens[:-1]):
            pool[table[row, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE] = token
    return Histories(
        page_table=table,
        token_pool=pool,
        page_size=PAGE_SIZE,
        rows=torch.arange(1, len(rows) + 1),
        lens=torch.tensor([len(tokens) - 1 for tokens in rows]),
        roots=torch.tensor([tokens[-1] for tokens in rows]),
        max_len=max(map(len, rows)),
    )


def match(source: list[int], suffix: list[int], near: int) -> tuple[int, int]:
    """The end and the length of the longest match; of equal ones the nearest, then the first."""

    def length_at(end: int) -> int:
        length = 0
        while (
            length < len(suffix) and length <= end and source[end - length] == suffix[-1 - length]
        ):
            length += 1
        return length

    best = max(range(len(source)), key=lambda end: (length_at(end), -abs(end - near)), default=0)
    return (best, length_at(best)) if source else (0, 0)


def continued(tokens: list[int], window: MatchWindow) -> tuple[list[int], int]:
    end, length = match(tokens[:-1], tokens[-window.longest :], len(tokens) - 2)
    if length < window.shortest:
        return [tokens[-1]] * NUM_DRAFTS, 0
    drafts = list(tokens)
    for _ in range(NUM_DRAFTS):
        drafts.append(drafts[end + 1 + len(drafts) - len(tokens)])
    return drafts[len(tokens) :], length


def of_text(tokens: list[int], text: list[int], num_outputs: int, window: MatchWindow) -> list[int]:
    near = min(num_outputs, len(text)) - 1
    outputs = tokens[len(tokens) - num_outputs :]
    end, length = match(text, outputs[-window.longest :], near)
    after = text[(end if length >= window.shortest else near) + 1 :]
    return (after + [tokens[-1]] * NUM_DRAFTS)[:NUM_DRAFTS]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [MatchWindow(1, 3), MatchWindow(2, 12), MatchWindow(1, 1)])
def test_drafts_follow_the_longest_suffix(form: SuffixMatch, window: MatchWindow) -> None:
    chance = random.Random(1)
    for num_rows in (1, 7):
        letters = partial(chance.choices, range(3))
        lens = [1, 2, *(chance.randrange(1, 40) for _ in range(num_rows))]
        rows = [letters(k=size) for size in lens]
        histories = paged(rows)
        drafts, lengths = form.history(histories, window, NUM_DRAFTS)
        expected = [continued(tokens, window) for tokens in rows]
        assert list(zip(drafts.tolist(), lengths.tolist(), strict=True)) == expected
        texts = [letters(k=chance.choice((0, 1, 9, 20))) for _ in rows]
        num_outputs = [chance.randrange(1, len(tokens) + 1) for tokens in rows]
        table = torch.zeros((len(rows) + 1, 20), dtype=torch.int32)
        for row, text in enumerate(texts, start=1):
            table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        given = Texts(table, torch.tensor([len(text) for text in texts]), torch.tensor(num_outputs))
        drafts = form.text(histories, given, window, NUM_DRAFTS)
        assert drafts.tolist() == [
            of_text(*each, window) for each in zip(rows, texts, num_outputs, strict=True)
        ]
