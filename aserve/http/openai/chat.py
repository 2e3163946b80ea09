"""POST /v1/chat/completions: checks the body, makes a call and renders the assistant's message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonEach, JsonList, pieces_of
from aserve.http.openai.answers import LogprobEntry, UsageBody, ids_of, is_visible, logprob_entries
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.checks import check_body, num_logprobs
from aserve.http.openai.choices import ChatChoice
from aserve.http.openai.conversation import chat_prompt
from aserve.http.openai.prompt_logprobs import check_prompt_logprobs
from aserve.http.openai.schema import ChatBody
from aserve.messages.output import OutputChunk


def chat_call(body: ChatBody, origin: Origin) -> Call:
    check_body(body, origin.model_names)
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


class ChatLogprobs(msgspec.Struct):
    content: list[LogprobEntry] | JsonList
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
    choices: list[DeltaChoice] | JsonEach
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: JsonList | UnsetType = UNSET


class ChatDialect:
    def __init__(self, call: Call) -> None:
        self.call = call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        return self._chunk([DeltaChoice(index, Delta(role="assistant", content=""))], usage=usage)

    def delta(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> bytes | None:
        if not is_visible(chunk, self.call):
            return None
        choice = DeltaChoice(
            index,
            Delta(content=chunk.text or UNSET),
            self._logprobs(logprob_entries(chunk.logprobs)),
            token_ids=self._shown(chunk.token_ids),
        )
        prompt_ids = ids_of(chunk.prompt_ids)
        if chunk.finish_reason is None:
            return self._chunk([choice], usage=usage, prompt_ids=prompt_ids)
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = chunk.stop_reason
        seed = self.call.sampling.seed
        return self._chunk([choice], usage=usage, seed=seed, prompt_ids=prompt_ids)

    def usage(self, usage: UsageBody) -> bytes:
        return self._chunk([], usage=usage, seed=self.call.sampling.seed)

    def new_choice(self) -> ChatChoice:
        return ChatChoice(self.call.sampling)

    def whole_answer(self, choices: list[ChatChoice], usage: UsageBody) -> Iterator[bytes]:
        first = choices[0]
        has_scores = self.call.sampling.prompt_logprobs is not None
        answer = self._answer(
            "chat.completion",
            JsonEach(lambda: map(self._message, range(len(choices)), choices)),
            usage=usage,
            seed=self.call.sampling.seed,
            prompt_ids=first.prompt_ids,
        )
        answer.prompt_logprobs = first.prompt_logprobs if has_scores else UNSET
        return pieces_of(answer)

    def _message(self, index: int, choice: ChatChoice) -> MessageChoice:
        return MessageChoice(
            index,
            AssistantMessage(choice.text),
            self._logprobs(choice.logprobs),
            choice.finish_reason,
            choice.stop_reason,
            choice.token_ids if self.call.sampling.return_token_ids else UNSET,
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
        answer = self._answer(kind, choices, usage=shown, seed=seed, prompt_ids=prompt_ids)
        return msgspec.json.encode(answer)

    def _answer(
        self,
        kind: str,
        choices: list[DeltaChoice] | JsonEach,
        *,
        usage: UsageBody | UnsetType | None,
        seed: int | UnsetType,
        prompt_ids: list[int] | None,
    ) -> ChatAnswer:
        return ChatAnswer(
            id=self.call.call_id,
            object=kind,
            created=self.call.created,
            model=self.call.model,
            choices=choices,
            usage=usage,
            seed=seed,
            prompt_token_ids=prompt_ids or UNSET,
        )

    def _shown(self, token_ids: bytes) -> list[int] | UnsetType:
        return ids_of(token_ids) if self.call.sampling.return_token_ids else UNSET

    def _logprobs(self, entries: list[LogprobEntry] | JsonList) -> ChatLogprobs | None:
        return None if self.call.sampling.logprobs is None else ChatLogprobs(entries)
