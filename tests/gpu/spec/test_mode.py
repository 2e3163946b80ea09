"""The speculative mode under the real scheduler: whatever is drafted, and however much of it is
right, the tokens are those of the plain engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aserve.messages.base import array_i32
from tests.fakes.drafters import Stumbling, StumblingTree, speculative
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, **WARM),
    request("short", PROMPT[3:6], max_tokens=20, **WARM),
    request(
        "picky",
        PROMPT[:2],
        max_tokens=15,
        presence_penalty=2.0,
        frequency_penalty=1.0,
        logprobs=2,
        **WARM,
    ),
    request("end", PROMPT[:4], max_tokens=30, end_ids=(3, 8, 11), **WARM),
]


def run(drafter: Stumbling, **options: Any) -> Served:
    settings = {"depth": 2, "lead": 2, "attention": "torch-ref", **options}
    executor = make_executor(HashModel(), mode=speculative(drafter), **settings)
    return serve(executor, ASKED, chaos=2)


DRAFTERS: list[Callable[[], Stumbling]] = [
    lambda: Stumbling(4, every=3),
    lambda: Stumbling(3, every=100),
    StumblingTree,
]


@pytest.mark.parametrize("pace", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_are_those_of_plain_decoding(
    drafter: Callable[[], Stumbling], pace: tuple[int, int], page_size: int
) -> None:
    depth, lead = pace
    num_pages = 200 // page_size + 8
    served = run(drafter(), depth=depth, lead=lead, page_size=page_size, num_pages=num_pages)
    assert served.outputs == plain_tokens(ASKED, HashModel())
    assert len(served.batches) < 18  # plain decoding takes 24: some drafts were accepted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("pace", [(1, 1), (2, 2)])
def test_b15_rows_with_a_grammar_verify_whole_windows(
    drafter: Callable[[], Stumbling], pace: tuple[int, int]
) -> None:
    asked = [
        request(f"r{number}", PROMPT[: number + 3], max_tokens=20, grammar=TOY, **WARM)
        for number in range(2)
    ]
    depth, lead = pace
    mode = speculative(drafter())
    executor = make_executor(HashModel(), mode=mode, attention="torch-ref", depth=depth, lead=lead)
    served = serve(executor, asked)
    assert served.outputs == plain_tokens(asked, HashModel())
    num_drafts = [array_i32(b.verify.num_drafts) for b in served.batches if b.verify]
    assert max(map(max, num_drafts)) == mode.caps.max_tokens_per_step - 1
