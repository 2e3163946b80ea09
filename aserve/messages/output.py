"""The messages of outputs on their way from the scheduler through the detokenizer to the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import FinishReason, Message, Record, array_i32, split_i32
from aserve.messages.changes import Amended
from aserve.messages.requests import OpenText
from aserve.messages.results import PromptLogprobs, RowLogprobs
from aserve.messages.scored import PromptPart, TokenLogprob


class SequenceOutput(Record, frozen=True):
    """New tokens of one sequence. `position` is the number of outputs before token_ids[0]. Prompt
    logprobs come once, in order, and before the first output.
    """

    request_id: str
    child: int
    position: int
    token_ids: bytes  # int32
    cached_len: int  # prompt tokens found in the prefix cache at the first admission
    logprobs: tuple[RowLogprobs, ...] = ()  # each covers consecutive tokens, in order
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None  # float32 [hidden]
    # that the step verified; all of these tokens but the last are accepted ones
    num_drafts: int = 0


class NextTokens(Record, frozen=True):
    """One new token of each of these sequences, and nothing else. All but `request_ids` are int32
    [sequences]. PERF: as columns they are made and sent without a loop over the sequences.
    """

    request_ids: tuple[str, ...]
    children: bytes
    positions: bytes
    token_ids: bytes
    cached_lens: bytes

    def is_of(self, other: NextTokens) -> bool:
        """Whether the sequences are those of the other one, in the same order."""
        return self.request_ids == other.request_ids and self.children == other.children

    def outputs(self, *later: NextTokens) -> Iterator[SequenceOutput]:
        """Returns an output for each sequence, with the tokens of the `later` steps as well, which
        are of the same sequences.
        """
        num_steps = 1 + len(later)
        token_ids = array_i32(b"".join([self.token_ids, *[each.token_ids for each in later]]))
        by_sequence = token_ids.reshape(num_steps, -1).T.tobytes()
        return map(
            SequenceOutput,
            self.request_ids,
            array_i32(self.children).tolist(),
            array_i32(self.positions).tolist(),
            split_i32(by_sequence, num_steps),
            array_i32(self.cached_lens).tolist(),
        )


class StepOutput(Message, frozen=True):
    """Tells what a step brought. No sequence is in both fields."""

    iteration: int
    sequences: tuple[SequenceOutput, ...] = ()
    next_tokens: NextTokens | None = None

    def outputs(self) -> Iterator[SequenceOutput]:
        """Yields the outputs of all sequences."""
        if self.next_tokens is not None:
            yield from self.next_tokens.outputs()
        yield from self.sequences


class Retired(Message, frozen=True):
    """The last message about each sequence that was admitted. `stop_id` is the eos or stop token
    that ended it.
    """

    request_id: str
    child: int
    reason: FinishReason
    num_outputs: int
    stop_id: int | None = None
    error: ErrorInfo | None = None


class Refused(Message, frozen=True):
    """The last message about a request that was not admitted, from the tokenizer or the engine."""

    request_id: str
    error: ErrorInfo


class Usage(Record, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # without the tags
    draft_windows: int = 0  # decodes that verified drafts
    draft_tokens: int = 0  # that were verified
    # How many tokens of the output are the first draft of a window, the second, ...
    accepted_drafts: tuple[int, ...] = ()


class OutputChunk(Message, frozen=True):
    """detokenizer -> http: text, token ids and logprobs of one child since its last chunk. All
    parts of the prompt come before the first output.

    `finish_reason` is set in the child's last chunk. `is_last` is set in the last chunk of the
    request, also if it failed or was refused; then `error` is set. `usage` counts the child so far.
    """

    request_id: str
    child: int
    text: str
    token_ids: bytes  # int32
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    is_last: bool = False
    prompt_ids: bytes = b""  # int32, in the child's first chunk, if the client wants them
    prompt: PromptPart | None = None
    prompt_tail: str = ""  # in the child's first chunk: the end of a chat's prompt
    embedding: bytes = b""  # float32 [hidden], in the last chunk of an embedding request
    timings: bytes = b""  # JSON, in the last chunk of a request that is timed


def failed_chunk(request_id: str, error: ErrorInfo) -> OutputChunk:
    """Returns the last chunk of a request that ends with an error."""
    return OutputChunk(
        request_id=request_id,
        child=0,
        text="",
        token_ids=b"",
        usage=Usage(),
        finish_reason="error",
        error=error,
        is_last=True,
    )


DetokenizerEvent: TypeAlias = OpenText | StepOutput | Retired | Refused | Amended
