"""A recurrent chain, under the real scheduler: tokens are those of plain decoding, and after every
extend its KV is that of a prefill from scratch, from the target's hidden states.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.recurrent import HIDDEN, RecurrentChain
from aserve.gpu.step.future_map import SEQ_LEN
from aserve.messages.requests import AdmitRequest
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.hidden_draft import (
    HiddenDraft,
    pool_kv,
    scratch_kv,
    scratch_run,
    target_hidden,
    text_of,
)
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens

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
    chain = RecurrentChain(model, 3, hidden_size=target.hidden_size, inputs=AFTER_NORM)
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
def test_b01_the_relayed_hidden_state_is_that_of_the_last_accepted_token(
    pace: tuple[int, int],
) -> None:
    """All drafts are 9, and all tokens 9 or 10, so windows end at each of their places."""
    model, target = HiddenDraft(), HashModel()
    model.logits = lambda hidden: hidden.new_zeros(len(hidden), VOCAB).index_fill(
        1, torch.tensor([9]), 1.0
    )
    chain = RecurrentChain(model, 3, hidden_size=target.hidden_size, inputs=AFTER_NORM)
    prompt, allowed = PROMPT[:6], (9, 10)

    def asked(num_tokens: int) -> AdmitRequest:
        return request("", prompt, max_tokens=num_tokens, allowed_token_ids=allowed)

    text = [*prompt, *plain_outputs(target, asked(40))]
    is_exact = []
    for num_tokens in range(9, 17):
        mode = Speculative(chain)
        executor = make_executor(target, mode=mode, drafter=model, depth=pace[0], lead=pace[1])
        serve(executor, [asked(num_tokens)])
        relay, row = executor._runner.relay, torch.tensor([1])
        num = int(relay.read(SEQ_LEN, row))  # positions with KV
        is_exact.append(text[num] == 10 and text[num - 1] == 9)  # a draft and a rejection
        made, _ = scratch_run(
            model, torch.tensor(text[1 : num + 1]), target_hidden(target, text)[:num]
        )
        torch.testing.assert_close(relay.read(HIDDEN, row), made[-1:], rtol=0, atol=1e-5)
    assert any(is_exact)


@pytest.mark.parametrize("pace", [(1, 1), (2, 2)])
def test_b06_draft_kv_is_exact_behind_the_wrap_of_a_sliding_window(pace: tuple[int, int]) -> None:
    """Rejected drafts stay in no page that a later token sees, and no page is freed too early."""
    window = 6
    model, target = HiddenDraft(window=window), HashModel(window=window)
    chain = RecurrentChain(model, 3, hidden_size=target.hidden_size, inputs=AFTER_NORM)
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
