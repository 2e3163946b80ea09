"""POST /v1/chat/completions: messages in, an assistant's message out.

Must not know the engine or the chat template; it checks a body, makes a call, renders the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import InvalidRequest
from aserve.http.openai.answers import Choice, UsageBody
from aserve.http.openai.call import Call, Origin, build_call, check_body, sampling_of
from aserve.http.openai.conversation import chat_prompt
from aserve.http.openai.schema import ChatBody
from aserve.messages import OutputChunk, TokenLogprob, TopLogprob


def chat_call(body: ChatBody, origin: Origin) -> Call:
    check_body(body, origin)
    prompt = chat_prompt(body)
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            "Unsupported value for 'response_format': this server supports only type text.",
            param="response_format",
            code="unsupported_value",
        )
    max_tokens = body.max_completion_tokens
    sampling = sampling_of(
        body,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=num_logprobs(body),
        draw_seed=origin.draw_seed,
    )
    return build_call(body, origin, prompts=[prompt], sampling=sampling, id_prefix="chatcmpl")


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


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopEntry]


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


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[DeltaChoice] | list[MessageChoice]
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET


class ChatDialect:
    def __init__(self, call: Call) -> None:
        self.call = call

    def opening(self, index: int) -> bytes | None:
        return self._chunk([DeltaChoice(index, Delta(role="assistant", content=""))])

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return None
        choice = DeltaChoice(
            index, Delta(content=chunk.text or UNSET), self._logprobs(chunk.logprobs)
        )
        if chunk.finish_reason is None:
            return self._chunk([choice])
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = chunk.stop_reason
        return self._chunk([choice], seed=self.call.sampling.seed)

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
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
            seed=self.call.sampling.seed,
        )

    def _chunk(
        self,
        choices: list[DeltaChoice],
        *,
        usage: UsageBody | None = None,
        seed: int | UnsetType = UNSET,
    ) -> bytes:
        shown = usage if self.call.reports_usage else UNSET
        return self._answer("chat.completion.chunk", choices, usage=shown, seed=seed)

    def _answer(
        self,
        kind: str,
        choices: list[DeltaChoice] | list[MessageChoice],
        *,
        usage: UsageBody | UnsetType | None,
        seed: int | UnsetType,
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
            )
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self.call.sampling.logprobs is None:
            return None
        return ChatLogprobs(
            [
                LogprobEntry(
                    entry.token,
                    entry.logprob,
                    list(entry.token_bytes),
                    [*map(top_entry, entry.top)],
                )
                for entry in entries
            ]
        )


def top_entry(entry: TopLogprob) -> TopEntry:
    return TopEntry(entry.token, entry.logprob, list(entry.token_bytes))
