"""The detokenizer actor: tokens to the chunks that clients read; text ends in this one place.

Must not know scheduling, the device or HTTP. The text of every live sequence is written here alone:
it finds stop strings, cuts text, usage and logprobs at the same token, and sends each final chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, assert_never

import numpy as np

from aserve.actors.base import Actor
from aserve.channel import Channel, Codec
from aserve.errors import (
    DeadlineExceeded,
    ErrorInfo,
    ShuttingDown,
    StepError,
)
from aserve.messages import (
    Cancel,
    DetokenizerEvent,
    FinishReason,
    OpenText,
    OutputChunk,
    Refused,
    Retired,
    SamplingParams,
    SchedulerEvent,
    SequenceOutput,
    StepOutput,
    TokenLogprob,
    TopLogprob,
    Usage,
    array_f32,
    array_i32,
    pack_i32,
)
from aserve.text.output import SequenceText
from aserve.text.prompt import end_ids
from aserve.text.tokenizer import TextTokenizer

IMPOSSIBLE = -9999.0  # the log-probability of a banned token, which JSON cannot say; as OpenAI does


class Ending(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None


class Child:
    """One sequence of a request; `ending` is set by whatever ends it first."""

    __slots__ = ("cached_len", "ending", "index", "is_answered", "is_begun", "is_retired", "text")

    def __init__(self, index: int, text: SequenceText) -> None:
        self.index = index
        self.text = text
        self.cached_len = 0
        self.ending: Ending | None = None
        self.is_begun = False  # its first chunk is out
        self.is_answered = False  # and its final one
        self.is_retired = False  # the scheduler has let go of it


class TextRequest:
    __slots__ = ("children", "opened")

    def __init__(self, opened: OpenText, children: list[Child]) -> None:
        self.opened = opened
        self.children = children


class DetokenizerActor(Actor[DetokenizerEvent]):
    """All events of one inbox batch make one chunk per child at most."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        deliver: Callable[[OutputChunk], None],
        scheduler: Channel[SchedulerEvent],
        codec: Codec | None = None,
    ) -> None:
        super().__init__("detokenizer", codec=codec)
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._scheduler = scheduler
        self._requests: dict[str, TextRequest] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def handle(self, events: list[DetokenizerEvent]) -> None:
        touched: dict[tuple[str, int], None] = {}  # in order of arrival
        retired: list[str] = []
        for event in events:
            match event:
                case OpenText():
                    self._open(event)
                case StepOutput():
                    for output in event.sequences:
                        self._feed(output)
                        touched[output.request_id, output.child] = None
                case Retired():
                    self._retire(event)
                    touched[event.request_id, event.child] = None
                    retired.append(event.request_id)
                case Refused():
                    self._refuse(event)
                case _:
                    assert_never(event)
        for request_id, index in touched:
            self._send(self._requests[request_id], index)
        for request_id in retired:
            self._forget_retired(request_id)

    def _open(self, event: OpenText) -> None:
        children = [Child(index, self._text_of(event)) for index in range(event.sampling.n)]
        self._requests[event.request_id] = TextRequest(event, children)

    def _text_of(self, opened: OpenText) -> SequenceText:
        sampling = opened.sampling
        shows_stop = sampling.include_stop_str_in_output
        return SequenceText(
            self._tokenizer.stream(skip_special=sampling.skip_special_tokens),
            stops=sampling.stop,
            end_ids=() if shows_stop else end_ids(self._tokenizer, sampling),
            min_tokens=sampling.min_tokens,
            shows_stop=shows_stop,
        )

    def _feed(self, output: SequenceOutput) -> None:
        """Tokens after a stop string fall away: they were in flight when it was found."""
        request = self._requests[output.request_id]
        child = request.children[output.child]
        if child.ending is not None:
            return
        assert output.position == child.text.num_tokens, "outputs come once and in order"
        child.cached_len = output.cached_len
        choices = choices_of(output, request.opened.sampling.logprobs)
        for token_id in array_i32(output.token_ids).tolist():
            child.text.feed(token_id, self._logprob(next(choices, None), child.text.text_len))
            if child.text.stop is not None:
                child.ending = Ending("stop", child.text.stop)
                return

    def _retire(self, event: Retired) -> None:
        request = self._requests[event.request_id]
        child = request.children[event.child]
        child.is_retired = True
        if child.ending is not None:
            return
        child.text.finish()
        if child.text.stop is not None:
            child.ending = Ending("stop", child.text.stop)
        else:
            child.ending = ending_of(event, request.opened.sampling)

    def _refuse(self, event: Refused) -> None:
        self._requests.pop(event.request_id, None)
        self._deliver(
            OutputChunk(
                request_id=event.request_id,
                child=0,
                text="",
                token_ids=b"",
                usage=Usage(),
                finish_reason="error",
                error=event.error,
                is_last=True,
            )
        )

    def _send(self, request: TextRequest, index: int) -> None:
        child = request.children[index]
        if child.is_answered:
            return
        released = child.text.take()
        ending = child.ending
        if ending is None and not released.text and not released.token_ids:
            return
        child.is_answered = ending is not None
        if child.text.stop is not None and not child.is_retired:
            request_id = request.opened.request_id
            self._scheduler.send(Cancel(request_id, index, child.text.num_kept, "stop"))
        prompt_ids = b"" if child.is_begun else request.opened.prompt_ids
        child.is_begun = True
        self._deliver(
            OutputChunk(
                request_id=request.opened.request_id,
                child=index,
                text=released.text,
                token_ids=pack_i32(released.token_ids),
                usage=Usage(request.opened.prompt_len, child.text.num_kept, child.cached_len),
                logprobs=released.logprobs,
                finish_reason=ending and ending.reason,
                stop_reason=ending and ending.stop_reason,
                error=ending and ending.error,
                is_last=ending is not None and all(each.is_answered for each in request.children),
                prompt_ids=prompt_ids,
            )
        )

    def _forget_retired(self, request_id: str) -> None:
        """Several children may have retired in this batch, and the first took the request along."""
        request = self._requests.get(request_id)
        if request is not None and all(child.is_retired for child in request.children):
            del self._requests[request_id]

    def _logprob(self, choice: Choice | None, text_offset: int) -> TokenLogprob | None:
        if choice is None:
            return None
        token_bytes = self._tokenizer.token_bytes(choice.token_id)
        return TokenLogprob(
            token_id=choice.token_id,
            token=shown(token_bytes),
            token_bytes=token_bytes,
            logprob=choice.logprob,
            top=tuple(self._alternative(i, value) for i, value in choice.top),
            text_offset=text_offset,
        )

    def _alternative(self, token_id: int, logprob: float) -> TopLogprob:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return TopLogprob(token_id, shown(token_bytes), token_bytes, logprob)


def ending_of(event: Retired, sampling: SamplingParams) -> Ending:
    match event.reason:
        case "stop":
            is_asked = event.stop_id in sampling.stop_token_ids
            return Ending("stop", event.stop_id if is_asked else None)
        case "length" | "cancelled":
            return Ending(event.reason)
        case "deadline":
            late = DeadlineExceeded("the request's timeout ran out", param="timeout")
            return Ending("deadline", error=late.info())
        case "shutdown":
            return Ending("shutdown", error=ShuttingDown("the server is shutting down").info())
        case "error":
            return Ending("error", error=event.error or StepError("the request failed").info())
        case _:
            assert_never(event.reason)


class Choice(NamedTuple):
    """A sampled token with its log-probability and the best alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def choices_of(output: SequenceOutput, num_top: int | None) -> Iterator[Choice]:
    """One for each of the output's tokens; none at all without logprobs."""
    if num_top is None:
        return
    token_ids = iter(array_i32(output.token_ids).tolist())
    for run in output.logprobs:
        chosen = array_f32(run.chosen).tolist()
        top_ids = array_i32(run.top_ids).reshape(len(chosen), -1)[:, :num_top].tolist()
        top_logprobs = array_f32(run.top_logprobs).reshape(len(chosen), -1)[:, :num_top]
        finite = np.maximum(top_logprobs, IMPOSSIBLE).tolist()
        for logprob, ids, logprobs in zip(chosen, top_ids, finite, strict=True):
            yield Choice(next(token_ids), logprob, list(zip(ids, logprobs, strict=True)))


def shown(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")
