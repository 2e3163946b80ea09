"""Drafts that are looked up in the row's own tokens, and in outputs of the same namespace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from aserve.gpu.sampling.namespaces import NUM_SHARES, NamespaceShares
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.ngram import NgramDrafter
from aserve.messages.requests import AdmitRequest
from aserve_kernels.suffix_match import TORCH_SUFFIX_MATCH, MatchWindow
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.gpu.spec.test_mode import ASKED

# One token or two are possible, so that history repeats.
ASKED_AGAIN = [
    *ASKED,
    request("constant", [4, 2], max_tokens=30, allowed_token_ids=(9,)),
    request("two", [1, 2] * 5, max_tokens=25, allowed_token_ids=(1, 2), temperature=1.5, seed=8),
]


def table(size: int = 4096) -> torch.Tensor:
    return torch.zeros((1 + NUM_SHARES, size), dtype=torch.int64)


def each_named(name: str, asked: AdmitRequest, namespace: str = "") -> AdmitRequest:
    return msgspec.structs.replace(asked, request_id=name, namespace=namespace)


@pytest.mark.parametrize("pace", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_those_of_plain_decoding(pace: tuple[int, int], page_size: int) -> None:
    options: dict[str, Any] = {
        "depth": pace[0],
        "lead": pace[1],
        "page_size": page_size,
        "num_pages": 200 // page_size + 8,
        "attention": "torch-ref",
    }
    drafter = NgramDrafter(5, MatchWindow(1, 4), TORCH_SUFFIX_MATCH, table())
    executor = make_executor(HashModel(), mode=Speculative(drafter), **options)
    asked = ASKED_AGAIN + [each_named(f"{each.request_id} again", each) for each in ASKED]
    served = serve(executor, asked, chaos=2)
    assert served.outputs == plain_tokens(asked, HashModel())


def test_a_constant_answer_takes_as_few_steps_as_its_windows_allow() -> None:
    drafter = NgramDrafter(5, MatchWindow(1, 4), TORCH_SUFFIX_MATCH)
    executor = make_executor(HashModel(), mode=Speculative(drafter), depth=1, lead=1)
    served = serve(executor, [ASKED_AGAIN[-2]])
    assert len(served.batches) == 6  # the prompt, and 29 tokens in windows of six


LONG = request("", [3, 1, 4, 1, 5], max_tokens=40, temperature=0.8, seed=4)


def steps_of(entries: torch.Tensor, *namespaces: str) -> list[int]:
    """The steps of the same request, asked once in each of the namespaces, one after the other."""
    asked = [each_named(str(n), LONG, namespace) for n, namespace in enumerate(namespaces)]
    drafter = NgramDrafter(5, MatchWindow(1, 4), TORCH_SUFFIX_MATCH, entries)
    settings: dict[str, Any] = {"depth": 1, "lead": 1, "max_rows": 1, "prefix_cache": False}
    served = serve(make_executor(HashModel(), mode=Speculative(drafter), **settings), asked)
    assert served.outputs == plain_tokens(asked, HashModel())
    starts = [n for n, batch in enumerate(served.batches) if batch.row_inits]
    ends = [*starts[1:], len(served.batches)]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def test_b31_a_request_drafts_from_outputs_of_its_namespace_alone() -> None:
    """Neither the drafts of a tenant that are accepted nor its share of the table depend on what
    another tenant asks, be it the same."""
    [alone] = steps_of(table(), "b")
    entries, with_neighbour = table(), table()
    first, again = steps_of(entries, "a", "a")
    assert again < 20 < first  # windows are short at first: few drafts were accepted before
    assert steps_of(with_neighbour, "a", "b", "a") == [first, alone, again]
    assert torch.equal(with_neighbour[1], entries[1])
    assert not with_neighbour[3:].any()


def test_sixteen_namespaces_have_shares_of_their_own() -> None:
    shares = NamespaceShares()
    first = [shares.columns(str(n)) for n in range(NUM_SHARES)]
    assert sorted(share for _, share in first) == list(range(1, NUM_SHARES + 1))
    assert shares.columns("0") == first[0]
    key, share = shares.columns("new")  # takes the share of the one that was not used for longest
    assert (share, key in dict(first)) == (first[1][1], False)
    assert shares.columns("0") == first[0]
    assert shares.columns("1") == (first[1][0], first[2][1])


def test_a_table_stays_small_and_outputs_the_same() -> None:
    entries = table(7)
    steps_of(entries, *"abcab")
    assert [int(share.count_nonzero()) for share in entries] == [0, 7, 7, 7, *[0] * 13]
