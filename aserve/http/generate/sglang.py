"""POST /generate as in SGLang: texts or token ids in, texts, ids and log-probabilities out. A body
with `inputs` belongs to Text Generation Inference.

Each event of a stream has the whole output so far. Past CUMULATIVE_CHARS an event is sent only when
the output has grown by a part of its length, so that the bytes of a stream grow linearly with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.abort import ABORTED, ABORTS
from aserve.http.direct import frame
from aserve.http.errors import ERROR_FORMAT, error_body
from aserve.http.generate.body import GenerateBody, SglangSampling, TgiBody
from aserve.http.generate.tgi import tgi_answer, tgi_error
from aserve.http.openai.call import Call, Origin
from aserve.http.openai.checks import check_only_one, check_unsupported
from aserve.http.openai.completions import completion_call
from aserve.http.openai.limits import MAX_LOGPROBS, MAX_RID_CHARS, Range, check_within
from aserve.http.openai.schema import CompletionBody, StructuredOutputs, TextsOrIds
from aserve.http.rendering import Output, answer, field_names, one_or_list
from aserve.http.route import post
from aserve.http.sse import DONE, EVENT_STREAM, KEEP_ALIVE
from aserve.http.state import HttpContext, origin_of
from aserve.messages.base import MAX_INT32
from aserve.messages.output import OutputChunk
from aserve.messages.scored import PromptToken, TokenLogprob

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 128
CUMULATIVE_CHARS = 4096
GROWTH = 256  # a longer output is sent again when it has grown by 1 / GROWTH
# The same of outputs with log-probabilities, which are many times as long, and the characters of a
# log-probability.
SCORED_CHARS, SCORED_GROWTH, LOGPROB_CHARS = 1 << 16, 16, 40

# aserve's names of the fields that errors name, and SGLang's.
NAMES = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "cache_salt": "extra_key",
    "structured_outputs": "sampling_params",
    **{
        name: f"sampling_params.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
        )
    },
}
TGI_FIELDS = {"inputs", "parameters", "model", "stream"}
NULL = (msgspec.Raw(b"null"),)
NEUTRAL: dict[str, tuple[object, ...]] = {
    "token_ids_logprob": (),
    "input_embeds": NULL,
    "image_data": NULL,
    "audio_data": NULL,
    "video_data": NULL,
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
}
NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "stop_regex": (),
    "custom_params": ({},),
}


async def generate(
    request: web.Request, context: HttpContext, body: GenerateBody
) -> web.StreamResponse:
    """Answers SGLang's clients, and those of TGI, whose bodies have `inputs`."""
    if body.inputs is None:
        return await sglang_answer(request, context, body)
    request[ERROR_FORMAT] = tgi_error
    others = set(body.__struct_fields__) - TGI_FIELDS
    if any(getattr(body, name) not in (None, *NULL) for name in others):
        raise InvalidRequest(
            "Invalid 'inputs': the body also has fields of SGLang's API. Send 'text' or "
            "'input_ids' with them, or 'inputs' with 'parameters'.",
            param="inputs",
            code="invalid_value",
        )
    as_tgi = TgiBody(inputs=body.inputs, parameters=body.parameters, model=body.model)
    return await tgi_answer(request, context, as_tgi, is_streaming=bool(body.stream))


async def sglang_answer(
    request: web.Request, context: HttpContext, body: GenerateBody
) -> web.StreamResponse:
    rendering = sglang_rendering(
        body, origin_of(request, context), weight_version=context.state.weight_version
    )
    with request.app[ABORTS].named(rendering.rids, rendering.call.requests):
        return await answer(request, context, rendering)


def sglang_rendering(
    body: GenerateBody, origin: Origin, *, weight_version: str = "default"
) -> SglangRendering:
    _check(body)
    sampling = _shared(body.sampling_params, "sampling_params") or SglangSampling()
    check_unsupported(sampling, NEUTRAL_SAMPLING, where="sampling_params.")
    with field_names(NAMES):
        call = completion_call(_completion_body(body, sampling), origin)
    call = dataclasses.replace(call, is_streaming=bool(body.stream))
    is_batch = isinstance(body.text, list) or bool(
        body.input_ids and not isinstance(body.input_ids[0], int)
    )
    return SglangRendering(
        call,
        rids=_rids_of(body, call),
        is_list=is_batch or call.num_children > 1,
        first_scored=_shared(body.logprob_start_len, "logprob_start_len"),
        shows_text=bool(body.return_text_in_logprobs),
        weight_version=weight_version,
    )


def _check(body: GenerateBody) -> None:
    check_unsupported(body, NEUTRAL)
    if body.parameters is not None:
        raise InvalidRequest(
            "Invalid 'parameters': they belong to 'inputs'; with 'text' or 'input_ids' send "
            "'sampling_params'.",
            param="parameters",
            code="invalid_value",
        )
    for name, limit in (
        ("logprob_start_len", Range(-1, MAX_INT32)),
        ("top_logprobs_num", Range(0, MAX_LOGPROBS)),
    ):
        value = _shared(getattr(body, name), name)
        if value is not None:
            check_within(value, limit, param=name)


def _completion_body(body: GenerateBody, sampling: SglangSampling) -> CompletionBody:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest(
            "Give either 'text' or 'input_ids' (or 'inputs', as in Text Generation Inference).",
            param="text",
            code="missing_required_parameter",
        )
    num_top = None
    if _shared(body.return_logprob, "return_logprob"):
        num_top = _shared(body.top_logprobs_num, "top_logprobs_num") or 0
    start = _shared(body.logprob_start_len, "logprob_start_len")
    scores_prompt = num_top is not None and start is not None and start >= 0
    max_tokens = sampling.max_new_tokens
    paths = body.lora_path
    adapters: str | list[str] | None = (
        [each or "" for each in paths] if isinstance(paths, list) else paths
    )
    return CompletionBody(
        model=_shared(adapters, "lora_path") or body.model,
        prompt=_prompts_of(body),
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        min_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop_str_in_output=sampling.no_stop_trim,
        n=sampling.n,
        logit_bias=sampling.logit_bias,
        seed=sampling.sampling_seed,
        logprobs=num_top,
        prompt_logprobs=num_top if scores_prompt else None,
        structured_outputs=_constraint_of(sampling),
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        max_queue_ms=body.max_queue_ms,
        cache_salt=body.extra_key,
        return_token_ids=True,
    )


def _prompts_of(body: GenerateBody) -> TextsOrIds | None:
    if body.input_ids is not None:
        return [*body.input_ids]
    return [*body.text] if isinstance(body.text, list) else body.text


def _constraint_of(sampling: SglangSampling) -> StructuredOutputs | None:
    names = ("json_schema", "regex", "ebnf", "structural_tag")
    if check_only_one({name: getattr(sampling, name) for name in names}) is None:
        return None
    return StructuredOutputs(
        json=sampling.json_schema,
        regex=sampling.regex,
        grammar=sampling.ebnf,
        structural_tag=sampling.structural_tag,
    )


def _shared(value: T | list[T] | None, name: str) -> T | None:
    """Returns the value for all prompts of the batch. Raises if they differ."""
    if not isinstance(value, list):
        return value
    if any(item != value[0] for item in value):
        raise InvalidRequest(
            f"Unsupported value for '{name}': the prompts of one request share it. Send prompts "
            "with different values in requests of their own.",
            param=name,
            code="unsupported_value",
        )
    return value[0] if value else None


def _rids_of(body: GenerateBody, call: Call) -> list[str]:
    """Returns the client's id of each prompt, or the server's."""
    size = len(call.requests)
    match body.rid:
        case None:
            return [request.request_id for request in call.requests]
        case str():
            rids = [body.rid] if size == 1 else [f"{body.rid}_{i}" for i in range(size)]
        case _:
            rids = body.rid
    if len(rids) != size or len(set(rids)) != size or max(map(len, rids)) > MAX_RID_CHARS:
        raise InvalidRequest(
            f"Invalid 'rid': expected {size} different ids of at most {MAX_RID_CHARS} characters.",
            param="rid",
            code="invalid_value",
        )
    return rids


class MetaInfo(msgspec.Struct):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Any] | UnsetType = UNSET
    output_token_logprobs: list[Any] | UnsetType = UNSET
    input_top_logprobs: list[Any] | UnsetType = UNSET
    output_top_logprobs: list[Any] | UnsetType = UNSET


class Generated(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class SglangRendering:
    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE
    names: Mapping[str, str] = NAMES
    answered = frozenset({ABORTED})

    def __init__(
        self,
        call: Call,
        *,
        rids: list[str],
        is_list: bool,
        first_scored: int | None,
        shows_text: bool,
        weight_version: str,
    ) -> None:
        self.call = call
        self.rids = rids
        self._is_list = is_list
        self._first_scored = first_scored or 0
        self._shows_text = shows_text
        self._weight_version = weight_version
        self._sent_len = [0] * call.num_sequences

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        if not chunk.token_ids and output.finish_reason is None:
            return
        if self._is_due(index, output) or output.finish_reason is not None:
            record = self._generated(index, output)
            record.index = index if self._is_list else UNSET
            yield frame(msgspec.json.encode(record))

    def _is_due(self, index: int, output: Output) -> bool:
        """Returns whether an output has grown enough to be sent. Its tokens may have no text."""
        length = max(output.text_len, output.usage.completion_tokens)
        whole_len, growth = CUMULATIVE_CHARS, GROWTH
        num_top = self.call.sampling.logprobs
        if num_top is not None:
            num_scored = len(output.logprobs) + len(output.prompt)
            length += LOGPROB_CHARS * num_scored * (1 + num_top)
            whole_len, growth = SCORED_CHARS, SCORED_GROWTH
        is_due = length <= whole_len or length - self._sent_len[index] >= length // growth
        if is_due:
            self._sent_len[index] = length
        return is_due

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return (DONE,)

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return frame(error_body(info)), DONE

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        return one_or_list(map(self._generated, count(), outputs), is_list=self._is_list)

    def _generated(self, index: int, output: Output) -> Generated:
        usage = output.usage
        meta = MetaInfo(
            id=self.rids[index // self.call.num_children],
            finish_reason=self._finish_reason(output),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            weight_version=self._weight_version,
        )
        if output.finish_reason is not None:
            meta.e2e_latency = output.last_s - output.start_s
        self._add_logprobs(meta, output)
        return Generated(output.text, output.token_ids, meta)

    def _finish_reason(self, output: Output) -> dict[str, Any] | None:
        match output.finish_reason:
            case None:
                return None
            case "stop":
                matched = output.stop_reason
                if matched is None:
                    matched = output.token_ids[-1] if output.token_ids else None
                return {"type": "stop", "matched": matched}
            case "length":
                return {"type": "length", "length": output.usage.completion_tokens}
            case reason:
                ended = f"The request was ended: {reason}."
                message = ended if output.error is None else output.error.message
                return {"type": "abort", "message": message}

    def _add_logprobs(self, meta: MetaInfo, output: Output) -> None:
        sampling = self.call.sampling
        if sampling.logprobs is None:
            return
        num_top = sampling.logprobs
        meta.output_token_logprobs = [*map(self._entry, output.logprobs)]
        if num_top:
            meta.output_top_logprobs = [self._top(entry, num_top) for entry in output.logprobs]
        if sampling.prompt_logprobs is not None:
            scored = output.prompt[self._first_scored :]
            meta.input_token_logprobs = [*map(self._entry, scored)]
            if num_top:
                meta.input_top_logprobs = [self._top(entry, num_top) for entry in scored]

    def _entry(self, entry: TokenLogprob | PromptToken) -> tuple[float | None, int, str | None]:
        return entry.logprob, entry.token_id, entry.token if self._shows_text else None

    def _top(self, entry: TokenLogprob | PromptToken, num_top: int) -> list[Any] | None:
        if entry.logprob is None:
            return None
        return [
            (top.logprob, top.token_id, top.token if self._shows_text else None)
            for top in entry.top[:num_top]
        ]


ROUTES = (post("/generate", GenerateBody, generate),)
