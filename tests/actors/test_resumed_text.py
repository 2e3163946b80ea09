"""A request that goes on in another engine: the text of both parts is that of one run, wherever it
was cut. The detokenizer is the real one; the last test has the real tokenizer and scheduler, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.output import OutputChunk, Retired, SequenceOutput, StepOutput
from aserve.messages.requests import GenerateRequest, OpenText, SamplingParams, TokenPrompt
from aserve.messages.results import PromptLogprobs, RowLogprobs
from aserve.messages.scored import TokenLogprob
from tests.actors.test_detokenizer import Bench
from tests.test_engine import engine, expected
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TEXT = "hello 한국어 🚀 xa stop sign: xacd, stopped"
IDS = TOKENIZER.encode(TEXT, with_special=False)
PROMPT_LEN = 11


def run(
    bench: Bench, ids: Sequence[int], opened: OpenText, *, start: int, step: int, ends: bool
) -> None:
    """The tokens from `start` on in batches of `step`, as the scheduler would send them."""
    bench.handle(opened)
    for position in range(start, len(ids), step):
        if bench.cancels:
            return
        tokens = list(ids[position : position + step])
        scores = RowLogprobs(1, np.full(len(tokens), -1, np.float32).tobytes(), b"", b"")
        wanted = () if opened.sampling.logprobs is None else (scores,)
        output = SequenceOutput("r", 0, position, pack_i32(tokens), 4, wanted)
        bench.handle(StepOutput(1, (output,)))
    if ends:
        bench.handle(Retired("r", 0, "length", len(ids)))


def opened(**fields: Any) -> OpenText:
    outputs = fields.pop("outputs", ())
    return OpenText("r", PROMPT_LEN, SamplingParams(seed=1, **fields), outputs=outputs)


def scores_of(bench: Bench) -> list[TokenLogprob]:
    return [entry for chunk in bench.chunks for entry in chunk.logprobs]


STOPS = [(), ("stop",), ("xab", "acd"), ("어 🚀 x",), ("nowhere", "d, z")]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("shows_stop", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_a_run_that_is_cut_at_any_token_says_the_same_as_one(
    stops: tuple[str, ...], shows_stop: bool, step: int
) -> None:
    """Also within a character's bytes, and within a stop string."""
    asked = {"stop": stops, "include_stop_str_in_output": shows_stop, "logprobs": 0}
    whole = Bench()
    run(whole, IDS, opened(**asked), start=0, step=1, ends=True)
    cuts = 0
    for cut in range(1, len(IDS)):
        first, second = Bench(), Bench()
        run(first, IDS[:cut], opened(**asked), start=0, step=step, ends=False)
        if first.cancels:
            break  # its stop string was found: nothing is left to go on with
        before = opened(**asked, outputs=(pack_i32(IDS[:cut]),))
        run(second, IDS, before, start=cut, step=step, ends=True)
        assert first.text + second.text == whole.text
        assert first.token_ids + second.token_ids == whole.token_ids
        assert second.chunks[-1].usage == whole.chunks[-1].usage
        assert second.chunks[-1].finish_reason == whole.chunks[-1].finish_reason
        assert second.chunks[-1].stop_reason == whole.chunks[-1].stop_reason
        assert scores_of(second) == scores_of(whole)[cut:]
        assert [chunk.is_last for chunk in second.chunks].count(True) == 1
        cuts += 1
    assert cuts > 5


def test_a_resumed_child_tells_nothing_of_the_prompt_again() -> None:
    texts = tuple("abcd")
    told = OpenText(
        "r",
        4,
        SamplingParams(seed=1, echo=True, prompt_logprobs=0, return_token_ids=True),
        prompt_ids=pack_i32(TOKENIZER.encode("abcd", with_special=False)),
        prompt_texts=texts,
        outputs=(pack_i32(IDS[:2]),),
    )
    bench = Bench()
    run(bench, IDS[:4], told, start=2, step=1, ends=True)
    assert [chunk.prompt for chunk in bench.chunks] == [None] * len(bench.chunks)
    assert {chunk.prompt_ids for chunk in bench.chunks} == {b""}
    assert bench.token_ids == IDS[2:4]


def test_a_child_without_outputs_still_waits_for_the_prompts_scores() -> None:
    ids = [TOKENIZER.encode(text, with_special=False)[0] for text in "ab"]
    sampling = SamplingParams(seed=1, prompt_logprobs=0)
    bench = Bench()
    bench.handle(
        OpenText(
            "r", 2, sampling, prompt_ids=pack_i32(ids), prompt_texts=("a", "b"), outputs=(b"",)
        )
    )
    assert bench.chunks == []
    scores = PromptLogprobs(1, 1, np.full(1, -1, np.float32).tobytes(), pack_i32([1]), b"", b"")
    output = SequenceOutput("r", 0, 0, pack_i32(IDS[:1]), 0, prompt_logprobs=scores)
    (chunk,) = bench.handle(StepOutput(1, (output,)))
    assert chunk.prompt is not None
    assert len(chunk.prompt.tokens) == 2


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_goes_on_in_a_second_engine_at_any_token(n: int) -> None:
    """Through the real tokenizer actor, scheduler and detokenizer, on a device that is a function
    of the tokens before.
    """
    max_tokens = 7
    sampling = SamplingParams(seed=5, max_tokens=max_tokens, ignore_eos=True, n=n)
    children = [expected(seed=5, max_tokens=max_tokens, child=child, n=n) for child in range(n)]
    async with asyncio.timeout(30), engine() as running:
        for cut in range(max_tokens):
            cuts = [min(cut + child, max_tokens - 1) for child in range(n)]
            outputs = tuple(
                pack_i32(tokens[:count]) for tokens, count in zip(children, cuts, strict=True)
            )
            request = GenerateRequest(
                f"cut-{cut}", TokenPrompt((5, 6, 7)), sampling, outputs=outputs
            )
            chunks = [chunk async for chunk in running._frontend.gateway.open(request)]
            for child, tokens in enumerate(children):
                assert tokens_of(chunks, child) == tokens[cuts[child] :]
            usages = {chunk.child: chunk.usage.completion_tokens for chunk in chunks}
            assert usages == dict.fromkeys(range(n), max_tokens)


def tokens_of(chunks: list[OutputChunk], child: int) -> list[int]:
    data = b"".join(chunk.token_ids for chunk in chunks if chunk.child == child)
    return array_i32(data).tolist()
