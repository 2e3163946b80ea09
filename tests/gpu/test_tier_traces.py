"""Tiers below the prefix cache on the real device side: pages go down and come back into other
pages, and each request gets the tokens of the plain engine.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fakes.hash_model import HashModel
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.gpu.test_traces import DRAFT_MODELS, MODES, STEM, Trace, assert_plain, serve_trace
from tests.gpu.test_traces import traces as any_traces


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    trace = draw(any_traces())
    policy = draw(st.sampled_from(["write_through", "write_back"]))
    page_size = draw(st.sampled_from([1, 2, 4]))  # prompts have at most 24 tokens
    options = {
        **trace.options,
        "page_size": page_size,
        "num_pages": -(-36 // page_size) + 1 + draw(st.sampled_from([0, 1, 3, 100])),
        "prefix_cache": True,
        "hisparse": None,
        "kv_tiers": policy,
    }
    return dataclasses.replace(
        trace, options=options, fails=frozenset(), is_unsound=False, captures_at_start=False
    )


def num_up(served: Served) -> int:
    return sum(move.num_bytes for move in served.moves if move.direction == "up")


@pytest.mark.slow
@settings(
    max_examples=40,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(traces(), st.sampled_from([2, 100]))
def test_any_trace_with_tiers_gives_the_tokens_of_the_plain_engine(
    trace: Trace, tier_pages: int
) -> None:
    mode, drafter = MODES[trace.mode](), DRAFT_MODELS.get(trace.mode)
    executor = make_executor(trace.model(), mode=mode, drafter=drafter, **trace.options)
    assert_plain(trace, serve_trace(executor, trace, tier_pages=tier_pages))


@pytest.mark.parametrize(
    ("page_size", "policy", "mode"),
    [
        (1, "write_through", "plain"),
        (16, "write_back", "plain"),
        (4, "write_through", "chain"),
        (1, "write_back", "tree"),
        (16, "write_through", "tree"),
    ],
)
def test_pages_that_were_evicted_come_back(page_size: int, policy: str, mode: str) -> None:
    stems = [STEM[:33], STEM[33:0:-1]]
    asked = [request(f"r{number}", [*stems[number % 2], number]) for number in range(8)]
    executor = make_executor(
        HashModel(),
        mode=MODES[mode](),
        page_size=page_size,
        kv_tiers=policy,
        max_rows=1,
        num_pages=2 + 48 // page_size,
        attention="torch-ref",
    )
    served = serve(executor, asked, tier_pages=200)
    assert num_up(served) > 0
    assert served.outputs == plain_tokens(asked)
