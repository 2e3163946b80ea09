"""Drafts that are looked up in the row's own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.ngram import NgramDrafter
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
    drafter = NgramDrafter(5, MatchWindow(1, 4), TORCH_SUFFIX_MATCH)
    executor = make_executor(HashModel(), mode=Speculative(drafter), **options)
    served = serve(executor, ASKED_AGAIN, chaos=2)
    assert served.outputs == plain_tokens(ASKED_AGAIN, HashModel())


def test_a_constant_answer_takes_as_few_steps_as_its_windows_allow() -> None:
    drafter = NgramDrafter(5, MatchWindow(1, 4), TORCH_SUFFIX_MATCH)
    executor = make_executor(HashModel(), mode=Speculative(drafter), depth=1, lead=1)
    served = serve(executor, [ASKED_AGAIN[-2]])
    assert len(served.batches) == 6  # the prompt, and 29 tokens in windows of six
