"""POST /generate and /generate_stream, and GET /info, as in Text Generation Inference (TGI).

Its clients expect one event for each token. The last token's event has the whole text, so an event
is held back until the next token comes or the output ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from aiohttp import web

from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.control.info import version
from aserve.http.delivery import json_response
from aserve.http.direct import frame
from aserve.http.generate.body import TgiBody, TgiGrammar, TgiParameters, TgiStreamBody
from aserve.http.openai.call import Call, Origin
from aserve.http.openai.checks import check_unsupported
from aserve.http.openai.completions import completion_call
from aserve.http.openai.limits import MAX_LOGPROBS, MAX_STOPS, RANGES, Range, check_within
from aserve.http.openai.schema import CompletionBody, StructuredOutputs
from aserve.http.rendering import Output, answer, field_names
from aserve.http.route import get, post
from aserve.http.sse import EVENT_STREAM, KEEP_ALIVE
from aserve.http.state import HttpContext, origin_of
from aserve.messages.output import OutputChunk
from aserve.messages.scored import TokenLogprob, TopLogprob

DEFAULT_MAX_TOKENS = 100

NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "logprobs": "parameters.top_n_tokens",
    "structured_outputs": "parameters.grammar",
    **{
        name: f"parameters.{name}"
        for name in (
            *("best_of", "temperature", "top_k", "top_p", "seed", "stop"),
            *("frequency_penalty", "repetition_penalty"),
        )
    },
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "typical_p": (1.0,),
    "watermark": (False,),
    "adapter_id": (),
}
ERROR_TYPES = {
    "invalid_request_error": "validation",
    "authentication_error": "validation",
    "rate_limit_error": "overloaded",
    "overloaded_error": "overloaded",
}


class TgiError(msgspec.Struct):
    """TGI's error with the code and field that aserve's other APIs have."""

    error: str
    error_type: str
    code: str
    param: str | None


def tgi_error(info: ErrorInfo) -> bytes:
    kind = ERROR_TYPES.get(info.type, "generation")
    return msgspec.json.encode(TgiError(info.message, kind, info.code, info.param))


async def generate_stream(
    request: web.Request, context: HttpContext, body: TgiBody
) -> web.StreamResponse:
    return await tgi_answer(request, context, body, is_streaming=True)


async def generate_either(
    request: web.Request, context: HttpContext, body: TgiStreamBody
) -> web.StreamResponse:
    """Answers Hugging Face's client, which sends both kinds of requests to the server's root."""
    return await tgi_answer(request, context, body, is_streaming=bool(body.stream))


async def tgi_answer(
    request: web.Request, context: HttpContext, body: TgiBody, *, is_streaming: bool
) -> web.StreamResponse:
    parameters = body.parameters or TgiParameters()
    check_unsupported(parameters, NEUTRAL, where="parameters.")
    origin = origin_of(request, context)
    with field_names(NAMES):
        call = tgi_call(body, parameters, origin, is_streaming=is_streaming)
    rendering = TgiRendering(call, body.inputs, parameters)
    rendering.special_ids = context.tokenize_service.special_ids
    return await answer(request, context, rendering)


def tgi_call(
    body: TgiBody, parameters: TgiParameters, origin: Origin, *, is_streaming: bool
) -> Call:
    if parameters.max_new_tokens == 0:
        raise InvalidRequest(
            "Invalid 'parameters.max_new_tokens': it must be positive.",
            param="max_tokens",
            code="integer_below_min_value",
        )
    if parameters.decoder_input_details and is_streaming:
        raise InvalidRequest(
            "Invalid 'parameters.decoder_input_details': they are not streamed.",
            param="parameters.decoder_input_details",
            code="invalid_value",
        )
    num_top = parameters.top_n_tokens or 0
    check_within(num_top, Range(0, MAX_LOGPROBS), param="logprobs")
    needs_tokens = is_streaming or parameters.details or parameters.decoder_input_details
    max_tokens = parameters.max_new_tokens
    completion = CompletionBody(
        model=body.model,
        prompt=body.inputs,
        stream=is_streaming,
        best_of=parameters.best_of,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=_temperature_of(parameters),
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        seed=parameters.seed,
        stop=parameters.stop,
        include_stop_str_in_output=True,  # TGI's texts end with the stop sequence
        truncate_prompt_tokens=parameters.truncate,
        logprobs=num_top if needs_tokens else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        structured_outputs=_constraint_of(parameters.grammar),
    )
    return completion_call(completion, origin)


def _temperature_of(parameters: TgiParameters) -> float:
    """Sampling is greedy unless a parameter of sampling is given, as in TGI."""
    if parameters.temperature is not None:
        return parameters.temperature
    samples = parameters.do_sample or parameters.top_k or parameters.top_p
    return 1.0 if samples else 0.0


def _constraint_of(grammar: TgiGrammar | None) -> StructuredOutputs | None:
    if grammar is None:
        return None
    match grammar.type:
        case "json" | "json_schema":
            schema = grammar.value
            if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
                schema = schema["schema"]  # the json_schema type names its schema
            return StructuredOutputs(json=schema)
        case "regex" if isinstance(grammar.value, str):
            return StructuredOutputs(regex=grammar.value)
        case _:
            raise InvalidRequest(
                "Invalid 'parameters.grammar': its type is json, json_schema or regex, and the "
                "value of a regex is a text.",
                param="structured_outputs",
                code="invalid_value",
            )


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool = False


class PrefillToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None


class Details(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]]


class StreamDetails(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int
    input_length: int


class Generated(msgspec.Struct, omit_defaults=True):
    generated_text: str
    details: Details | None = None


class StreamEvent(msgspec.Struct):
    index: int
    token: Token
    top_tokens: list[Token]
    generated_text: str | None = None
    details: StreamDetails | None = None


class TgiRendering:
    content_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE
    names: Mapping[str, str] = NAMES
    answered: frozenset[str] = frozenset()

    def __init__(self, call: Call, inputs: str, parameters: TgiParameters) -> None:
        self.call = call
        self.special_ids: frozenset[int] = frozenset()  # tokens that clients leave out of texts
        self._start = inputs if parameters.return_full_text else ""
        self._shows_details = bool(parameters.details or parameters.decoder_input_details)
        self._num_events = 0
        self._held = StreamEvent(0, Token(0, "", None), [])

    def events(self, index: int, chunk: OutputChunk, output: Output) -> Iterator[bytes]:
        for entry in chunk.logprobs:
            if self._num_events:
                yield frame(msgspec.json.encode(self._held))
            self._num_events += 1
            self._held = StreamEvent(self._num_events, self._token(entry), self._top(entry))
        output.logprobs.clear()  # a stream has no use for them any more
        if output.finish_reason is not None:
            self._held.generated_text = self._start + output.text
            self._held.details = StreamDetails(
                finish_reason=finish_reason_of(output),
                generated_tokens=output.usage.completion_tokens,
                seed=self.call.sampling.seed,
                input_length=output.usage.prompt_tokens,
            )
            yield frame(msgspec.json.encode(self._held))

    def last_events(self, outputs: list[Output]) -> Iterable[bytes]:
        return ()

    def failure(self, info: ErrorInfo) -> Iterable[bytes]:
        return (frame(tgi_error(info)),)

    def whole(self, outputs: list[Output]) -> Iterable[bytes]:
        """Returns the likeliest output if there are several (best_of)."""
        output = max(outputs, key=_mean_logprob)
        generated = Generated(self._start + output.text)
        if self._shows_details:
            generated.details = Details(
                finish_reason=finish_reason_of(output),
                generated_tokens=output.usage.completion_tokens,
                seed=self.call.sampling.seed,
                prefill=[
                    PrefillToken(each.token_id, each.token, each.logprob) for each in output.prompt
                ],
                tokens=[*map(self._token, output.logprobs)],
                top_tokens=[*map(self._top, output.logprobs)],
            )
        return (msgspec.json.encode(generated),)

    def _top(self, entry: TokenLogprob) -> list[Token]:
        tops = entry.top[: self.call.sampling.logprobs or 0]
        return [self._token(top) for top in tops]

    def _token(self, entry: TokenLogprob | TopLogprob) -> Token:
        is_special = entry.token_id in self.special_ids
        return Token(entry.token_id, entry.token, entry.logprob, is_special)


def _mean_logprob(output: Output) -> float:
    scores = [entry.logprob for entry in output.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf


def finish_reason_of(output: Output) -> str:
    if output.finish_reason == "stop":
        return "eos_token" if output.stop_reason is None else "stop_sequence"
    return "length"


async def info(_: web.Request, context: HttpContext) -> web.Response:
    """Describes the server in the fields of TGI's router."""
    state, spec = context.state, context.state.spec
    length = state.max_model_len or 0
    return json_response(
        {
            "model_id": context.model_names[0],
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": 0 if spec is None else spec.max_rows + spec.max_waiting,
            "max_best_of": int(RANGES["best_of"].high),
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": max(length - 1, 0),
            "max_total_tokens": length,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "aserve",
            "version": version(),
        }
    )


ROUTES = (
    post("/", TgiStreamBody, generate_either, errors=tgi_error),
    post("/generate_stream", TgiBody, generate_stream, errors=tgi_error),
    get("/info", info),
)
