"""POST /v1/completions: checks the body, makes a call and renders the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonEach, JsonList, pieces_of
from aserve.http.openai.answers import TEXT, PlainEvents, UsageBody, ids_of, is_visible
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.checks import check_best_of, check_body, check_suffix
from aserve.http.openai.choices import TextChoice
from aserve.http.openai.completion_logprobs import LogprobLists, Logprobs, chunk_logprobs
from aserve.http.openai.limits import MAX_LOGPROBS, Range, check_within
from aserve.http.openai.prompt_logprobs import check_prompt_logprobs
from aserve.http.openai.schema import CompletionBody, prompts_of
from aserve.messages.output import OutputChunk
from aserve.receipts.record import Receipt

DEFAULT_MAX_TOKENS = 16


def completion_call(
    body: CompletionBody, origin: Origin, *, default_max_tokens: int | None = DEFAULT_MAX_TOKENS
) -> Call:
    """Builds the call. A `default_max_tokens` of None means the rest of the context."""
    check_body(body, origin.model_names)
    check_suffix(body)
    check_best_of(body)
    check_prompt_logprobs(body)
    with_special = body.add_special_tokens is not False
    prompts = prompts_of(body.prompt, param="prompt", with_special=with_special)
    if body.logprobs is not None:
        check_within(body.logprobs, Range(0, MAX_LOGPROBS), param="logprobs")
    max_tokens = default_max_tokens if body.max_tokens is None else body.max_tokens
    sampling = sampling_of(
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        draw_seed=origin.draw_seed,
        defaults=origin.defaults,
    )
    sampling = msgspec.structs.replace(
        sampling, echo=bool(body.echo), prompt_logprobs=body.prompt_logprobs
    )
    return build_call(
        body, origin, prompts=prompts, sampling=sampling, id_prefix="cmpl-", best_of=body.best_of
    )


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | LogprobLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: JsonList | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice] | JsonEach
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET  # added by http/receipts.py


class CompletionDialect:
    def __init__(self, call: Call) -> None:
        self.call = call
        self._plain = PlainEvents(
            call, lambda index: self._delta(CompletionChoice(index, TEXT), None)
        )

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        return None

    def deltas(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> Iterable[bytes]:
        if self._plain.have(chunk):
            return (self._plain.of(index, chunk.text),) if chunk.text else ()
        if not is_visible(chunk, self.call):
            return ()
        return (self._delta(self._part(index, chunk), usage),)

    def usage(self, usage: UsageBody) -> bytes:
        answer = self._answer([], usage=usage, seed=self.call.sampling.seed)
        return msgspec.json.encode(answer)

    def new_choice(self, index: int) -> TextChoice:
        return TextChoice(self.call.sampling)

    def whole_answer(self, choices: list[TextChoice], usage: UsageBody) -> Iterator[bytes]:
        bodies = JsonEach(lambda: map(self._whole_choice, range(len(choices)), choices))
        return pieces_of(self._answer(bodies, usage=usage, seed=self.call.sampling.seed))

    def _delta(self, choice: CompletionChoice, usage: UsageBody | None) -> bytes:
        answer = self._answer(
            [choice],
            usage=usage if self.call.reports_usage else UNSET,
            seed=UNSET if choice.finish_reason is None else self.call.sampling.seed,
        )
        return msgspec.json.encode(answer)

    def _part(self, index: int, chunk: OutputChunk) -> CompletionChoice:
        sampling = self.call.sampling
        text = chunk.text if chunk.prompt is None else chunk.prompt.text + chunk.text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=chunk_logprobs(chunk, sampling),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=ids_of(chunk.token_ids) if sampling.return_token_ids else UNSET,
            prompt_token_ids=ids_of(chunk.prompt_ids) or UNSET,
        )

    def _whole_choice(self, index: int, choice: TextChoice) -> CompletionChoice:
        sampling = self.call.sampling
        return CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None if sampling.logprobs is None else choice.logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if sampling.return_token_ids else UNSET,
            prompt_token_ids=(choice.prompt_ids or UNSET) if sampling.return_token_ids else UNSET,
            prompt_logprobs=UNSET if sampling.prompt_logprobs is None else choice.prompt_logprobs,
        )

    def _answer(
        self,
        choices: list[CompletionChoice] | JsonEach,
        *,
        usage: UsageBody | UnsetType | None,
        seed: int | UnsetType,
    ) -> CompletionAnswer:
        return CompletionAnswer(
            id=self.call.call_id,
            created=self.call.created,
            model=self.call.model,
            choices=choices,
            usage=usage,
            seed=seed,
        )
