"""Both forms of the table of n-grams against dictionaries, and against each other."""

from __future__ import annotations

import random

import pytest
import torch

from aserve_kernels.cpu.shared_table import compile_shared_table, continue_shared, remember
from aserve_kernels.shared_table import (
    CONTEXT_LENS,
    TORCH_SHARED_TABLE,
    SharedTableOps,
    TableRows,
)
from tests.kernels.cpu.test_suffix_match import paged

NUM_DRAFTS, LARGE = 5, 1 << 16
COMPILED = SharedTableOps(continue_shared, remember)
KEYS = {1: -7, 2: 1 << 60}  # by share


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_shared_table()


def rows_of(entries: torch.Tensor, texts: list[list[int]], shares: list[int]) -> TableRows:
    keys = torch.tensor([KEYS[share] for share in shares])
    return TableRows(entries, keys, torch.tensor(shares), paged(texts))


class Books:
    """The same as dictionaries, of which each namespace has one."""

    def __init__(self) -> None:
        self.after: dict[int, dict[tuple[int, ...], int]] = {1: {}, 2: {}}

    def remember(self, texts: list[list[int]], shares: list[int], counts: list[int]) -> None:
        for text, share, count in zip(texts, shares, counts, strict=True):
            for end in range(len(text) - count, len(text)):
                for size in (each for each in CONTEXT_LENS if each <= end):
                    self.after[share][tuple(text[end - size : end])] = text[end]

    def drafts(self, text: list[int], share: int, own: list[int], match_len: int) -> list[int]:
        text, book = list(text), self.after[share]
        for place in range(NUM_DRAFTS):
            known = [n for n in CONTEXT_LENS if n <= len(text) and tuple(text[-n:]) in book]
            if place == 0 and max(known, default=0) <= match_len:
                return own
            text.append(book[tuple(text[-known[-1] :])] if known else text[-1])
        return text[-NUM_DRAFTS:]


@pytest.mark.parametrize("ops", [TORCH_SHARED_TABLE, COMPILED])
def test_drafts_are_what_followed_in_the_same_namespace(ops: SharedTableOps) -> None:
    chance, books, num_shared = random.Random(4), Books(), 0
    entries = torch.zeros((3, LARGE), dtype=torch.int64)
    for _ in range(60):
        texts = [chance.choices(range(4), k=chance.randrange(1, 30)) for _ in range(2)]
        counts = [chance.randrange(1, min(len(text), 6) + 1) for text in texts]
        ops.remember(rows_of(entries, texts, [1, 2]), torch.tensor(counts), 6)
        books.remember(texts, [1, 2], counts)
        texts = [chance.choices(range(4), k=chance.randrange(1, 12)) for _ in range(4)]
        shares, own = [1, 2, 2, 1], [[9] * NUM_DRAFTS] * 4
        lens = [chance.randrange(0, 7) for _ in texts]
        asked = rows_of(entries, texts, shares), torch.tensor(own), torch.tensor(lens)
        drafts = ops.continue_shared(*asked).tolist()
        assert drafts == list(map(books.drafts, texts, shares, own, lens))
        num_shared += sum(each != own[0] for each in drafts)
    assert 50 < num_shared < 200


def test_a_full_table_holds_the_same_in_both_forms() -> None:
    chance = random.Random(5)
    tables = [torch.zeros((3, 11), dtype=torch.int64) for _ in range(2)]
    for _ in range(30):
        texts, shares = [chance.choices(range(9), k=20) for _ in range(2)], chance.sample((1, 2), 2)
        for ops, entries in zip((TORCH_SHARED_TABLE, COMPILED), tables, strict=True):
            ops.remember(rows_of(entries, texts, shares), torch.tensor([3, 1]), 3)
        assert torch.equal(*tables)
    assert tables[0][1:].count_nonzero() == 22
    assert not tables[0][0].any()  # share 0 is for padding


@pytest.mark.parametrize("ops", [TORCH_SHARED_TABLE, COMPILED])
def test_a_share_shows_its_next_namespace_nothing_of_the_last_one(ops: SharedTableOps) -> None:
    entries, text = torch.zeros((2, LARGE), dtype=torch.int64), [*range(1, 20)]
    ops.remember(rows_of(entries, [text], [1]), torch.tensor([12]), 12)
    own, none = torch.full((1, NUM_DRAFTS), 9), torch.tensor([0])
    rows = rows_of(entries, [text[:10]], [1])
    other = TableRows(entries, rows.keys + 1, rows.shares, rows.histories)
    assert ops.continue_shared(rows, own, none).tolist() == [text[10:15]]
    assert ops.continue_shared(other, own, none).tolist() == own.tolist()
