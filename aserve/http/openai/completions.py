"""POST /v1/completions: text or token ids in, text out.

Must not know the engine; it checks a body, makes a call and renders the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import InvalidRequest
from aserve.http.openai.answers import Choice, UsageBody
from aserve.http.openai.call import Call, Origin, build_call, check_body, sampling_of
from aserve.http.openai.limits import MAX_LOGPROBS, Range, check_within
from aserve.http.openai.schema import CompletionBody
from aserve.messages import OutputChunk, Prompt, TextPrompt, TokenLogprob, TokenPrompt

DEFAULT_MAX_TOKENS = 16


def completion_call(body: CompletionBody, origin: Origin) -> Call:
    check_body(body, origin)
    _check_unsupported(body)
    prompts = prompts_of(body.prompt)
    if body.logprobs is not None:
        check_within(body.logprobs, Range(0, MAX_LOGPROBS), param="logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_of(
        body, max_tokens=max_tokens, logprobs=body.logprobs, draw_seed=origin.draw_seed
    )
    return build_call(body, origin, prompts=prompts, sampling=sampling, id_prefix="cmpl")


def prompts_of(prompt: str | list[str | int | list[int]] | None) -> list[Prompt]:
    """One text, texts, one list of ids, or lists of ids."""
    if prompt is None:
        raise InvalidRequest(
            "Missing required parameter: 'prompt'.",
            param="prompt",
            code="missing_required_parameter",
        )
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequest(
            "Invalid 'prompt': the list is empty.", param="prompt", code="empty_array"
        )
    texts = [item for item in prompt if isinstance(item, str)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(token_ids), len(lists)):
        raise InvalidRequest(
            "Invalid 'prompt': a list holds texts, token ids or lists of token ids, not a mixture.",
            param="prompt",
            code="invalid_type",
        )
    if token_ids:
        return [token_prompt(token_ids)]
    return [*map(TextPrompt, texts), *map(token_prompt, lists)]


def token_prompt(token_ids: Sequence[int]) -> TokenPrompt:
    return TokenPrompt(tuple(token_ids))


def _check_unsupported(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of", "only best_of equal to n")
    if body.echo:
        raise _unsupported("echo", "only false")
    if body.suffix:
        raise _unsupported("suffix", "no suffix, since the model does not fill in the middle")


def _unsupported(param: str, supported: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unsupported value for '{param}': this server supports {supported}.",
        param=param,
        code="unsupported_value",
    )


class Logprobs(msgspec.Struct):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


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

    def opening(self, index: int) -> bytes | None:
        return None

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return None
        choice = self._choice(index, chunk.text, list(chunk.logprobs))
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = chunk.stop_reason
        return self._answer(
            [choice],
            usage=None if self.call.reports_usage else UNSET,
            seed=UNSET if chunk.finish_reason is None else self.call.sampling.seed,
        )

    def usage(self, usage: UsageBody) -> bytes:
        return self._answer([], usage=usage, seed=self.call.sampling.seed)

    def whole(self, choices: list[Choice], usage: UsageBody) -> bytes:
        bodies = []
        for index, choice in enumerate(choices):
            body = self._choice(index, choice.text, choice.logprobs)
            body.finish_reason = choice.finish_reason
            body.stop_reason = choice.stop_reason
            bodies.append(body)
        return self._answer(bodies, usage=usage, seed=self.call.sampling.seed)

    def _choice(self, index: int, text: str, entries: list[TokenLogprob]) -> CompletionChoice:
        asked = self.call.sampling.logprobs
        return CompletionChoice(
            index, text, None if asked is None else logprobs_of(entries, has_top=asked > 0)
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


def logprobs_of(entries: Sequence[TokenLogprob], *, has_top: bool) -> Logprobs:
    return Logprobs(
        tokens=[spelled(entry.token, entry.token_bytes) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[top_of(entry) for entry in entries] if has_top else None,
        text_offset=[entry.text_offset for entry in entries],
    )


def top_of(entry: TokenLogprob) -> dict[str, float]:
    """Best first; the chosen token is there, too, at its place or at the end."""
    top = {spelled(other.token, other.token_bytes): other.logprob for other in entry.top}
    top.setdefault(spelled(entry.token, entry.token_bytes), entry.logprob)
    return top


def spelled(token: str, token_bytes: bytes) -> str:
    """A token that is no whole characters is shown as its bytes, as OpenAI does."""
    if token.encode() == token_bytes:
        return token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
