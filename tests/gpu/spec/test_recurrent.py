"""A recurrent chain, under the real scheduler: tokens are those of plain decoding, and after every
extend its KV is that of a prefill from scratch, from the target's hidden states.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.recurrent import RecurrentChain
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.hidden_draft import HiddenDraft, pool_kv, scratch_kv, target_hidden, text_of
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, temperature=1.0, seed=5),
    request("short", PROMPT[3:6], max_tokens=20, temperature=0.8, seed=6),
]
OPTIONS: list[dict[str, Any]] = [
    {"depth": 1, "lead": 1, "page_size": 1, "num_pages": 200},
    {"depth": 2, "lead": 2},
    {"depth": 3, "lead": 3, "page_size": 16, "max_batched_tokens": 5},  # chunks
]


@pytest.mark.parametrize("options", OPTIONS)
def test_b01_draft_kv_equals_a_prefill_from_scratch(options: dict[str, Any]) -> None:
    model, target = HiddenDraft(), HashModel()
    chain = RecurrentChain(model, 3, hidden_size=target.hidden_size, wants=AFTER_NORM)
    executor = make_executor(target, mode=Speculative(chain), drafter=model, **options)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain_tokens(ASKED)
    texts = [text_of(asked, served) for asked in ASKED]
    kept = [(text, kv) for text in texts if (kv := pool_kv(executor, text)) is not None]
    assert kept  # the rows of the others were given away
    for text, found in kept:
        hidden = target_hidden(target, text)
        expected = scratch_kv(model, torch.tensor(text[1:]), hidden[:-1])
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pace", [(1, 1), (2, 2)])
def test_b06_draft_kv_is_exact_behind_the_wrap_of_a_sliding_window(pace: tuple[int, int]) -> None:
    """Rejected drafts stay in no page that a later token sees, and no page is freed too early."""
    window = 6
    model, target = HiddenDraft(window=window), HashModel(window=window)
    chain = RecurrentChain(model, 3, hidden_size=target.hidden_size, wants=AFTER_NORM)
    settings: dict[str, Any] = {"depth": pace[0], "lead": pace[1], "page_size": 2}
    executor = make_executor(target, mode=Speculative(chain), drafter=model, **settings)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain_tokens(ASKED, target)
    texts = [text_of(asked, served) for asked in ASKED]
    last = [len(text) - window for text in texts]
    kept = [pool_kv(executor, text, group=1, first=n) for text, n in zip(texts, last, strict=True)]
    assert any(kept)
    for text, first, found in zip(texts, last, kept, strict=True):
        expected = scratch_kv(model, torch.tensor(text[1:]), target_hidden(target, text)[:-1])
        keys, values = (part[first:] for part in expected[0])
        torch.testing.assert_close(
            (found or {0: (keys, values)})[0], (keys, values), atol=1e-5, rtol=0
        )
