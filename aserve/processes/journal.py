"""The frontend's log of the requests that are open in the engine: their prompts and their outputs.

The engine process only caches. When it dies, the log has all that another engine needs to continue
every request: the AdmitRequest and the tokens so far. Sampling noise is keyed by seed, position and
token, so the continuation has the tokens that the dead engine would have made.

One AdmitRequest continues all children of a request, so that each gets the seed that it had. A
child that has ended already is cancelled again right behind it, and what the new engine says about
it is dropped. Prompt logprobs that came are not passed on twice.

A request that kills every engine is found by trial. Each request counts the deaths in a row that
came before it had MIN_PROGRESS new tokens. With SUSPECT_DEATHS of them it is a suspect, and
suspects continue one after the other, each alone among suspects until it makes progress. If the
engine dies once more meanwhile, that request ends with an error.

Only `RemoteEngineCore` writes to it.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias, assert_never

import msgspec

from aserve.amendments import amended_admit
from aserve.errors import StepError
from aserve.messages.base import VALUE_BYTES, array_i32, num_values, split_i32
from aserve.messages.changes import Amended
from aserve.messages.output import NextTokens, Refused, Retired, SequenceOutput, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, RequestEvent
from aserve.scheduling.prompts import scores_from

MIN_PROGRESS = 8  # tokens
SUSPECT_DEATHS = 2

FromEngine: TypeAlias = StepOutput | Retired | Refused | Amended


class _Child:
    __slots__ = ("cached_len", "is_retired", "outputs")

    def __init__(self) -> None:
        self.outputs = bytearray()  # int32
        self.cached_len: int | None = None  # set once the first engine has reported it
        self.is_retired = False


class _Entry:
    __slots__ = (
        *("admit", "cancels", "children", "is_sent", "num_deaths", "num_new", "num_scored"),
        "was_sent",
    )

    def __init__(self, admit: AdmitRequest) -> None:
        self.admit = admit
        self.children = [_Child() for _ in range(admit.sampling.n)]
        for child, outputs in zip(self.children, admit.outputs, strict=False):
            child.outputs += outputs
        self.cancels: list[Cancel] = []  # sent, and not yet answered for every child
        self.is_sent = False  # to the engine of now
        self.was_sent = False  # to any engine
        self.num_scored = 0  # tokens of the prompt before which all logprobs have come
        self.num_new = 0  # tokens of all children from the engine of now
        self.num_deaths = 0  # in a row without progress

    def count_death(self) -> None:
        if self.is_sent:
            self.num_deaths = 0 if self.num_new >= MIN_PROGRESS else self.num_deaths + 1
        self.is_sent = False
        self.num_new = 0

    def messages(self) -> list[RequestEvent]:
        """Returns the messages that continue the request in the engine of now."""
        self.is_sent = self.was_sent = True
        max_tokens = self.admit.sampling.max_tokens or 0  # may be lowered after a child has ended
        most = VALUE_BYTES * max_tokens
        outputs = tuple(bytes(child.outputs[:most]) for child in self.children)
        admit = msgspec.structs.replace(self.admit, outputs=outputs, is_resumed=True)
        request_id = admit.request_id
        ended = [index for index, child in enumerate(self.children) if child.is_retired]
        return [admit, *(Cancel(request_id, index, 0, "cancelled") for index in ended)]


class Journal:
    def __init__(self) -> None:
        self._open: dict[str, _Entry] = {}  # by request id, in order of arrival
        self._suspects: deque[str] = deque()  # they wait for their trial
        self._on_trial = ""  # a request id
        self._resumed: set[str] = set()  # request ids that an engine before the one of now had

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_suspects(self) -> bool:
        """Whether a suspect waits for its trial."""
        return bool(self._suspects)

    def requests(self) -> list[AdmitRequest]:
        return [entry.admit for entry in self._open.values()]

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request is open, and no engine has it."""
        entry = self._open.get(request_id)
        return entry is not None and not entry.is_sent

    def was_sent(self, request_id: str) -> bool:
        """Whether an engine has or had the request, which may have begun it, or it has ended."""
        entry = self._open.get(request_id)
        return entry is None or entry.was_sent

    def admit(self, request: AdmitRequest, *, is_sent: bool) -> None:
        """Notes a request, which the engine of now gets at once or a later one by `resume`."""
        entry = self._open[request.request_id] = _Entry(request)
        entry.is_sent = entry.was_sent = is_sent

    def cancel(self, cancel: Cancel) -> list[Retired]:
        """Notes a cancel. It returns what the engine would answer if no engine has the request."""
        entry = self._open.get(cancel.request_id)
        if entry is None:
            return []
        entry.cancels.append(cancel)
        return [] if entry.is_sent else self._finish_cancels(entry)

    def end(self, refused: Refused) -> None:
        """The request gets its final message elsewhere."""
        self._forget(refused.request_id)

    def receive(self, message: FromEngine) -> FromEngine | None:
        """Notes a message of the engine, and returns what of it is new."""
        match message:
            case StepOutput():
                return self._receive_step(message)
            case Retired():
                return message if self._retire(message.request_id, message.child) else None
            case Refused():
                return message if self._forget(message.request_id) else None
            case Amended():
                self._change(message)
                return message
            case _:
                assert_never(message)

    def lose(self) -> list[Retired | Refused]:
        """The engine has died. Returns the final messages of what ends with it: the children whose
        cancel was under way, and a request that is the cause of the death.
        """
        for entry in self._open.values():
            entry.count_death()
        on_trial = self._on_trial
        ended = self.suspend()
        culprit = self._open.get(on_trial)
        if culprit is not None:
            ended.append(_culprit_error(culprit))
            self._forget(on_trial)
        return ended

    def suspend(self) -> list[Retired | Refused]:
        """The engine has ended. Returns the final messages of the children whose cancel was under
        way.
        """
        self._suspects.clear()
        self._on_trial = ""
        ended: list[Retired | Refused] = []
        for entry in list(self._open.values()):
            entry.is_sent = False
            entry.num_new = 0
            ended += self._finish_cancels(entry)
        self._resumed = set(self._open)
        return ended

    def resume(self) -> list[RequestEvent]:
        """Returns the messages that continue the open requests in a new engine, in the order of
        their arrival, except for suspects: only the first one continues.
        """
        messages: list[RequestEvent] = []
        for request_id, entry in self._open.items():
            if entry.num_deaths < SUSPECT_DEATHS:
                messages += entry.messages()
            else:
                self._suspects.append(request_id)
        return messages + self.next_trial()

    def next_trial(self) -> list[RequestEvent]:
        """Returns the messages that continue the next suspect, if none is on trial."""
        while self._suspects and not self._on_trial:
            entry = self._open.get(self._suspects.popleft())
            if entry is not None:
                self._on_trial = entry.admit.request_id
                return entry.messages()
        return []

    def _receive_step(self, step: StepOutput) -> StepOutput | None:
        if not self._resumed:
            if step.next_tokens is not None:
                self._note_tokens(step.next_tokens)
            for output in step.sequences:
                self._news_of(output)
            return step
        news = map(self._news_of, step.outputs())
        sequences = tuple([output for output in news if output is not None])
        return StepOutput(step.iteration, sequences) if sequences else None

    def _note_tokens(self, tokens: NextTokens) -> None:
        """Notes tokens of requests that no engine had before. PERF: as `_news_of` does, which would
        need a record for each of them.
        """
        for request_id, index, token_id, cached_len in zip(
            tokens.request_ids,
            array_i32(tokens.children).tolist(),
            split_i32(tokens.token_ids),
            array_i32(tokens.cached_lens).tolist(),
            strict=True,
        ):
            entry = self._open.get(request_id)
            child = entry.children[index] if entry is not None else None
            if entry is not None and child is not None and not child.is_retired:
                entry.num_new += 1
                child.outputs += token_id
                child.cached_len = cached_len

    def _news_of(self, output: SequenceOutput) -> SequenceOutput | None:
        """Notes an output and returns it without the prompt logprobs that have come before; or None
        if its child has ended. The cached part of the prompt stays that of the first engine.
        """
        entry = self._open.get(output.request_id)
        child = entry.children[output.child] if entry is not None else None
        if entry is None or child is None or child.is_retired:
            return None
        child.outputs += output.token_ids
        entry.num_new += num_values(output.token_ids)
        if self._on_trial == output.request_id and entry.num_new >= MIN_PROGRESS:
            self._on_trial = ""
        if child.cached_len is None:
            child.cached_len = output.cached_len
        scores = output.prompt_logprobs
        if scores is not None:
            end = scores.position + num_values(scores.chosen)
            scores = scores_from(scores, entry.num_scored)
            entry.num_scored = max(entry.num_scored, end)
        if scores is output.prompt_logprobs and child.cached_len == output.cached_len:
            return output
        return msgspec.structs.replace(output, cached_len=child.cached_len, prompt_logprobs=scores)

    def _change(self, answer: Amended) -> None:
        entry = self._open.get(answer.amend.request_id)
        if entry is not None and answer.sequences and answer.error is None:
            entry.admit = amended_admit(entry.admit, answer.amend)

    def _retire(self, request_id: str, child: int) -> bool:
        """Returns whether the child had not ended before."""
        entry = self._open.get(request_id)
        if entry is None or entry.children[child].is_retired:
            return False
        entry.children[child].is_retired = True
        if all(each.is_retired for each in entry.children):
            self._forget(request_id)
        return True

    def _forget(self, request_id: str) -> bool:
        if self._on_trial == request_id:
            self._on_trial = ""
        self._resumed.discard(request_id)
        return self._open.pop(request_id, None) is not None

    def _finish_cancels(self, entry: _Entry) -> list[Retired]:
        retired: list[Retired] = []
        request_id = entry.admit.request_id
        for cancel in entry.cancels:
            every = range(len(entry.children))
            for index in every if cancel.child is None else (cancel.child,):
                num_outputs = len(entry.children[index].outputs) // VALUE_BYTES
                if self._retire(request_id, index):
                    retired.append(Retired(request_id, index, cancel.reason, num_outputs))
        entry.cancels.clear()
        return retired


def _culprit_error(entry: _Entry) -> Refused:
    request_id = entry.admit.request_id
    error = StepError(
        f"request {request_id} was ended: the engine died {entry.num_deaths} times in a row while "
        "it worked on it, the last time without other suspects",
        code="request_kills_engine",
    )
    return Refused(request_id, error.info())
