"""A drafter of several modules, under the real scheduler: tokens are those of plain decoding, and
the KV of every module is that of a prefill from scratch, up to the last known token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.gpu.executor import TorchExecutor
from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.front_rows import FrontRows
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.gpu.step.forward_batch import DeviceBatch
from aserve.gpu.step.resolve import DeviceStep
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.hidden_draft import HiddenModules, pool_kv, scratch_run, target_hidden, text_of
from tests.fakes.toy_device import TOY
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("as wide as a window", PROMPT[4:8], max_tokens=7),
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


@pytest.fixture(autouse=True)
def checked_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with its front rows is never longer than the host's bound, by which backends plan."""
    widen = FrontRows._widened

    def checked(self: FrontRows, step: DeviceStep) -> DeviceBatch:
        made = widen(self, step)
        lens = (made.kv_lens + made.query_lens)[step.batch.rows > 0]
        assert (lens.numpy() <= made.len_bounds_cpu[: len(lens)]).all()
        return made

    monkeypatch.setattr(FrontRows, "_widened", checked)


@pytest.mark.parametrize("options", OPTIONS)
def test_b25_the_kv_of_every_module_equals_a_prefill_from_scratch(options: dict[str, Any]) -> None:
    model, target = HiddenModules(3), HashModel()
    mode = Speculative(MultiLayer(model.modules, hidden_size=target.hidden_size, inputs=AFTER_NORM))
    executor = make_executor(target, mode=mode, drafter=model, **options)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain_tokens(ASKED)
    assert served.num_cached > 0 or options.get("page_size") == 16
    texts = [text_of(asked, served) for asked in ASKED]
    kept = [text for text in texts if has_kv_of_scratch(model, target, executor, text)]
    assert any(text[:6] == PROMPT[2:8] for text in kept)


def has_kv_of_scratch(
    model: HiddenModules, target: HashModel, executor: TorchExecutor, text: list[int]
) -> bool:
    """Compares the draft KV of the row with this text. Returns False if another request has the
    row."""
    found = pool_kv(executor, text)
    if found is None:
        return False
    hidden = target_hidden(target, text)
    for depth, module in enumerate(model.modules, start=1):
        hidden, expected = scratch_run(module, torch.tensor(text[depth:]), hidden[:-1])
        num = len(text) - depth
        own = tuple(values[:num] for values in found[depth - 1])
        torch.testing.assert_close(own, expected[depth - 1], rtol=0, atol=1e-5)
    return True


LONG = [(7 * i * i + i) % VOCAB for i in range(20)]
# The size of a page, the prompts of requests that have a row one after the other, and the tokens of
# the last one that are cached. It begins as the first one does.
TENANTS: dict[str, tuple[int, list[list[int]], int]] = {
    "a cached prefix": (4, [LONG, [*LONG[:12], 3, 2]], 8),
    "a former tenant that ended where the prefix does": (
        4,
        [LONG, [5, 4, 3, 2, 5, 4, 3, 2], [*LONG[:12], 3, 2]],
        8,
    ),
    "a former tenant with one token": (1, [LONG, [5], [*LONG[:12], 3, 2]], 9),
}


@pytest.mark.parametrize(("pace", "chaos"), [((1, 1), 0), ((3, 3), 0), ((3, 3), 5)])
@pytest.mark.parametrize("case", TENANTS)
def test_cached_front_rows_are_neither_missing_nor_written_again(
    case: str, pace: tuple[int, int], chaos: int
) -> None:
    """Another request decodes beside them, in a row of its own, and ends before the last one. With
    this chaos, its length is a bound when the last one begins."""
    page_size, prompts, num_cached = TENANTS[case]
    depth, lead = pace
    model, target = HiddenModules(3), HashModel()
    mode = Speculative(MultiLayer(model.modules, hidden_size=target.hidden_size, inputs=AFTER_NORM))
    settings: dict[str, Any] = {"depth": depth, "lead": lead, "max_rows": 2, "page_size": page_size}
    executor = make_executor(target, mode=mode, drafter=model, num_pages=200, **settings)
    lens = [1] * (len(prompts) - 1) + [24]
    asked = [
        request(f"r{number}", prompt, max_tokens=max_tokens)
        for number, (prompt, max_tokens) in enumerate(zip(prompts, lens, strict=True))
    ]
    asked.insert(0, request("neighbour", PROMPT[:2], max_tokens=14))
    served = serve(executor, asked, chaos=chaos)
    assert served.outputs == plain_tokens(asked)
    assert served.num_cached == num_cached
    first_step = next(batch for batch in reversed(served.batches) if batch.row_inits)
    assert any(first_step.bounds) == (chaos > 0)
    assert has_kv_of_scratch(model, target, executor, text_of(asked[-1], served))
