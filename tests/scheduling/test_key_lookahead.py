"""Cache keys that look ahead: where KV depends on the token after its position, as in a drafter
whose inputs are shifted, a page is shared only if that token is the same as well.
"""

from __future__ import annotations

import msgspec
import pytest

from aserve.messages.base import array_i32
from aserve.messages.executor import DecodeCaps
from tests.scheduling.stage import Stage, request, result, spec

CAPS = DecodeCaps(max_tokens_per_step=2, key_lookahead=1)


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 0], 4),
        ([1, 2, 3, 4, 0], 0),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], 0),
    ],
)
def test_a_page_is_shared_only_where_the_token_after_it_is_the_same(
    prompt: list[int], num_cached: int
) -> None:
    stage = Stage(msgspec.structs.replace(spec(depth=1, lead=1), decode=CAPS))
    stage.play(request("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=2))
    stage.play(result(1, {1: [9]}))  # the second page is known whole with this token
    stage.play(result(2, {1: [10]}))
    stage.play(request("b", prompt))
    [batch] = stage.batches
    assert array_i32(batch.kv_lens).tolist() == [num_cached]
