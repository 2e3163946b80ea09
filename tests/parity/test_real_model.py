"""The bundled model gives the same tokens however the engine runs it: section by section, what may
differ is switched on, and the oracle is the plain engine, one request at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aserve.engine import Engine, GenerationError
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.requests import GenerateRequest, SamplingParams, TokenPrompt
from aserve.tiny import MODEL_DIR
from tests.parity.real_model import (
    NUM_TOKENS,
    PLAIN,
    STORY,
    Ask,
    Disturbed,
    Tokens,
    all_at_once,
    asks,
    engine,
    failing_in,
    failing_with,
    metric,
    token_ids,
    tokens_of,
)

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "plain": {"overlap_depth": 1, "overlap_lead": 1},
    "overlap": {"overlap_depth": 2, "overlap_lead": 2},
    "pipeline": {"overlap_depth": 3, "overlap_lead": 1},
    "run ahead": {"overlap_depth": 3, "overlap_lead": 3},
}
# 24 requests of up to 240 tokens in 316 positions: rows step back again and again.
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 80}
KINDS: dict[str, dict[str, Any]] = {
    "whole prefill": {},
    "chunks": {"max_num_batched_tokens": 32},
    "page 1, few rows": {
        "page_size": 1,
        "num_pages": 1000,
        "max_num_batched_tokens": 50,
        "max_num_seqs": 7,
    },
    "page 64, no cache": {"page_size": 64, "no_prefix_cache": True},
    "retraction": SMALL,
    "retraction and chunks": SMALL | {"max_num_batched_tokens": 32},
}


# Random traces of smaller models meet all pairs; here each kind meets one mode, and the hardest one
# two; what has no kind meets the hardest mode. The large profile has all.
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
SOME = list(MODES) if IS_LARGE else ["run ahead"]
PAIRS = [
    (kind, mode)
    for number, kind in enumerate(KINDS)
    for mode in (MODES if IS_LARGE else [list(MODES)[number % len(MODES)]])
]
if not IS_LARGE:
    PAIRS.append(("retraction and chunks", "run ahead"))


@pytest.fixture(scope="module")
def oracle() -> dict[Ask, Tokens]:
    """Each request alone in the plain engine: nothing beside it, before it or ahead of it."""

    async def alone() -> dict[Ask, Tokens]:
        async with engine(**PLAIN) as running:
            return {ask: await tokens_of(running, ask) for ask in asks()}

    return asyncio.run(alone())


def test_the_requests_can_tell_a_wrong_engine_from_a_right_one(oracle: dict[Ask, Tokens]) -> None:
    assert all(len(tokens) == ask.max_tokens for ask, tokens in oracle.items())
    assert len(oracle) == 24
    assert len(set(oracle.values())) >= 20
    assert all(len(set(tokens)) >= 4 for tokens in oracle.values())


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
async def test_the_same_tokens_beside_neighbours(
    oracle: dict[Ask, Tokens], kind: str, mode: str
) -> None:
    async with engine(**KINDS[kind], **MODES[mode]) as running:
        assert await all_at_once(running, asks()) == list(oracle.values())
        num_retracted = metric(running, "aserve_retractions_total")
        num_failed = metric(running, "aserve_steps_failed_total")
    if KINDS[kind].get("num_pages") == SMALL["num_pages"]:
        assert num_retracted >= 2
    assert num_failed == 0


@pytest.mark.parametrize("mode", SOME)
async def test_the_same_tokens_alone_and_from_the_cache(
    oracle: dict[Ask, Tokens], mode: str
) -> None:
    """Each of the watched twice: the second finds its prompt in the cache."""
    async with engine(**MODES[mode]) as running:
        for ask in asks()[:8]:
            first = await running.answer(ask.prompt, **ask.fields())
            second = await running.answer(ask.prompt, **ask.fields())
            assert first.choices[0].token_ids == second.choices[0].token_ids == oracle[ask]
            whole_pages = (len(ask.prompt) - 1) // 16 * 16
            assert second.choices[0].usage.cached_tokens == whole_pages
            assert second.choices[0].usage.prompt_tokens == len(ask.prompt)


@pytest.mark.parametrize(
    ("kind", "mode"), [pair for pair in PAIRS if pair[0] in ("chunks", "retraction and chunks")]
)
async def test_failing_steps_leave_everybodys_tokens_as_they_are(
    oracle: dict[Ask, Tokens], kind: str, mode: str
) -> None:
    """Failures while prompts are in chunks, among decodes, and one that comes after all of the
    step's work: the device then knows tokens that the host must have again.
    """
    early, late = failing_in(2, 19, 40), failing_in(7, 31, 50)
    disturbed = Disturbed(before=early, after=late)
    # A replay of a graph would pass by the hooks.
    async with engine(disturbed, eager=True, **KINDS[kind], **MODES[mode]) as running:
        assert await all_at_once(running, asks()) == list(oracle.values())
        assert metric(running, "aserve_steps_failed_total") >= 6
    assert (early.raised, late.raised) == ([2, 19, 40], [7, 31, 50])


@pytest.mark.parametrize("mode", SOME)
async def test_a_request_that_kills_every_step_fails_alone(
    oracle: dict[Ask, Tokens], mode: str
) -> None:
    used = {token for ask, tokens in oracle.items() for token in ask.prompt + tokens}
    poison = next(token for token in range(2047, 0, -1) if token not in used)
    failing = failing_with(poison)
    async with engine(Disturbed(before=failing), **MODES[mode]) as running:
        guilty = asyncio.ensure_future(running.answer((9, 9, poison, 9)))
        assert await all_at_once(running, asks()) == list(oracle.values())
        with pytest.raises(GenerationError, match=r"twice on this request alone.*injected"):
            await guilty
    assert len(failing.raised) >= 2


# ------------------------------------------------------------ outputs that were there before


async def resumed(running: Engine, ask: Ask, *so_far: Tokens) -> list[Tokens]:
    """New tokens of each child, whose outputs until now are those of `so_far`."""
    sampling = SamplingParams(
        seed=ask.seed,
        temperature=ask.temperature,
        max_tokens=ask.max_tokens,
        ignore_eos=True,
        n=len(so_far),
    )
    outputs = tuple(pack_i32(tokens) for tokens in so_far)
    request = GenerateRequest(str(so_far), TokenPrompt(ask.prompt), sampling, outputs=outputs)
    new = [b""] * len(so_far)
    async for chunk in running._frontend.gateway.open(request):
        new[chunk.child] += chunk.token_ids
    return [tuple(array_i32(tokens).tolist()) for tokens in new]


@pytest.mark.parametrize("mode", SOME)
async def test_outputs_so_far_go_on_with_the_same_tokens(
    oracle: dict[Ask, Tokens], mode: str
) -> None:
    """What an engine gets that takes over the requests of one that died."""
    async with engine(**MODES[mode], max_num_batched_tokens=64) as running:
        for ask in asks()[:8]:
            whole = oracle[ask]
            for num_before in (1, 17, len(whole) - 1):
                (rest,) = await resumed(running, ask, whole[:num_before])
                assert rest == whole[num_before:]
        ask = Ask(token_ids(STORY), 1.5)
        first, second = await resumed(running, ask, (), ())
        assert first != second
        assert await resumed(running, ask, first[:9], second[:22]) == [first[9:], second[22:]]


# ------------------------------------------------------------ choices, logprobs


async def test_logprobs_of_greedy_tokens_are_those_of_transformers() -> None:
    """In float32, to 1e-4: the chosen token's and its three best alternatives'."""
    ask = Ask(token_ids(STORY * 2))
    async with engine(dtype="float32", max_num_batched_tokens=48) as running:
        answer = await running.answer(ask.prompt, **ask.fields(), logprobs=3)
    (choice,) = answer.choices
    expected = transformers_logprobs(ask.prompt + choice.token_ids)[len(ask.prompt) - 1 : -1]
    assert len(choice.logprobs) == len(expected) == NUM_TOKENS
    for entry, logprobs in zip(choice.logprobs, expected, strict=True):
        top = logprobs.topk(3).values.tolist()
        assert entry.logprob == pytest.approx(top[0], abs=1e-4)
        assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-4)
        assert [other.logprob for other in entry.top] == pytest.approx(top, abs=1e-4)
        for other in entry.top:
            assert other.logprob == pytest.approx(float(logprobs[other.token_id]), abs=1e-4)


@pytest.mark.parametrize("mode", SOME)
async def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(
    mode: str,
) -> None:
    """Beside requests that generate, in float32, to 1e-4; twice, since a hit must not skip one."""
    prompt = token_ids(STORY * 2)
    expected = transformers_logprobs(prompt)[:-1]
    async with engine(dtype="float32", max_num_batched_tokens=48, **MODES[mode]) as running:
        neighbour = asyncio.create_task(tokens_of(running, Ask(prompt[:40], 0.8)))
        answers = [
            await running.answer(prompt, max_tokens=max_tokens, prompt_logprobs=3)
            for max_tokens in (0, 2)
        ]
        await neighbour
    for answer in answers:
        first, *scored = answer.choices[0].prompt
        assert (first.token_id, first.logprob) == (prompt[0], None)
        assert tuple(token.token_id for token in scored) == prompt[1:]
        for token, logprobs in zip(scored, expected, strict=True):
            assert token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-4)
            best = [other.logprob for other in token.top]
            assert best == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)
            assert token.rank is not None
            near = logprobs > logprobs[token.token_id] + 1e-4
            assert int(near.sum()) < token.rank


@pytest.mark.parametrize("mode", SOME)
async def test_embeddings_are_those_of_transformers_beside_requests_that_generate(
    mode: str,
) -> None:
    """Whole, in chunks and from the cache, in float32; and who generates gets the same tokens."""
    story = token_ids(STORY * 2)
    prompts = [story, story[:50], story[:1], story]
    expected = transformers_embeddings(prompts)
    asked = Ask(story[:40], 0.8)
    async with engine() as running:
        alone = await tokens_of(running, asked)
    async with engine(max_num_batched_tokens=48, **MODES[mode]) as running:
        neighbour = asyncio.create_task(tokens_of(running, asked))
        cancelled = asyncio.create_task(running.embed(story[::-1]))
        found = await asyncio.gather(*map(running.embed, prompts[:3]))
        cancelled.cancel()
        found.append(await running.embed(prompts[3]))
        assert await neighbour == alone
        assert running._frontend.gateway.num_open == 0
    for vector, wanted in zip(found, expected, strict=True):
        assert vector.dtype == np.float32
        assert vector.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def transformers_embeddings(prompts: Sequence[Tokens]) -> list[Tensor]:
    """The last token's hidden state after the final norm, float32 [hidden], of length 1."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float64)
    with torch.inference_mode():
        hidden = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    return [torch.nn.functional.normalize(each, dim=0).float() for each in hidden]


def transformers_logprobs(ids: Tokens) -> Tensor:
    """float32 [len(ids), vocab], natural logarithm."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)
