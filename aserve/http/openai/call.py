"""A client's call: its requests to the engine, and the options of its answer.

A call is built once from a validated body and never changed.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from aserve.http.openai.answer_size import NO_MODEL, AnswerLimits, check_answer_size, obfuscated
from aserve.http.openai.grammars import grammar_of
from aserve.http.openai.limits import EMBEDDED, Caller, prediction_of, stops_of
from aserve.http.openai.schema import GenerationBody, StreamOptions
from aserve.http.time_limits import limits_in_body
from aserve.messages.output import OutputChunk
from aserve.messages.requests import GenerateRequest, Prompt, SamplingParams
from aserve.parsers.registry import NO_PARSERS, ParserNames
from aserve.text.defaults import NEUTRAL, GenerationDefaults

Number = TypeVar("Number", int, float)
Requests: TypeAlias = tuple[GenerateRequest, ...]

SEED_BITS = 53  # every client reads integers of this size exactly from JSON
SMALLEST_TOP_P = 1e-6  # so small that only the likeliest token is left, which is what 0 means
# WHY: logits are divided by the temperature in float32. Below about 1e-36 ordinary logits overflow
# to infinity, and long before that Gumbel noise falls below the spacing of float32 at the quotient.
# At 1e-5 even noise of 20 decides only between logits that differ by 2e-4, which is rounding error.
# Lower temperatures are therefore greedy, as in vLLM.
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Call:
    """The requests of one call, one per prompt, and the options of its answer.

    `sampling` has the client's parameters. The requests' own parameters differ from it: `n` is
    larger with best_of, and prompt_logprobs is set if logprobs are echoed. In the answer,
    choice `index` is child index % num_children of prompt index // num_children.
    NOTE: a request's id ends in the number of its prompt.
    """

    call_id: str
    model: str
    created: int
    requests: tuple[GenerateRequest, ...]
    sampling: SamplingParams
    is_streaming: bool
    reports_usage: bool
    reports_each_usage: bool  # in every event of a stream, not only in the last
    pad: Callable[[bytes], bytes] = bytes  # changes the events with text

    @property
    def num_children(self) -> int:
        return self.requests[0].sampling.n

    @property
    def num_sequences(self) -> int:
        return len(self.requests) * self.num_children

    def index_of(self, chunk: OutputChunk) -> int:
        return int(chunk.request_id.rpartition("-")[2]) * self.num_children + chunk.child


def random_seed() -> int:
    return secrets.randbits(SEED_BITS)


def seed_source(seed: int | None) -> Callable[[], int]:
    """Returns the source of seeds for requests without one."""
    if seed is None:
        return random_seed
    numbers = random.Random(seed)
    return lambda: numbers.getrandbits(SEED_BITS)


@dataclass(frozen=True, slots=True)
class Origin:
    """The id, time and caller of a call, and the server's defaults for it."""

    request_id: str
    created: int
    model_names: tuple[str, ...]
    draw_seed: Callable[[], int] = random_seed
    defaults: GenerationDefaults = NEUTRAL
    parsers: ParserNames = NO_PARSERS
    answer_limits: AnswerLimits = NO_MODEL
    caller: Caller = EMBEDDED
    always_reports_usage: bool = False
    # the requests with the adapter that `model` names, if it is the name of one, and with the
    # time limits of the headers, and the outputs with which a fork begins
    completed: Callable[[str | None, Requests], Requests] = lambda _, requests: requests


def sampling_of(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    draw_seed: Callable[[], int],
    defaults: GenerationDefaults,
) -> SamplingParams:
    temperature = _value_or(body.temperature, defaults.temperature)
    return SamplingParams(
        seed=draw_seed() if body.seed is None else body.seed,
        temperature=temperature if temperature >= SMALLEST_TEMPERATURE else 0.0,
        top_p=max(_value_or(body.top_p, defaults.top_p), SMALLEST_TOP_P),
        top_k=max(_value_or(body.top_k, defaults.top_k), 0),
        min_p=_value_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_value_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((body.logit_bias or {}).items()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=tuple(stops_of(body)),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        logprobs=logprobs,
        raw_logprobs=body.logprobs_mode == "raw_logprobs",
        n=body.n or 1,
        grammar=grammar_of(body),
    )


def _value_or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def build_call(
    body: GenerationBody,
    origin: Origin,
    *,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    id_prefix: str,
    best_of: int | None = None,
) -> Call:
    """Builds a call from a checked body. With `best_of`, that many sequences are generated for each
    prompt and compared by their logprobs.
    """
    run = sampling
    if sampling.echo and sampling.logprobs is not None:
        num_top = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        run = msgspec.structs.replace(run, prompt_logprobs=num_top)
    if best_of is not None and best_of > sampling.n:
        run = msgspec.structs.replace(run, n=best_of, logprobs=sampling.logprobs or 0)
    origin.caller.check_priority(body.priority)
    origin.caller.check_sequences(len(prompts), run.n)
    requests = tuple(
        request_of(
            body,
            prompt,
            sampling=run,
            request_id=f"{origin.request_id}-{i}",
            caller=origin.caller,
        )
        for i, prompt in enumerate(prompts)
    )
    check_answer_size(requests, origin.answer_limits, is_whole=not body.stream)
    options = body.stream_options or StreamOptions()
    reports_usage = bool(options.include_usage or origin.always_reports_usage)
    return Call(
        call_id=f"{id_prefix}{origin.request_id}",
        model=body.model or origin.model_names[0],
        created=origin.created,
        requests=origin.completed(body.model, requests),
        sampling=sampling,
        is_streaming=bool(body.stream),
        reports_usage=reports_usage or bool(options.include_timings),
        reports_each_usage=reports_usage and bool(options.continuous_usage_stats),
        pad=obfuscated if options.include_obfuscation else bytes,
    )


def request_of(
    body: GenerationBody,
    prompt: Prompt,
    *,
    sampling: SamplingParams,
    request_id: str,
    caller: Caller = EMBEDDED,
) -> GenerateRequest:
    """Builds one request. The default caller is a program that embeds the engine."""
    request = GenerateRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        prediction=prediction_of(body),
        namespace=caller.namespace_of(body.cache_salt),
        priority=body.priority or 0,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncates_end=body.truncation_side == "right",
        client=caller.client,
    )
    return limits_in_body(body).apply(request)
