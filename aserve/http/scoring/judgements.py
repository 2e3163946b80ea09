"""Scores of pairs by a reranker that generates, such as Qwen3-Reranker.

Its chat template asks whether a document meets a query, and that the answer be "yes" or "no". With
the probabilities p of the first token of the answer, the score of the pair is

    p(yes) / (p(yes) + p(no))

as in the model's card. A model is such a reranker if its template says so; `--chat-template
qwen3-reranker` names one, because the published checkpoints have the template of a chat model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from aiohttp import web

from aserve.errors import InvalidRequest
from aserve.http.openai.embeddings import EmbeddingUsage
from aserve.http.openai.json_values import encode_json
from aserve.http.openai.limits import check_length
from aserve.http.openai.schema import EmbeddingBody
from aserve.http.rendering import answer
from aserve.http.scoring.labels import LabelRendering, label_call
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import ArrayF32
from aserve.messages.requests import ChatPrompt
from aserve.text.prompt import PromptEncoder

ASKS = 'answer can only be "yes" or "no"'  # in the prompts of rerankers that generate
LABELS = ("yes", "no")


async def encode_judgements(
    context: HttpContext,
    given: EmbeddingBody,
    pairs: Sequence[tuple[str, str]],
    *,
    instruct: str | None,
) -> list[list[int]] | None:
    """Returns the ids of each pair's prompt and both labels, the labels of a pair side by side; or
    None for a model that is no such reranker."""
    found = None
    if context.state.task == "generate":
        found = await context.tokenize_service.run(partial(_encode, pairs, instruct))
    unsupported = (
        {"instruct": instruct}
        if found is None
        else {"truncate_prompt_tokens": given.truncate_prompt_tokens}
    )
    for name, value in unsupported.items():
        if value is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}', because the model is "
                f"{'no' if found is None else 'a'} reranker with a prompt of its own.",
                param=name,
                code="unsupported_parameter",
            )
    return found


async def answer_judgements(
    request: web.Request,
    context: HttpContext,
    given: EmbeddingBody,
    prompts: list[list[int]],
    *,
    param: str,
    write: Callable[[ArrayF32, EmbeddingUsage], bytes],
) -> web.StreamResponse:
    """Answers with what `write` makes of the scores, float32 [pairs]. `param` is the field of the
    documents."""
    origin = origin_of(request, context)
    check_length(prompts, origin.caller.max_sequences, param=param)

    def written(probabilities: list[list[float]], usage: EmbeddingUsage) -> bytes:
        yes, no = np.array(probabilities, np.float32).T
        return write(yes / np.maximum(yes + no, np.finfo(np.float32).tiny), usage)

    call = label_call(prompts, given.model, given.priority, origin)
    rendering = LabelRendering(call, len(LABELS), written, param=param)
    return await answer(request, context, rendering)


def _encode(
    pairs: Sequence[tuple[str, str]], instruct: str | None, encoder: PromptEncoder
) -> list[list[int]] | None:
    try:
        if ASKS not in encoder.render(_prompt("query", "document", None)):
            return None
    except InvalidRequest:
        return None  # there is no template, or one that takes other chats
    labels = [encoder.tokenizer.encode(label, with_special=False) for label in LABELS]
    if any(len(ids) != 1 for ids in labels):
        raise InvalidRequest("This model's vocabulary has no tokens 'yes' and 'no'.", param="model")
    prompts = [encoder.encode(_prompt(*pair, instruct), is_truncated=False) for pair in pairs]
    return [[*prompt, *label] for prompt in prompts for label in labels]


def _prompt(query: str, document: str, instruct: str | None) -> ChatPrompt:
    """Templates of vLLM and sentence-transformers know the two by their roles, and those of SGLang
    by their order. The instruction is a system message or a variable."""
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    variables = None
    if instruct is not None:
        messages.append({"role": "system", "content": instruct})
        variables = encode_json({"instruct": instruct}, param="instruct")
    return ChatPrompt(encode_json(messages, param="documents"), variables=variables)
