"""The detokenizer's state of an open request: the text of each child, and how it ends.

Only the detokenizer actor writes it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, assert_never

import msgspec

from aserve.errors import DeadlineExceeded, ErrorInfo, ShuttingDown, StepError
from aserve.messages.base import FinishReason, array_i32, num_values
from aserve.messages.output import OutputChunk, Retired, SequenceOutput, Usage
from aserve.messages.requests import OpenText
from aserve.scheduling.reasoning import Reasoning
from aserve.text.logprobs import scored_tokens, token_logprob
from aserve.text.output import Released, SequenceText
from aserve.text.prompt_text import PromptText
from aserve.text.sampling_ids import end_ids
from aserve.text.tokenizer import TextTokenizer

NOTHING = Released("", b"", ())


class Ending(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None


class Child:
    """One sequence of a request. The first cause that ends it sets `ending`."""

    __slots__ = (
        "accepted",
        "cached_len",
        "embedding",
        "ending",
        "has_started",
        "index",
        "is_finished",
        "is_retired",
        "num_counted",
        "num_drafts",
        "num_prompt_parts",
        "num_windows",
        "places",
        "reasoning",
        "sends_prompt",
        "text",
    )

    def __init__(self, index: int, text: SequenceText, reasoning: Reasoning | None) -> None:
        self.index = index
        self.text = text
        self.reasoning = reasoning  # of the released tokens
        self.cached_len = 0
        self.num_windows = 0  # decodes that verified drafts
        self.num_drafts = 0  # that were verified
        self.accepted: list[int] = []  # tokens that were the first draft of a window, the second...
        self.num_counted = 0  # tokens that are in these counts
        # Of each token after them: its place among the drafts of its window, from 1 on, or 0 if it
        # was drawn. Tokens behind the last window are not in it.
        self.places = bytearray()
        self.embedding = b""
        self.ending: Ending | None = None
        self.num_prompt_parts = 0  # parts of the prompt that it has sent
        self.has_started = False  # its first chunk was sent
        self.is_finished = False  # its last chunk was sent
        self.is_retired = False  # the scheduler has sent its Retired
        self.sends_prompt = True  # False where an earlier engine has sent the prompt

    def resume(self, token_ids: list[int], *, is_sent: bool) -> None:
        """Continues after known outputs, whose logprobs are not known here. With `is_sent` the
        client got all text that they made certain, and the prompt before it.
        """
        if is_sent:
            self.has_started = bool(token_ids)
            self.sends_prompt = not token_ids
        for token_id in token_ids:
            if is_sent:
                self.release()
            self.text.feed(token_id)
            if self.text.stop is not None:
                self.ending = Ending("stop", self.text.stop)
                return
        if is_sent:
            self.release()

    def note_window(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a window whose tokens are fed next: its accepted drafts, and the one drawn."""
        self.num_windows += 1
        self.num_drafts += num_drafts
        self.places.extend(bytes(self.text.num_tokens - self.num_counted - len(self.places)))
        self.places.extend(range(1, num_accepted + 1))

    def usage(self, prompt_len: int) -> Usage:
        """Returns the usage so far, with the windows of drafts if there were any."""
        usage = Usage(
            prompt_len,
            self.text.num_kept,
            self.cached_len,
            self.reasoning.num_tokens if self.reasoning else 0,
        )
        return self._with_acceptance(usage) if self.num_windows else usage

    def _with_acceptance(self, usage: Usage) -> Usage:
        """Adds how many released tokens were the first draft of a window, the second, ..."""
        num = self.text.num_kept - self.num_counted
        for place in filter(None, self.places[:num]):
            self.accepted.extend([0] * (place - len(self.accepted)))
            self.accepted[place - 1] += 1
        del self.places[:num]
        self.num_counted += num
        return msgspec.structs.replace(
            usage,
            draft_windows=self.num_windows,
            draft_tokens=self.num_drafts,
            accepted_drafts=tuple(self.accepted),
        )

    def release(self) -> Released:
        """Returns the output that became certain since the last call."""
        released = self.text.take()
        if self.reasoning is not None:
            self.reasoning.read_rest(array("i", released.token_ids))
        return released


class TextRequest:
    """A request with at least one child that has not retired."""

    __slots__ = ("children", "is_over", "num_retired", "opened", "prompt")

    def __init__(self, opened: OpenText) -> None:
        self.opened = opened
        self.children: list[Child] = []
        self.prompt: PromptText | None = None  # set if the prompt is echoed or scored
        self.is_over = False  # its last chunk was sent
        self.num_retired = 0  # children

    def begin(self, tokenizer: TextTokenizer) -> None:
        """Makes the children, each after its known outputs."""
        opened = self.opened
        for index in range(opened.sampling.n):
            reasoning = Reasoning(opened.reasoning) if opened.reasoning else None
            self.children.append(Child(index, _text_of(opened, tokenizer), reasoning))
        if opened.prompt_texts:
            self.prompt = PromptText(opened, tokenizer)
        for child, outputs in zip(self.children, opened.outputs, strict=bool(opened.outputs)):
            child.resume(array_i32(outputs).tolist(), is_sent=not opened.sends_outputs)
        if self.prompt is not None and not self.children[0].sends_prompt:
            self.prompt.skip()

    @property
    def is_retired(self) -> bool:
        return self.num_retired == self.opened.sampling.n

    @property
    def awaits_prompt(self) -> bool:
        """Whether chunks of outputs must wait, because the whole prompt comes before them."""
        if self.prompt is None or self.prompt.is_whole:
            return False
        return self.children[0].ending is None

    def feed(
        self, output: SequenceOutput, touched: dict[int, None], tokenizer: TextTokenizer
    ) -> None:
        """Adds tokens to the text. Tokens after a stop string are dropped: they were in flight."""
        self.touch(output.child, touched)
        child = self.children[output.child]
        if child.ending is not None:
            return
        text = child.text
        assert output.position == text.num_tokens, "outputs come once and in order"
        child.cached_len = output.cached_len
        child.embedding = output.embedding or b""
        if output.prompt_logprobs is not None:
            assert self.prompt is not None
            self.prompt.feed(output.prompt_logprobs)
        if output.num_drafts:
            child.note_window(output.num_drafts, num_values(output.token_ids) - 1)
        if self.opened.sampling.logprobs is None:
            text.feed_all(output.token_ids)
        else:
            self._feed_scored(output, text, tokenizer)
        if text.stop is not None:
            child.ending = Ending("stop", text.stop)

    def _feed_scored(
        self, output: SequenceOutput, text: SequenceText, tokenizer: TextTokenizer
    ) -> None:
        """Adds tokens with their logprobs, up to a stop string."""
        num_top = self.opened.sampling.logprobs
        assert num_top is not None
        before = 0 if self.prompt is None else self.prompt.text_len
        scored = scored_tokens(output, num_top, tokenizer)
        for token_id in array("i", output.token_ids):
            offset = before + text.text_len
            text.feed(token_id, token_logprob(next(scored, None), offset, tokenizer))
            if text.stop is not None:
                return

    def next_chunk(self, index: int) -> OutputChunk | None:
        """Takes what became certain of a child, and its end. Returns None if that is nothing."""
        child = self.children[index]
        prompt = None
        if self.prompt is not None and child.sends_prompt:
            prompt = self.prompt.since(child.num_prompt_parts)
            child.num_prompt_parts = len(self.prompt.parts)
        if self.prompt is not None and self.awaits_prompt:
            released, ending = NOTHING, None
        else:
            released, ending = child.release(), child.ending
        if ending is None and not released.text and not released.token_ids and prompt is None:
            return None
        chunk = OutputChunk(
            self.opened.request_id,
            index,
            released.text,
            released.token_ids,
            child.usage(self.opened.prompt_len),
            released.logprobs,
        )
        # PERF: most chunks have nothing else, and each further field takes time.
        if prompt is not None or child.embedding:
            chunk = msgspec.structs.replace(chunk, prompt=prompt, embedding=child.embedding)
        if not child.has_started:
            child.has_started = True
            chunk = _first_chunk(chunk, self.opened)
        return chunk if ending is None else self._last_chunk(chunk, ending)

    def _last_chunk(self, chunk: OutputChunk, ending: Ending) -> OutputChunk:
        self.children[chunk.child].is_finished = True
        return msgspec.structs.replace(
            chunk,
            finish_reason=ending.reason,
            stop_reason=ending.stop_reason,
            error=ending.error,
            is_last=all(each.is_finished for each in self.children),
        )

    def touch(self, index: int, touched: dict[int, None]) -> None:
        """Adds the children that may send a chunk after an event of this one: all of them if the
        prompt is echoed or scored, because its scores come with child 0.
        """
        if self.prompt is None:
            touched[index] = None
        else:
            touched.update((each.index, None) for each in self.children)


def _first_chunk(chunk: OutputChunk, opened: OpenText) -> OutputChunk:
    """Adds what the client wants to know of the prompt."""
    return msgspec.structs.replace(
        chunk,
        prompt_ids=opened.prompt_ids if opened.sampling.return_token_ids else b"",
        prompt_tail=opened.prompt_tail,
    )


def _text_of(opened: OpenText, tokenizer: TextTokenizer) -> SequenceText:
    sampling = opened.sampling
    shows_stop = sampling.include_stop_str_in_output
    return SequenceText(
        tokenizer.stream(
            skip_special=sampling.skip_special_tokens, kept=sampling.kept_special_tokens
        ),
        stops=sampling.stop,
        end_ids=() if shows_stop else end_ids(tokenizer, sampling),
        min_tokens=sampling.min_tokens,
        shows_stop=shows_stop,
    )


def resumed_children(opened: OpenText) -> dict[int, None]:
    """Returns the children that begin with outputs, in which a stop string may end them at once.
    Outputs that are to be sent go out with the next one: until then the request may be refused.
    """
    outputs = () if opened.sends_outputs else opened.outputs
    return {index: None for index, known in enumerate(outputs) if known}


def ending_of(event: Retired, request: TextRequest) -> Ending:
    """Returns how a retired child ends. A timeout is an error only if no child has any output. Else
    it cuts the output, as max_tokens does.
    """
    match event.reason:
        case "stop":
            is_asked = event.stop_id in request.opened.sampling.stop_token_ids
            return Ending("stop", event.stop_id if is_asked else None)
        case "length" | "cancelled":
            return Ending(event.reason)
        case "deadline" if any(child.text.num_tokens for child in request.children):
            return Ending("length", "timeout")
        case "deadline":
            late = DeadlineExceeded("the request's timeout ran out", param="timeout")
            return Ending("deadline", error=late.info())
        case "shutdown":
            return Ending("shutdown", error=ShuttingDown("the server is shutting down").info())
        case "error":
            return Ending("error", error=event.error or StepError("the request failed").info())
        case _:
            assert_never(event.reason)
