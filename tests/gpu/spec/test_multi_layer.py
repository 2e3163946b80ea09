"""A drafter of several modules, under the real scheduler: tokens are those of plain decoding, and
the KV of every module is that of a prefill from scratch, up to the last known token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.multi_layer import MultiLayer
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.hidden_draft import HiddenModules, pool_kv, scratch_run, target_hidden, text_of
from tests.fakes.toy_device import TOY
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, temperature=1.0, seed=5),
    request("short", PROMPT[3:6], max_tokens=20, temperature=0.8, seed=6),
    request("one token", PROMPT[:1], max_tokens=9),
    request("grammar", PROMPT[2:8], max_tokens=12, grammar=TOY),
    request("cached", [*PROMPT[:9], 3, 2], max_tokens=9),
]
OPTIONS: list[dict[str, Any]] = [
    {"depth": 1, "lead": 1, "page_size": 1, "num_pages": 200},
    {"depth": 2, "lead": 2, "max_rows": 6},
    {"depth": 3, "lead": 3, "page_size": 16, "max_batched_tokens": 5},  # chunks
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_kv_of_every_module_equals_a_prefill_from_scratch(options: dict[str, Any]) -> None:
    model, target = HiddenModules(3), HashModel()
    mode = Speculative(MultiLayer(model.modules, hidden_size=target.hidden_size, wants=AFTER_NORM))
    executor = make_executor(target, mode=mode, drafter=model, **options)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain_tokens(ASKED)
    assert served.num_cached > 0 or options.get("page_size") == 16
    texts = [text_of(asked, served) for asked in ASKED]
    kept = [(text, kv) for text in texts if (kv := pool_kv(executor, text)) is not None]
    assert kept  # the rows of the others were given away
    assert any(text[:6] == PROMPT[2:8] for text, _ in kept)
    for text, found in kept:
        hidden = target_hidden(target, text)
        for depth, module in enumerate(model.modules, start=1):
            hidden, expected = scratch_run(module, torch.tensor(text[depth:]), hidden[:-1])
            num = len(text) - depth
            own = tuple(values[:num] for values in found[depth - 1])
            torch.testing.assert_close(own, expected[depth - 1], rtol=0, atol=1e-5)
