"""Block diffusion in the real engine: however it runs them, requests get the tokens of the naive
decoder, which computes every pass from the first token on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aserve.actors.admission import check_request
from aserve.errors import ConfigError, InvalidRequest
from aserve.gpu.diffusion.mode import BlockDiffusion
from aserve.gpu.diffusion.registry import Denoising, denoising_of
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest, ReasoningIds
from tests.fakes.hash_model import VOCAB
from tests.fakes.toy_device import TOY
from tests.gpu.diffusion.naive_blocks import BLOCK_LEN, MASK_ID, Written, block_model, write
from tests.gpu.drive import Served, make_executor, request, serve

STEM = [(11 * i * i + 5 * i + 3) % VOCAB for i in range(40)]
# A hash model is never sure: the likeliest of its tokens have 0.08 to 0.12.
FEW, ONE = Denoising(threshold=0.085), Denoising(threshold=2.0)
EDITS = Denoising(threshold=0.085, edit_threshold=0.09, max_post_edit_steps=3, penalty_lambda=0.5)
KINDS = {"few": FEW, "one": ONE, "edits": EDITS}
LIMIT = ReasoningIds(((7,),), ((1, 4, 9), (2,)), is_open=True, max_tokens=3)


def run(asked: list[AdmitRequest], kind: str = "few", *, chaos: int = 0, **options: Any) -> Served:
    fails = options.pop("fails", frozenset())
    max_folded_tokens = options.pop("max_folded_tokens", 64)
    launches_ahead = options.pop("launches_ahead", False)
    mode = BlockDiffusion(
        KINDS[kind],
        block_len=BLOCK_LEN,
        mask_id=MASK_ID,
        max_folded_tokens=max_folded_tokens,
    )
    executor = make_executor(block_model(fails=fails), mode=mode, **options)
    return serve(executor, asked, chaos=chaos, launches_ahead=launches_ahead)


def naive(asked: list[AdmitRequest], kind: str = "few") -> dict[tuple[str, int], Written]:
    return {
        (each.request_id, child): write(block_model(), each, KINDS[kind], child=child)
        for each in asked
        for child in range(each.sampling.n)
    }


def assert_naive(asked: list[AdmitRequest], served: Served, kind: str = "few") -> None:
    for key, written in naive(asked, kind).items():
        assert served.outputs.get(key, []) == written.outputs, key
        assert len(served.reasons[key]) == 1


@dataclass(frozen=True)
class Trace:
    requests: list[AdmitRequest]
    kind: str
    options: dict[str, Any]
    chaos: int


@st.composite
def requests(draw: st.DrawFn, number: int) -> AdmitRequest:
    prompt = STEM[: draw(st.integers(1, 24))]
    prompt[-1] = draw(st.sampled_from([prompt[-1], 1, 2, MASK_ID]))
    return request(
        f"r{number}",
        prompt,
        reasoning=draw(st.sampled_from([None, None, LIMIT])),
        end_ids=draw(st.sampled_from([(), (3, 8)])),
        seed=draw(st.integers(-(2**63), 2**63)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        top_k=draw(st.sampled_from([0, 5])),
        max_tokens=draw(st.integers(0, 12)),
        n=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    depth, lead = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3)]))
    alone = -(-36 // page_size)  # the longest request
    return Trace(
        requests=[draw(requests(number)) for number in range(draw(st.integers(1, 5)))],
        kind=draw(st.sampled_from(sorted(KINDS))),
        options={
            "page_size": page_size,
            "num_pages": alone + 1 + draw(st.sampled_from([0, 1, 5, 100])),
            "depth": depth,
            "lead": lead,
            "max_rows": draw(st.integers(1, 4)),
            "max_batched_tokens": draw(st.sampled_from([4, 7, 64])),
            "max_folded_tokens": draw(st.sampled_from([0, 16, 64])),
            "prefix_cache": draw(st.booleans()),
            "attention": draw(st.sampled_from(["paged-sdpa", "torch-ref"])),
            "fails": frozenset(draw(st.lists(st.integers(2, 30), max_size=2))),
        },
        chaos=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(traces())
def test_any_trace_gives_the_tokens_of_the_naive_decoder(trace: Trace) -> None:
    served = run(trace.requests, trace.kind, chaos=trace.chaos, **trace.options)
    assert_naive(trace.requests, served, trace.kind)


@pytest.mark.parametrize("pace", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_different_passes_share_their_steps(kind: str, pace: int) -> None:
    """The first that is done goes on, and nobody waits for the others."""
    asked = [
        request(f"r{number}", STEM[number : number + 5 + number], max_tokens=24)
        for number in range(4)
    ]
    served = run(asked, kind, depth=pace, lead=pace, launches_ahead=True)
    assert_naive(asked, served, kind)
    # With overlap, a row's next pass is launched before the result of its last one is there.
    num_ahead = sum(any(batch.bounds) for batch in served.batches)
    assert num_ahead == 0 if pace == 1 else num_ahead > 0.6 * len(served.batches)
    passes = [written.num_passes for written in naive(asked, kind).values()]
    alone = sum(len(run([each], kind, depth=pace, lead=pace).batches) for each in asked)
    assert len(served.batches) < alone / 2
    assert len(served.batches) >= max(passes)


def test_a_threshold_above_1_gives_one_token_per_pass() -> None:
    """A pass that is not folded computes a finished block before the next one is begun."""
    asked = [request("r", STEM[:6], max_tokens=14)]
    assert [written.num_passes for written in naive(asked, "one").values()] == [14]
    for max_folded_tokens, num_clean in ((8, 0), (7, 3)):
        served = run(asked, "one", depth=1, lead=1, max_folded_tokens=max_folded_tokens)
        assert_naive(asked, served, "one")
        assert len(served.batches) == 1 + 14 + num_clean
    assert naive(asked, "few")["r", 0].num_passes < 14


def test_b32_a_cached_prefix_never_ends_within_a_block() -> None:
    """With pages of one token: the KV of a token depends on what follows it in its block, so a
    block that goes on otherwise has nothing in common with the cached one."""
    ends = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [1, 2, 3, 4, 8, 8], [1, 2, 3, 5, 6]]
    asked = [request(f"r{n}", [*STEM[:8], *end], max_tokens=6) for n, end in enumerate(ends)]
    served = run(asked, page_size=1, num_pages=80, max_rows=1)
    assert_naive(asked, served)
    assert served.num_cached == 0 + 8 + 8 + 12 + 12
    assert run(asked, page_size=1, num_pages=80, max_rows=1, prefix_cache=False).num_cached == 0


@pytest.mark.parametrize("max_folded_tokens", [0, 64])
def test_b32_a_cached_block_has_the_kv_of_its_final_tokens(max_folded_tokens: int) -> None:
    """The last block of an answer is not shared: no pass has computed it from all its tokens."""
    options: dict[str, Any] = {"page_size": 1, "num_pages": 80, "max_rows": 1}
    options["max_folded_tokens"] = max_folded_tokens
    first = request("first", STEM[:6], max_tokens=14)
    answer = run([first], **options).outputs["first", 0]
    more = request("more", [*STEM[:6], *answer, 9, 9], max_tokens=6)
    served = run([first, more], **options)
    assert_naive([first, more], served)
    assert served.num_cached == 20 - BLOCK_LEN
    failing = {**options, "fails": frozenset(range(4, 40, 7))}
    assert_naive([first, more], run([first, more], **failing))


def test_b32_a_retracted_row_reads_its_outputs_as_a_prompt() -> None:
    asked = [request(f"r{number}", STEM[number : number + 9], max_tokens=20) for number in range(4)]
    served = run(asked, num_pages=13)
    assert served.num_retracted > 0
    assert_naive(asked, served)


@pytest.mark.parametrize("max_batched_tokens", [4, 5, 11, 64])
def test_b32_chunks_of_a_prompt_end_with_blocks(max_batched_tokens: int) -> None:
    asked = [request("long", STEM[:30]), request("short", STEM[5:10])]
    served = run(asked, max_batched_tokens=max_batched_tokens)
    assert_naive(asked, served)
    for batch in served.batches:
        ends = array_i32(batch.kv_lens) + array_i32(batch.query_lens)
        assert all(end % BLOCK_LEN == 0 or end in (30, 5) for end in ends.tolist())


def test_b32_a_prompt_may_hold_the_mask_id() -> None:
    """What is known follows from positions: neither a prompt's mask is filled, nor is a block full
    that holds it."""
    for kind in KINDS:
        asked = [request("r", [*STEM[:4], MASK_ID, 7, MASK_ID], max_tokens=9)]
        served = run(asked, kind)
        assert_naive(asked, served, kind)
        assert MASK_ID not in served.outputs["r", 0]


@pytest.mark.parametrize("num_prompt", [3, 4, 8])
def test_b32_an_answer_ends_at_every_place_of_a_block(num_prompt: int) -> None:
    """One row alone, behind prompts that end a block and one that does not."""
    [whole] = naive([request("", STEM[:num_prompt], max_tokens=11)]).values()
    asked = []
    for place, token in enumerate(whole.outputs):
        asked.append(request(f"id {place}", STEM[:num_prompt], max_tokens=11, end_ids=(token,)))
        asked.append(request(f"cap {place}", STEM[:num_prompt], max_tokens=1 + place))
    served = run(asked, max_rows=1)
    assert_naive(asked, served)
    assert {len(outputs) for outputs in served.outputs.values()} == {*range(1, 12)}


def test_a_limit_of_reasoning_within_a_block_begins_it_anew() -> None:
    """The forced tokens take the places of those that the block had said."""
    asked = [request("r", STEM[:5], reasoning=LIMIT, max_tokens=16)]
    served = run(asked)
    assert served.outputs["r", 0][3:6] == [1, 4, 9]
    assert_naive(asked, served)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"grammar": TOY}, "grammar"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"embeds": True}, "embeddings"),
    ],
)
def test_what_goes_token_by_token_is_refused(wanted: dict[str, Any], name: str) -> None:
    mode = BlockDiffusion(FEW, block_len=BLOCK_LEN, mask_id=MASK_ID)
    executor = make_executor(block_model(), mode=mode)
    check_request(request("r", STEM[:3]), executor.spec, has_masks=True)
    with pytest.raises(InvalidRequest, match=f"diffusion language model.* {name}"):
        check_request(request("r", STEM[:3], **wanted), executor.spec, has_masks=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 3}, "--page-size 3 and the model's blocks of 4 tokens"),
        ({"max_batched_tokens": 3}, "--max-num-batched-tokens 3 is less than a block"),
        ({"attention": "paged-cpu"}, "mask block-causal"),
    ],
)
def test_options_without_room_for_blocks_are_refused(options: dict[str, Any], message: str) -> None:
    mode = BlockDiffusion(FEW, block_len=BLOCK_LEN, mask_id=MASK_ID)
    with pytest.raises(ConfigError, match=message):
        make_executor(block_model(), mode=mode, **options)


def test_the_settings_of_an_algorithm_are_those_of_sglang() -> None:
    assert denoising_of(None, {}) == Denoising(threshold=0.95)
    edits = Denoising(threshold=0.4, edit_threshold=0.0, max_post_edit_steps=16)
    assert denoising_of("JointThreshold", {"threshold": 0.4}) == edits
    for name, wrong in ((None, {"edit_threshold": 0.1}), ("JointThreshold", {"threshold": "x"})):
        with pytest.raises(ConfigError, match="--dllm-algorithm-config"):
            denoising_of(name, wrong)
