"""Checks a request and encodes its prompt to token ids, so that it can be scheduled.

It has no state except the tokenizer's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from aserve.cache.page_keys import prompt_keys
from aserve.errors import ContextTooLong, InvalidRequest
from aserve.messages.base import Record, array_i32, pack_i32
from aserve.messages.requests import (
    AdmitRequest,
    ChatPrompt,
    GenerateRequest,
    OpenText,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from aserve.picture import Picture
from aserve.pictures.reader import PictureReader
from aserve.text.chat_prompt import render_chat
from aserve.text.defaults import bad_word_ids, prediction_ids, reasoning_ids
from aserve.text.lengths import PromptLimits, check_task, resolve_lengths, truncate
from aserve.text.plain_content import PlainContent
from aserve.text.prompt_text import prompt_texts
from aserve.text.sampling_ids import check_can_sample, check_range, check_sampling_ids, end_ids
from aserve.text.template import ChatTemplate
from aserve.text.text_size import check_bytes
from aserve.text.tokenizer import TextTokenizer

# A prompt that will be truncated may be this many times longer than the context. WHY a bound: all
# of it is encoded before it is truncated, because tokens depend on the text before them.
TRUNCATED_FACTOR = 4
MIN_TRUNCATED_BYTES = 1 << 20
# The JSON of a chat may be this many times longer than the context. WHY so long: its texts are
# escaped, and a template may drop some of them, such as the reasoning of earlier turns.
CHAT_FACTOR = 8
TAIL_TOKENS = 32  # of a prompt that output parsers see


class Prepared(Record, frozen=True):
    """A checked request, as a message to the detokenizer and one to the scheduler."""

    open: OpenText
    admit: AdmitRequest


class PromptEncoder:
    __slots__ = ("_pictures", "_plain", "_template", "limits", "tokenizer")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        template: ChatTemplate | None,
        limits: PromptLimits,
        allow_special: bool = False,
        pictures: PictureReader | None = None,
    ) -> None:
        """With `allow_special`, special tokens in the messages of a chat are encoded as such."""
        self.tokenizer = tokenizer
        self._plain = None if allow_special else PlainContent(tokenizer)
        self._template = template
        self.limits = limits
        self._pictures = pictures or PictureReader()

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures."""
        return self._pictures.takes_pictures

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Checks and encodes a request. Raises the ClientError with which it ends."""
        check_sampling_ids(request.sampling, self.limits)
        self.check_size(request)
        is_truncated = self._is_truncated(request)
        prompt_ids, pictures = self._with_pictures(request.prompt, is_truncated=is_truncated)
        if not prompt_ids:
            raise InvalidRequest(
                "the prompt is empty: give at least one token", param="prompt", code="empty_prompt"
            )
        if not pictures:  # of which none can be cut
            prompt_ids = truncate(prompt_ids, request, self.limits)
        sampling = resolve_lengths(request, len(prompt_ids), self.limits)
        # The ids of a text, too: some tokenizers have more tokens than the model.
        where = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        self.check_ids(prompt_ids, param=where)
        ends = end_ids(self.tokenizer, sampling)
        words = bad_word_ids(sampling.bad_words, self.tokenizer)
        bad_words = tuple(word for word in words if max(word) < self.limits.vocab_size)
        predicted = prediction_ids(request.prediction, self.tokenizer)
        self.check_ids(array_i32(predicted).tolist(), param="prediction")
        check_can_sample(sampling, ends, bad_words, self.limits)
        packed = pack_i32(prompt_ids)
        tail = self._tail_of(request, prompt_ids)
        reasoning = reasoning_ids(sampling.reasoning, tail, self.tokenizer)
        is_scored = sampling.prompt_logprobs is not None
        needs_texts = is_scored or sampling.echo
        return Prepared(
            OpenText(
                request_id=request.request_id,
                prompt_len=len(prompt_ids),
                sampling=sampling,
                prompt_ids=packed if is_scored or sampling.return_token_ids else b"",
                prompt_texts=prompt_texts(prompt_ids, sampling, self.tokenizer)
                if needs_texts
                else (),
                outputs=request.outputs,
                sends_outputs=request.sends_outputs,
                prompt_tail=tail,
                reasoning=reasoning,
            ),
            AdmitRequest(
                request_id=request.request_id,
                prompt_ids=packed,
                sampling=sampling,
                end_ids=ends,
                bad_word_ids=bad_words,
                namespace=request.namespace,
                lora_slot=request.lora_slot,
                priority=request.priority,
                outputs=request.outputs,
                embeds=request.embeds,
                is_causal=not self.limits.whole_prompts,
                # The scheduler makes the keys of prompts with pictures, because these join them.
                page_keys=b"" if pictures else self._page_keys(packed, namespace=request.namespace),
                pictures=pictures,
                client=request.client,
                reasoning=reasoning,
                prediction_ids=predicted,
            ),
        )

    def check_size(self, request: GenerateRequest) -> None:
        """Raises a ClientError if a prompt is too long in any tokenization. It does not tokenize,
        so it is fast. The rendered text of a chat is checked by `encode`.
        """
        check_task(request, self.limits)
        prompt = request.prompt
        is_truncated = self._is_truncated(request)
        if isinstance(prompt, TextPrompt) and len(prompt.text) > self._max_bytes(
            is_truncated=is_truncated
        ):
            self._check_bytes(prompt.text, where="prompt", is_truncated=is_truncated)
        if isinstance(prompt, ChatPrompt):
            self._check_chat(prompt)
        if isinstance(prompt, TokenPrompt) and not is_truncated:
            num_ids = len(prompt.token_ids)
            if num_ids > self.limits.max_model_len:
                resolve_lengths(request, num_ids, self.limits)

    def encode(self, prompt: Prompt, *, is_truncated: bool = True) -> list[int]:
        """Returns the ids of a prompt. `is_truncated` allows more of them than fit in the context,
        because the caller truncates or only counts them.
        """
        return self._with_pictures(prompt, is_truncated=is_truncated)[0]

    def _with_pictures(
        self, prompt: Prompt, *, is_truncated: bool
    ) -> tuple[list[int], tuple[Picture, ...]]:
        ids = self._ids_of(prompt, is_truncated=is_truncated)
        return self._pictures.placed(prompt, ids, max_len=self.limits.max_model_len)

    def _ids_of(self, prompt: Prompt, *, is_truncated: bool) -> list[int]:
        match prompt:
            case TextPrompt():
                self._check_bytes(prompt.text, where="prompt", is_truncated=is_truncated)
                return self._encode_text(prompt.text, with_special=prompt.add_special_tokens)
            case TokenPrompt():
                return list(prompt.token_ids)
            case ChatPrompt():
                text, mark = render_chat(prompt, self._template, self._plain)
                text = self._pictures.written(prompt, text)
                self._check_bytes(text, where="messages", is_truncated=is_truncated)
                return self._encode_text(text, with_special=prompt.add_special_tokens, mark=mark)

    def render(self, prompt: ChatPrompt) -> str:
        """Returns the text of a chat's prompt."""
        text, mark = render_chat(prompt, self._template, self._plain)
        return text if mark is None else text.replace(mark, "")

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        check_range(ids, self.limits.vocab_size, param=param)

    def _is_truncated(self, request: GenerateRequest) -> bool:
        return self.limits.auto_truncate or request.truncate_prompt_tokens is not None

    def _max_bytes(self, *, is_truncated: bool) -> int:
        fits = self.limits.max_model_len * self.tokenizer.bytes_per_token
        return max(TRUNCATED_FACTOR * fits, MIN_TRUNCATED_BYTES) if is_truncated else fits

    def _check_bytes(self, text: str, *, where: str, is_truncated: bool) -> None:
        limit = self._max_bytes(is_truncated=is_truncated)
        check_bytes(text, limit, where=where, max_model_len=self.limits.max_model_len)

    def _check_chat(self, prompt: ChatPrompt) -> None:
        self._pictures.check(prompt)
        parts = (prompt.messages, prompt.tools, prompt.variables)
        num_bytes = sum(len(part or b"") for part in parts)
        fits = self.limits.max_model_len * self.tokenizer.bytes_per_token
        limit = max(CHAT_FACTOR * fits, MIN_TRUNCATED_BYTES)
        if num_bytes > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, your messages and tools have {num_bytes} bytes of JSON, and at most "
                f"{limit} are allowed. Please reduce the length of the messages.",
                param="messages",
            )

    def _tail_of(self, request: GenerateRequest, prompt_ids: list[int]) -> str:
        """Returns the end of a chat's prompt, which tells whether the template has opened the
        model's reasoning. The ids of such a prompt are a chat, too.
        """
        is_chat = isinstance(request.prompt, ChatPrompt) or request.sampling.reasoning is not None
        tail_ids = prompt_ids[-TAIL_TOKENS:] if is_chat else []
        return self.tokenizer.decode(tail_ids, skip_special=False)

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
