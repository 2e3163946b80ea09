"""Encodes a request's prompt to ids and checks it, so that the result can be scheduled.

It is pure, apart from the tokenizer's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from aserve.cache.prefix_tree import prompt_keys
from aserve.errors import ContextTooLong, InvalidRequest
from aserve.messages.base import Record, pack_i32
from aserve.messages.requests import (
    AdmitRequest,
    ChatPrompt,
    GenerateRequest,
    OpenText,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from aserve.text.bad_words import bad_word_ids
from aserve.text.plain_content import PlainContent
from aserve.text.prompt_text import prompt_texts
from aserve.text.template import ChatTemplate
from aserve.text.text_size import check_bytes
from aserve.text.tokenizer import TextTokenizer

T = TypeVar("T")

# How much longer than the context a text may be of which the end is kept. WHY: tokens depend on
# what stands before them, so all of it is encoded, which takes time and memory.
CUT_FACTOR = 4
MIN_CUT_BYTES = 1 << 20
# How much longer than the context the JSON of a chat may be. WHY: its texts are escaped, and a
# template may drop some of them, such as the reasoning of earlier turns.
CHAT_FACTOR = 8


class PromptLimits(Record, frozen=True):
    max_model_len: int
    vocab_size: int  # of the model, which may be padded beyond the tokenizer's
    max_new_tokens: int | None = None  # of an answer whose length was not said; None: no limit
    page_size: int = 0  # tokens in a page whose cache key is wanted; 0 where nothing is cached


class Prepared(Record, frozen=True):
    open: OpenText
    admit: AdmitRequest


class PromptEncoder:
    __slots__ = ("_plain", "_template", "limits", "tokenizer")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        template: ChatTemplate | None,
        limits: PromptLimits,
        allow_special: bool = False,
    ) -> None:
        """`allow_special`: special tokens in the messages of a chat are control tokens."""
        self.tokenizer = tokenizer
        self._plain = None if allow_special else PlainContent(tokenizer)
        self._template = template
        self.limits = limits

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Raises the ClientError that the request ends with."""
        _check_ids(request.sampling, self.limits)
        self.check_size(request)
        prompt_ids = self.encode(request.prompt, is_cut=request.truncate_prompt_tokens is not None)
        if not prompt_ids:
            raise InvalidRequest(
                "the prompt is empty: give at least one token", param="prompt", code="empty_prompt"
            )
        prompt_ids = truncated(prompt_ids, request, self.limits)
        sampling = resolve_lengths(request, len(prompt_ids), self.limits)
        if isinstance(request.prompt, TokenPrompt):
            self.check_ids(prompt_ids, param="prompt")
        ends = end_ids(self.tokenizer, sampling)
        bad_words = bad_word_ids(sampling.bad_words, self.tokenizer)
        _check_choice(sampling, ends, bad_words, self.limits)
        packed = pack_i32(prompt_ids)
        is_scored = sampling.prompt_logprobs is not None
        is_told = is_scored or sampling.echo
        return Prepared(
            OpenText(
                request_id=request.request_id,
                prompt_len=len(prompt_ids),
                sampling=sampling,
                prompt_ids=packed if is_scored or sampling.return_token_ids else b"",
                prompt_texts=prompt_texts(prompt_ids, sampling, self.tokenizer) if is_told else (),
                outputs=request.outputs,
            ),
            AdmitRequest(
                request_id=request.request_id,
                prompt_ids=packed,
                sampling=sampling,
                end_ids=ends,
                bad_word_ids=bad_words,
                namespace=request.namespace,
                priority=request.priority,
                outputs=request.outputs,
                embeds=request.embeds,
                page_keys=self._page_keys(packed, namespace=request.namespace),
                client=request.client,
            ),
        )

    def check_size(self, request: GenerateRequest) -> None:
        """Raises the ClientError of a prompt that is too long however it would be tokenized, in no
        time. How many bytes a chat has once a template has rendered it is for `encode` to see.
        """
        prompt = request.prompt
        is_cut = request.truncate_prompt_tokens is not None
        if isinstance(prompt, TextPrompt) and len(prompt.text) > self._max_bytes(is_cut=is_cut):
            self._check_bytes(prompt.text, where="prompt", is_cut=is_cut)
        if isinstance(prompt, ChatPrompt):
            self._check_chat(prompt)
        if isinstance(prompt, TokenPrompt) and not is_cut:
            num_ids = len(prompt.token_ids)
            if num_ids > self.limits.max_model_len:
                resolve_lengths(request, num_ids, self.limits)

    def encode(self, prompt: Prompt, *, is_cut: bool = True) -> list[int]:
        """A text that is cut afterwards, or counted only, may be longer than the context."""
        match prompt:
            case TextPrompt():
                self._check_bytes(prompt.text, where="prompt", is_cut=is_cut)
                return self._encode_text(prompt.text, with_special=prompt.add_special_tokens)
            case TokenPrompt():
                return list(prompt.token_ids)
            case ChatPrompt():
                text, mark = self._render(prompt)
                self._check_bytes(text, where="messages", is_cut=is_cut)
                return self._encode_text(text, with_special=prompt.add_special_tokens, mark=mark)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        _check_range(ids, self.limits.vocab_size, param=param)

    def _max_bytes(self, *, is_cut: bool) -> int:
        fits = self.limits.max_model_len * self.tokenizer.bytes_per_token
        return max(CUT_FACTOR * fits, MIN_CUT_BYTES) if is_cut else fits

    def _check_bytes(self, text: str, *, where: str, is_cut: bool) -> None:
        limit = self._max_bytes(is_cut=is_cut)
        check_bytes(text, limit, where=where, max_model_len=self.limits.max_model_len)

    def _check_chat(self, prompt: ChatPrompt) -> None:
        parts = (prompt.messages, prompt.tools, prompt.variables)
        num_bytes = sum(len(part or b"") for part in parts)
        fits = self.limits.max_model_len * self.tokenizer.bytes_per_token
        limit = max(CHAT_FACTOR * fits, MIN_CUT_BYTES)
        if num_bytes > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, your messages and tools are {num_bytes} bytes of JSON, and at most "
                f"{limit} are rendered here. Please reduce the length of the messages.",
                param="messages",
            )

    def _page_keys(self, prompt_ids: bytes, *, namespace: str) -> bytes:
        page_size = self.limits.page_size
        if not page_size:
            return b""
        return prompt_keys(prompt_ids, page_size=page_size, namespace=namespace)

    def _encode_text(self, text: str, *, with_special: bool, mark: str | None = None) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt is not valid Unicode at character {error.start}: lone surrogate",
                param="prompt",
                code="invalid_unicode",
            ) from error
        if self._plain is not None and mark is not None:
            return self._plain.encode(text, mark, with_special=with_special)
        return self.tokenizer.encode(text, with_special=with_special)

    def _render(self, prompt: ChatPrompt) -> tuple[str, str | None]:
        """The prompt, and the mark that breaks special tokens in it which are text."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a prompt instead",
                param="messages",
                code="no_chat_template",
            )
        messages = _decode(prompt.messages, list[dict[str, Any]], param="messages")
        tools, variables = None, None
        if prompt.tools is not None:
            tools = _decode(prompt.tools, list[dict[str, Any]], param="tools")
        if prompt.variables is not None:
            variables = _decode(prompt.variables, dict[str, Any], param="chat_template_kwargs")
        mark = None
        if self._plain is not None:
            (messages, tools, variables), mark = self._plain.broken([messages, tools, variables])
        text = self._template.render(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=prompt.add_generation_prompt,
        )
        return text, mark


def _decode(data: bytes, kind: type[T], *, param: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"'{param}' cannot be read, or is nested too deeply: {str(error)[:100]}",
            param=param,
            code="invalid_value",
        ) from error


def end_ids(tokenizer: TextTokenizer, sampling: SamplingParams) -> tuple[int, ...]:
    """The ids that end an output; both text actors ask here, so that they agree.

    With a grammar eos counts always: where nothing else can follow it must end the output.
    """
    ignores_eos = sampling.ignore_eos and sampling.grammar is None
    eos_ids = () if ignores_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids)))


def truncated(ids: list[int], request: GenerateRequest, limits: PromptLimits) -> list[int]:
    """What the client keeps of its prompt, from the end; an answer without max_tokens needs room
    for one token.
    """
    kept = request.truncate_prompt_tokens
    if kept is None:
        return ids
    if kept < 0:
        max_tokens = request.sampling.max_tokens
        kept = limits.max_model_len - (1 if max_tokens is None else max_tokens)
    return ids[-kept:] if kept > 0 else ids


def resolve_lengths(
    request: GenerateRequest, prompt_len: int, limits: PromptLimits
) -> SamplingParams:
    """max_tokens as a number: what was asked for, or the model's default within the context."""
    sampling = request.sampling
    where = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    room = limits.max_model_len - prompt_len
    asked = sampling.max_tokens
    max_tokens = _usual_len(sampling, room, limits) if asked is None else asked
    if max_tokens > room or (asked is None and room < 1):
        raise ContextTooLong(
            _too_long(prompt_len, asked, where=where, limit=limits.max_model_len),
            param=where,
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, {max_tokens}",
            param="min_tokens",
            code="integer_above_max_value",
        )
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


def _usual_len(sampling: SamplingParams, room: int, limits: PromptLimits) -> int:
    if limits.max_new_tokens is None:
        return room
    return min(room, max(limits.max_new_tokens, sampling.min_tokens))


def _too_long(prompt_len: int, max_tokens: int | None, *, where: str, limit: int) -> str:
    """Clients look for the phrase "maximum context length"."""
    start = f"This model's maximum context length is {limit} tokens. However, "
    if max_tokens is None:
        return (
            f"{start}your {where} has {prompt_len} tokens, which leaves no room for an answer. "
            f"Please reduce the length of the {where}."
        )
    return (
        f"{start}you requested {prompt_len + max_tokens} tokens ({prompt_len} in the {where}, "
        f"{max_tokens} in the completion). Please reduce the length of the {where} or completion."
    )


def _check_ids(sampling: SamplingParams, limits: PromptLimits) -> None:
    biased = [token_id for token_id, _ in sampling.logit_bias]
    _check_range(biased, limits.vocab_size, param="logit_bias")
    _check_range(sampling.stop_token_ids, limits.vocab_size, param="stop_token_ids")
    _check_range(sampling.allowed_token_ids, limits.vocab_size, param="allowed_token_ids")


def _check_choice(
    sampling: SamplingParams,
    ends: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    limits: PromptLimits,
) -> None:
    """Something can be sampled at every moment, whatever came before it."""
    banned = {word[-1] for word in bad_words}
    if sampling.min_tokens:
        banned.update(ends)
    allowed = sampling.allowed_token_ids
    num_left = len({*allowed, *ends} - banned) if allowed else limits.vocab_size - len(banned)
    if num_left < 1:
        raise InvalidRequest(
            "nothing could be sampled: the bad words, and what would end the answer before "
            "min_tokens, leave none of the allowed tokens",
            param="bad_words" if bad_words else "allowed_token_ids",
            code="nothing_allowed",
        )


def _check_range(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"token id {wrong} is out of range: this model's ids are 0 to {vocab_size - 1}",
            param=param,
            code="token_id_out_of_range",
        )
