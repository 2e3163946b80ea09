"""Scores of labels, as SGLang's /v1/score: the probabilities of given tokens after each prompt.

Each label is the last token of a prompt that is only scored, so its probability is exact, whatever
its rank is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.direct import frame
from aserve.http.errors import error_body
from aserve.http.openai.call import Call, Origin
from aserve.http.openai.completions import completion_call
from aserve.http.openai.embeddings import EmbeddingUsage
from aserve.http.openai.limits import check_length
from aserve.http.openai.schema import CompletionBody, Side, TokenId
from aserve.http.rendering import Output, answer
from aserve.http.sse import EVENT_STREAM, KEEP_ALIVE
from aserve.http.state import HttpContext, origin_of
from aserve.messages.output import OutputChunk
from aserve.messages.requests import GenerateRequest, SamplingParams, TextPrompt
from aserve.text.lengths import truncate
from aserve.text.prompt import PromptEncoder

WriteScores: TypeAlias = Callable[[list[list[float]], EmbeddingUsage], bytes]


class ScoreBody(msgspec.Struct, kw_only=True):
    """Either vLLM's `text_1` and `text_2`, or SGLang's `query` and `items` with `label_token_ids`.
    A prompt is the query and an item, or with `item_first` the item and the query. `apply_softmax`
    makes the scores of an item sum to 1. `instruct` is what a reranker that generates is told.
    `truncate_prompt_tokens` bounds a text, or the prompt before a label.
    """

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    query: str | list[TokenId] | None = None
    items: str | list[str | list[TokenId]] | None = None
    label_token_ids: list[TokenId] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    instruct: str | None = None
    priority: int | None = None
    user: str | None = None


class LabelScores(msgspec.Struct):
    scores: list[list[float]]
    model: str
    usage: EmbeddingUsage
    object: str = "scoring"


async def score_labels(
    request: web.Request, context: HttpContext, body: ScoreBody
) -> web.StreamResponse:
    origin = origin_of(request, context)
    labels, items = body.label_token_ids, body.items
    if not labels or not items or body.query is None:
        name = "items" if labels and body.query is not None else "query"
        raise InvalidRequest(
            f"Missing required parameter: '{name if labels else 'label_token_ids'}'. Give "
            "'query', 'items' and 'label_token_ids', none of them empty.",
            param=name if labels else "label_token_ids",
            code="missing_required_parameter",
        )
    items = [items] if isinstance(items, str) else items
    check_length(items, origin.caller.max_sequences // len(labels), param="items")
    prompts = await context.tokenize_service.run(lambda encoder: _prompts(body, items, encoder))
    labelled = [[*prompt, label] for prompt in prompts for label in labels]
    call = label_call(labelled, body.model, body.priority, origin)

    def written(scores: list[list[float]], usage: EmbeddingUsage) -> bytes:
        if body.apply_softmax:
            sums = [max(math.fsum(row), sys.float_info.min) for row in scores]
            scores = [[value / sums[i] for value in row] for i, row in enumerate(scores)]
        return msgspec.json.encode(LabelScores(scores, call.model, usage))

    rendering = LabelRendering(call, len(labels), written, param="items")
    return await answer(request, context, rendering)


def label_call(
    prompts: list[list[int]], model: str | None, priority: int | None, origin: Origin
) -> Call:
    """Returns the call that scores prompts, each of which ends with a label."""
    body = CompletionBody(
        model=model, prompt=[*prompts], max_tokens=0, prompt_logprobs=0, priority=priority
    )
    return completion_call(body, origin)


def _prompts(
    body: ScoreBody, items: Sequence[str | list[TokenId]], encoder: PromptEncoder
) -> list[list[int]]:
    """The ids of each prompt. Texts are joined before they are tokenized, and a label follows what
    is left of them."""
    cut = GenerateRequest(
        "",
        TextPrompt(""),
        SamplingParams(seed=0, max_tokens=1),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncates_end=body.truncation_side == "right",
    )
    prompts = []
    for item in items:
        first, last = (item, body.query) if body.item_first else (body.query, item)
        if isinstance(first, str) and isinstance(last, str):
            prompt = list(encoder.encode(TextPrompt(first + last)))
        elif isinstance(first, list) and isinstance(last, list):
            prompt = first + last
        else:
            raise InvalidRequest(
                "Invalid 'items': 'query' and 'items' are either texts or lists of token ids.",
                param="items",
                code="invalid_type",
            )
        if not prompt:
            raise InvalidRequest(
                "Invalid 'items': an item and the query are empty, so nothing predicts the labels.",
                param="items",
                code="empty_prompt",
            )
        prompts.append(truncate(prompt, cut, encoder.limits))
    return prompts


class LabelRendering:
    """Implements Rendering; it has no streams. The call has one sequence for each label of each
    item. `write` gets the labels' probabilities of each item. `param` is the field of the items."""

    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE
    answered: frozenset[str] = frozenset()

    def __init__(self, call: Call, num_labels: int, write: WriteScores, *, param: str) -> None:
        self.call = call
        self.names: Mapping[str, str] = {"prompt": param}
        self._num_labels = num_labels
        self._write = write

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        yield from ()

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return ()

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return (frame(error_body(info)),)

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        logprobs = [output.prompt[-1].logprob for output in outputs]
        probabilities = [0.0 if value is None else math.exp(value) for value in logprobs]
        size = self._num_labels
        scores = [probabilities[start : start + size] for start in range(0, len(outputs), size)]
        num_tokens = sum(output.usage.prompt_tokens for output in outputs)
        usage = EmbeddingUsage(num_tokens, num_tokens)
        yield self._write(scores, usage)
