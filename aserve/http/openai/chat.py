"""POST /v1/chat/completions: messages in, an assistant's message out.

Must not know the engine or the chat template; it checks a body, makes a call, renders the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import InvalidRequest
from aserve.http.openai.answers import Choice, LogprobEntry, UsageBody, is_visible, logprob_entries
from aserve.http.openai.call import Call, Origin, build_call, check_body, sampling_of
from aserve.http.openai.conversation import chat_prompt
from aserve.http.openai.prompt_scores import Scores, check_prompt_logprobs, prompt_scores
from aserve.http.openai.schema import ChatBody
from aserve.messages import OutputChunk, TokenLogprob


def chat_call(body: ChatBody, origin: Origin) -> Call:
    check_body(body, origin)
    prompt = chat_prompt(body)
    check_prompt_logprobs(body)
    max_tokens = body.max_completion_tokens
    sampling = sampling_of(
        body,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=num_logprobs(body),
        draw_seed=origin.draw_seed,
        defaults=origin.defaults,
    )
    sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.prompt_logprobs)
    return build_call(body, origin, prompts=[prompt], sampling=sampling, id_prefix="chatcmpl-")


def num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest(
            "Invalid 'top_logprobs': it needs 'logprobs' to be true.",
            param="top_logprobs",
            code="invalid_value",
        )
    return None


class ChatLogprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[DeltaChoice] | list[MessageChoice]
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Scores | None] | UnsetType = UNSET


class ChatDialect:
    def __init__(self, call: Call) -> None:
        self.call = call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        return self._chunk([DeltaChoice(index, Delta(role="assistant", content=""))], usage=usage)

    def delta(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> bytes | None:
        if not is_visible(chunk, self.call):
            return None
        part = Choice([chunk])
        choice = DeltaChoice(
            index,
            Delta(content=part.text or UNSET),
            self._logprobs(part.logprobs),
            token_ids=self._token_ids(part),
        )
        if part.finish_reason is None:
            return self._chunk([choice], usage=usage, prompt_ids=part.prompt_ids)
        choice.finish_reason = part.finish_reason
        choice.stop_reason = part.stop_reason
        seed = self.call.sampling.seed
        return self._chunk([choice], usage=usage, seed=seed, prompt_ids=part.prompt_ids)

    def usage(self, usage: UsageBody) -> bytes:
        return self._chunk([], usage=usage, seed=self.call.sampling.seed)

    def whole(self, choices: list[Choice], usage: UsageBody) -> bytes:
        return self._answer(
            "chat.completion",
            [
                MessageChoice(
                    index,
                    AssistantMessage(choice.text),
                    self._logprobs(choice.logprobs),
                    choice.finish_reason,
                    choice.stop_reason,
                    self._token_ids(choice),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
            seed=self.call.sampling.seed,
            prompt_ids=choices[0].prompt_ids,
            prompt_logprobs=prompt_scores(choices[0].prompt, self.call.sampling),
        )

    def _chunk(
        self,
        choices: list[DeltaChoice],
        *,
        usage: UsageBody | None,
        seed: int | UnsetType = UNSET,
        prompt_ids: list[int] | None = None,
    ) -> bytes:
        shown = usage if self.call.reports_usage else UNSET
        kind = "chat.completion.chunk"
        return self._answer(kind, choices, usage=shown, seed=seed, prompt_ids=prompt_ids)

    def _answer(
        self,
        kind: str,
        choices: list[DeltaChoice] | list[MessageChoice],
        *,
        usage: UsageBody | UnsetType | None,
        seed: int | UnsetType,
        prompt_ids: list[int] | None,
        prompt_logprobs: list[Scores | None] | UnsetType = UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            ChatAnswer(
                id=self.call.call_id,
                object=kind,
                created=self.call.created,
                model=self.call.model,
                choices=choices,
                usage=usage,
                seed=seed,
                prompt_token_ids=prompt_ids or UNSET,
                prompt_logprobs=prompt_logprobs,
            )
        )

    def _token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return choice.token_ids if self.call.sampling.return_token_ids else UNSET

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self.call.sampling.logprobs is None:
            return None
        return ChatLogprobs(logprob_entries(entries))
