"""The messages of outputs on their way from the scheduler through the detokenizer to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import FinishReason, Message, Record
from aserve.messages.changes import Amend
from aserve.messages.requests import OpenText
from aserve.messages.results import PromptLogprobs, RowLogprobs


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
    num_drafts: int = (
        0  # that the step verified; all of these tokens but the last are accepted ones
    )


class StepOutput(Message, frozen=True):
    iteration: int
    sequences: tuple[SequenceOutput, ...]


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


class SequenceState(Record, frozen=True):
    """`phase` is that of the scheduler. `num_ahead` are the sequences that are admitted before this
    one, if it waits.
    """

    child: int
    phase: str
    prompt_len: int
    num_outputs: int
    max_tokens: int
    priority: int
    num_ahead: int | None = None


class Amended(Message, frozen=True):
    """The answer to an Amend, in order with the outputs of the request. `sequences` are the
    children that had not ended before; none if the request is not known (any more). With an error
    nothing was changed.
    """

    amend: Amend
    sequences: tuple[SequenceState, ...] = ()
    error: ErrorInfo | None = None


class TopLogprob(Record, frozen=True):
    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class TokenLogprob(Record, frozen=True):
    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    text_offset: int = 0  # characters of the answer's text before this token


class PromptToken(Record, frozen=True):
    """A scored token of the prompt. The first one has neither logprob nor rank."""

    token_id: int
    token: str
    token_bytes: bytes
    text_offset: int  # characters of the prompt's text before this token
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TopLogprob, ...] = ()


class PromptPart(Record, frozen=True):
    """The next tokens of a prompt that is echoed or scored."""

    text: str = ""  # if it is echoed
    tokens: tuple[PromptToken, ...] = ()  # if it is scored


def join_parts(parts: Sequence[PromptPart]) -> PromptPart | None:
    """Joins consecutive parts. Returns None for none."""
    if not parts:
        return None
    return PromptPart(
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
    )


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
