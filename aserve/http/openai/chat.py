"""POST /v1/chat/completions: checks the body, makes a call and renders the assistant's message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.long_json import JsonEach, JsonList, pieces_of
from aserve.http.openai.answers import (
    TEXT,
    CompletionDetails,
    LogprobEntry,
    PlainEvents,
    UsageBody,
    ids_of,
    is_visible,
    logprob_entries,
)
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.chat_plan import ChatPlan, plan_of_body
from aserve.http.openai.chat_records import (
    ChatAnswer,
    ChatLogprobs,
    Delta,
    DeltaChoice,
    MessageChoice,
    deltas_of,
    message_of,
)
from aserve.http.openai.checks import check_body, num_logprobs
from aserve.http.openai.choices import ChatChoice
from aserve.http.openai.parsed import ParsedChoice
from aserve.http.openai.prompt_logprobs import check_prompt_logprobs
from aserve.http.openai.schema import ChatBody
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk
from aserve.parsers.events import Content


def chat_dialect(body: ChatBody, origin: Origin) -> ChatDialect:
    """Checks a body, and returns its call with the rendering of the answer."""
    check_body(body, origin.model_names)
    check_prompt_logprobs(body)
    max_tokens = body.max_completion_tokens
    sampling = sampling_of(
        body,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=num_logprobs(body),
        draw_seed=origin.draw_seed,
        defaults=origin.defaults,
    )
    plan = plan_of_body(body, origin.parsers, sampling.grammar)
    sampling = msgspec.structs.replace(
        plan.constrained(sampling), prompt_logprobs=body.prompt_logprobs
    )
    prompts = [plan.prompt]
    call = build_call(body, origin, prompts=prompts, sampling=sampling, id_prefix="chatcmpl-")
    return ChatDialect(call, plan)


class ChatDialect:
    def __init__(self, call: Call, plan: ChatPlan) -> None:
        self.call = call
        self._plan = plan
        self._plain = PlainEvents(call, self._content_sample)
        self._parsed = [
            ParsedChoice(plan.parse, f"{call.call_id}/{i}") for i in range(call.num_sequences)
        ]

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        first = Delta(role="assistant", content=self._plan.prefix)
        return self._chunk([DeltaChoice(index, first)], usage=usage)

    def deltas(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> Iterator[bytes]:
        """Yields an event for each delta. The first has the chunk's logprobs and ids, and the last
        one the end of the choice.
        """
        parsed = self._parsed[index]
        events = parsed.add(chunk)
        texts = [event.text for event in events if isinstance(event, Content)]
        if len(texts) == len(events) and self._plain.have(chunk):
            yield from [self._plain.of(index, text) for text in texts]
            return
        deltas = [*deltas_of(events, has_functions=self._plan.has_functions)]
        if not deltas and not is_visible(msgspec.structs.replace(chunk, text=""), self.call):
            return
        choices = [DeltaChoice(index, delta) for delta in deltas or [Delta()]]
        choices[0].logprobs = self._logprobs(logprob_entries(chunk.logprobs, self.call.sampling))
        choices[0].token_ids = self._shown(chunk.token_ids)
        seed: int | UnsetType = UNSET
        if chunk.finish_reason is not None:
            choices[-1].finish_reason = self._reason(parsed, chunk.finish_reason)
            choices[-1].stop_reason = chunk.stop_reason
            seed = self.call.sampling.seed
        prompt_ids = ids_of(chunk.prompt_ids)
        for number, choice in enumerate(choices, start=1):
            is_last = number == len(choices)
            shown_seed = seed if is_last else UNSET
            yield self._chunk([choice], usage=usage, seed=shown_seed, prompt_ids=prompt_ids)
            prompt_ids = []

    def _content_sample(self, index: int) -> bytes:
        return self._chunk([DeltaChoice(index, Delta(content=TEXT))], usage=None)

    def usage(self, usage: UsageBody) -> bytes:
        return self._chunk([], usage=usage, seed=self.call.sampling.seed)

    def new_choice(self, index: int) -> ChatChoice:
        return ChatChoice(self.call.sampling, self._parsed[index])

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
        plan = self._plan
        return MessageChoice(
            index,
            message_of(choice.message, prefix=plan.prefix, has_functions=plan.has_functions),
            self._logprobs(choice.logprobs),
            self._reason(self._parsed[index], choice.finish_reason),
            choice.stop_reason,
            choice.token_ids if self.call.sampling.return_token_ids else UNSET,
        )

    def _reason(self, parsed: ParsedChoice, reason: FinishReason | None) -> str | None:
        found = parsed.finish_reason(reason)
        return "function_call" if found == "tool_calls" and self._plan.has_functions else found

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
        thinks = self._plan.parse.reasoning is not None
        if thinks and isinstance(usage, UsageBody):
            num_tokens = sum(parsed.num_reasoning_tokens for parsed in self._parsed)
            details = usage.completion_tokens_details or CompletionDetails()
            usage.completion_tokens_details = details
            details.reasoning_tokens = num_tokens
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
