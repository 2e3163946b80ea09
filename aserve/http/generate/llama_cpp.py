"""POST /completion and GET /props as in llama.cpp's server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo
from aserve.http.control.info import version
from aserve.http.delivery import json_response
from aserve.http.direct import frame
from aserve.http.errors import error_body
from aserve.http.openai.answers import ids_of
from aserve.http.openai.call import Call, Origin
from aserve.http.openai.checks import check_only_one, check_unsupported
from aserve.http.openai.completions import completion_call
from aserve.http.openai.limits import Range, check_within
from aserve.http.openai.schema import CompletionBody, StructuredOutputs, TextsOrIds, TokenId
from aserve.http.rendering import Output, answer, field_names, one_or_list
from aserve.http.route import get, post
from aserve.http.sse import EVENT_STREAM, KEEP_ALIVE
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import MAX_INT32
from aserve.messages.output import OutputChunk
from aserve.messages.scored import TokenLogprob

NEVER = -100.0  # the strongest bias
N_PREDICT = Range(-2, MAX_INT32)  # negative numbers mean the rest of the context

NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "structured_outputs": "grammar",
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "dynatemp_range": (0.0,),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "top_n_sigma": (-1.0,),
    "samplers": (),
    "image_data": ([],),
    "lora": ([],),
}


class LlamaBody(msgspec.Struct, kw_only=True):
    """`n_predict` -1 means as many tokens as fit. `grammar` is in llama.cpp's notation (GBNF)."""

    model: str | None = None
    prompt: TextsOrIds | None = None
    n_predict: int | None = None
    stream: bool | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: list[tuple[TokenId, float | bool]] | dict[TokenId, float] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    deadline_ms: float | None = None
    max_queue_ms: float | None = None
    n_probs: int | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    return_tokens: bool | None = None
    dynatemp_range: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    xtc_probability: float | None = None
    dry_multiplier: float | None = None
    top_n_sigma: float | None = None
    samplers: list[str] | None = None
    image_data: list[Any] | None = None
    lora: list[Any] | None = None


async def completion(
    request: web.Request, context: HttpContext, body: LlamaBody
) -> web.StreamResponse:
    return await answer(request, context, llama_rendering(body, origin_of(request, context)))


def llama_rendering(body: LlamaBody, origin: Origin) -> LlamaRendering:
    check_unsupported(body, NEUTRAL)
    with field_names(NAMES):
        call = completion_call(_completion_body(body), origin, default_max_tokens=None)
    call = dataclasses.replace(call, is_streaming=bool(body.stream))
    return LlamaRendering(call, body)


def _completion_body(body: LlamaBody) -> CompletionBody:
    constraint = check_only_one({"json_schema": body.json_schema, "grammar": body.grammar or None})
    max_tokens = body.n_predict
    if max_tokens is not None:
        check_within(max_tokens, N_PREDICT, param="n_predict")
    rest = None if max_tokens is None or max_tokens < 0 else max_tokens
    completion = CompletionBody(
        model=body.model,
        prompt=body.prompt,
        max_tokens=rest,
        stop=body.stop,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_bias_of(body),
        ignore_eos=body.ignore_eos,
        seed=None if body.seed == -1 else body.seed,
        logprobs=body.n_probs or None,
        deadline_ms=body.deadline_ms,
        max_queue_ms=body.max_queue_ms,
        return_token_ids=True,
    )
    if constraint is not None:
        completion.structured_outputs = StructuredOutputs(
            json=body.json_schema, grammar=body.grammar or None
        )
    return completion


def _bias_of(body: LlamaBody) -> dict[int, float] | None:
    """Returns the biases by token id. In llama.cpp's list, false means that a token never comes."""
    if body.logit_bias is None or isinstance(body.logit_bias, dict):
        return body.logit_bias
    return {token_id: NEVER if bias is False else float(bias) for token_id, bias in body.logit_bias}


class Timings(msgspec.Struct):
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class Part(msgspec.Struct, kw_only=True):
    """One event, or with `stop` the last one. A whole answer has the last one's fields."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    id_slot: int = -1
    completion_probabilities: list[Any] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class LlamaRendering:
    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE
    names: Mapping[str, str] = NAMES
    answered: frozenset[str] = frozenset()

    def __init__(self, call: Call, body: LlamaBody) -> None:
        self.call = call
        self._shows_tokens = bool(body.return_tokens)
        self._is_list = len(call.requests) > 1

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        if chunk.text or chunk.token_ids:
            part = self._part(index, chunk.text, output)
            part.tokens = ids_of(chunk.token_ids)
            if self.call.sampling.logprobs is not None:
                part.completion_probabilities = probabilities(chunk.logprobs)
            yield frame(msgspec.json.encode(part))
        if output.finish_reason is not None:
            yield frame(msgspec.json.encode(self._last(index, "", output)))

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return ()

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return (frame(error_body(info)),)

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        return one_or_list(map(self._whole, count(), outputs), is_list=self._is_list)

    def _whole(self, index: int, output: Output) -> Part:
        part = self._last(index, output.text, output)
        part.tokens = output.token_ids if self._shows_tokens else []
        if self.call.sampling.logprobs is not None:
            part.completion_probabilities = probabilities(output.logprobs)
        return part

    def _part(self, index: int, text: str, output: Output) -> Part:
        return Part(
            index=index,
            content=text,
            tokens=[],
            stop=False,
            tokens_predicted=output.usage.completion_tokens,
            tokens_evaluated=output.usage.prompt_tokens,
        )

    def _last(self, index: int, text: str, output: Output) -> Part:
        part = self._part(index, text, output)
        part.stop = True
        part.model = self.call.model
        part.generation_settings = settings_of(self.call)
        part.stop_type = stop_type_of(output)
        part.stopping_word = str(output.stop_reason) if part.stop_type == "word" else ""
        part.tokens_cached = output.usage.cached_tokens
        part.truncated = False
        part.has_new_line = "\n" in output.text
        part.timings = timings_of(output)
        return part


def probabilities(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            "id": entry.token_id,
            "token": entry.token,
            "bytes": list(entry.token_bytes),
            "logprob": entry.logprob,
            "top_logprobs": [
                {
                    "id": top.token_id,
                    "token": top.token,
                    "bytes": list(top.token_bytes),
                    "logprob": top.logprob,
                }
                for top in entry.top
            ],
        }
        for entry in entries
    ]


def stop_type_of(output: Output) -> str:
    if output.finish_reason == "stop":
        return "word" if isinstance(output.stop_reason, str) else "eos"
    return "limit" if output.finish_reason == "length" else "none"


def timings_of(output: Output) -> Timings:
    """Measures at the HTTP border: the prompt's time includes the wait in the queue."""
    predicted_s = output.last_s - output.first_s
    num_tokens, num_drafts = output.usage.completion_tokens, output.usage.draft_tokens
    return Timings(
        prompt_n=output.usage.prompt_tokens - output.usage.cached_tokens,
        prompt_ms=(output.first_s - output.start_s) * 1e3,
        predicted_n=num_tokens,
        predicted_ms=predicted_s * 1e3,
        predicted_per_second=num_tokens / predicted_s if predicted_s else 0.0,
        draft_n=num_drafts or UNSET,
        draft_n_accepted=sum(output.usage.accepted_drafts) if num_drafts else UNSET,
    )


def settings_of(call: Call) -> dict[str, Any]:
    sampling = call.sampling
    return {
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "stream": call.is_streaming,
        "n_probs": sampling.logprobs or 0,
    }


async def props(_: web.Request, context: HttpContext) -> web.Response:
    state = context.state
    defaults = {"params": msgspec.to_builtins(state.defaults), "n_ctx": state.max_model_len}
    name = context.model_names[0]
    return json_response(
        {
            "default_generation_settings": defaults,
            "total_slots": None if state.spec is None else state.spec.max_rows,
            "model_alias": name,
            "model_path": context.settings.get("model") or name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"aserve {version()}",
        }
    )


ROUTES = (
    post("/completion", LlamaBody, completion),
    post("/completions", LlamaBody, completion),
    get("/props", props),
)
