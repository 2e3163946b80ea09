"""POST /v1/completions: text or token ids in, text out.

Must not know the engine; it checks a body, makes a call and renders the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import InvalidRequest
from aserve.http.openai.answers import Choice, UsageBody, is_visible
from aserve.http.openai.call import Call, Origin, build_call, check_body, sampling_of
from aserve.http.openai.limits import MAX_LOGPROBS, Range, check_within
from aserve.http.openai.prompt_scores import Scores, check_prompt_logprobs, prompt_scores
from aserve.http.openai.prompts import prompts_of
from aserve.http.openai.schema import CompletionBody
from aserve.messages import OutputChunk, PromptToken, TokenLogprob

DEFAULT_MAX_TOKENS = 16


def completion_call(body: CompletionBody, origin: Origin) -> Call:
    check_body(body, origin)
    _check_suffix(body)
    _check_best_of(body)
    check_prompt_logprobs(body)
    with_special = body.add_special_tokens is not False
    prompts = prompts_of(body.prompt, param="prompt", with_special=with_special)
    if body.logprobs is not None:
        check_within(body.logprobs, Range(0, MAX_LOGPROBS), param="logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
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


def _check_suffix(body: CompletionBody) -> None:
    if body.suffix:
        raise InvalidRequest(
            "Unsupported value for 'suffix': this server supports no suffix, since the model does "
            "not fill in the middle.",
            param="suffix",
            code="unsupported_value",
        )


def _check_best_of(body: CompletionBody) -> None:
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise InvalidRequest(
            f"Invalid 'best_of': it is {best_of}, less than n, {n}.",
            param="best_of",
            code="integer_below_min_value",
        )
    if best_of > n and body.stream:
        raise InvalidRequest(
            f"Invalid 'best_of': the best {n} of {best_of} are known only when all have ended, "
            "so they cannot be streamed.",
            param="best_of",
            code="invalid_value",
        )


class Logprobs(msgspec.Struct):
    """Parallel lists, one entry per token; null where nothing predicts it: at a prompt's start."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Scores | None] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET


class CompletionDialect:
    def __init__(self, call: Call) -> None:
        self.call = call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        return None

    def delta(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> bytes | None:
        if not is_visible(chunk, self.call):
            return None
        return self._answer(
            [self._choice(index, Choice([chunk]))],
            usage=usage if self.call.reports_usage else UNSET,
            seed=UNSET if chunk.finish_reason is None else self.call.sampling.seed,
        )

    def usage(self, usage: UsageBody) -> bytes:
        return self._answer([], usage=usage, seed=self.call.sampling.seed)

    def whole(self, choices: list[Choice], usage: UsageBody) -> bytes:
        bodies = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._answer(bodies, usage=usage, seed=self.call.sampling.seed)

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        asked = self.call.sampling
        echoed = choice.prompt.tokens if asked.echo else ()
        return CompletionChoice(
            index=index,
            text=choice.prompt.text + choice.text,
            logprobs=None
            if asked.logprobs is None
            else logprobs_of([*echoed, *choice.logprobs], num_top=asked.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if asked.return_token_ids else UNSET,
            prompt_token_ids=(choice.prompt_ids or UNSET) if asked.return_token_ids else UNSET,
            prompt_logprobs=prompt_scores(choice.prompt, asked),
        )

    def _answer(
        self,
        choices: list[CompletionChoice],
        *,
        usage: UsageBody | UnsetType | None,
        seed: int | UnsetType,
    ) -> bytes:
        return msgspec.json.encode(
            CompletionAnswer(
                id=self.call.call_id,
                created=self.call.created,
                model=self.call.model,
                choices=choices,
                usage=usage,
                seed=seed,
            )
        )


def logprobs_of(entries: Sequence[TokenLogprob | PromptToken], *, num_top: int) -> Logprobs:
    return Logprobs(
        tokens=[spelled(entry.token, entry.token_bytes) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[top_of(entry, num_top=num_top) for entry in entries] if num_top else None,
        text_offset=[entry.text_offset for entry in entries],
    )


def top_of(entry: TokenLogprob | PromptToken, *, num_top: int) -> dict[str, float] | None:
    """Best first; the chosen token is there, too, at its place or at the end."""
    if entry.logprob is None:
        return None
    best = entry.top[:num_top]
    top = {spelled(other.token, other.token_bytes): other.logprob for other in best}
    top.setdefault(spelled(entry.token, entry.token_bytes), entry.logprob)
    return top


def spelled(token: str, token_bytes: bytes) -> str:
    """A token that is no whole characters is shown as its bytes, as OpenAI does."""
    if token.encode() == token_bytes:
        return token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
