"""What comes back of a step: tokens, logprobs, failures, published lengths, grammar masks."""

from __future__ import annotations

from aserve.errors import ErrorInfo
from aserve.messages.base import Message, Record


class RowLogprobs(Record, frozen=True):
    """Of one row's tokens in a step, after penalties, bias and mask, or before all of them where
    the row wants raw_logprobs; before temperature (natural logarithm).
    """

    row: int
    chosen: bytes  # float32 [tokens]
    top_ids: bytes  # int32 [tokens, k], best first
    top_logprobs: bytes  # float32 [tokens, k]


class PromptLogprobs(Record, frozen=True):
    """Of a run of a row's prompt tokens, by the model's own distribution: no penalty, bias, mask or
    temperature (natural logarithm). `position` is that of the run's first token: 1 or more, because
    nothing comes before token 0.
    """

    row: int
    position: int
    chosen: bytes  # float32 [tokens]
    ranks: bytes  # int32 [tokens], 1 for the likeliest of the vocabulary
    top_ids: bytes  # int32 [tokens, k], best first
    top_logprobs: bytes  # float32 [tokens, k]


class RowEmbedding(Record, frozen=True):
    """The hidden state of a row's last prompt token after the final norm, of length 1."""

    row: int
    values: bytes  # float32 [hidden]


class StepResult(Message, frozen=True):
    """What came back of a step: for each sampled row its tokens, one after the other. Middle
    chunks give none, but the logprobs of their part of the prompt if these are wanted.
    """

    iteration: int
    rows: bytes  # int32 [sampled rows]
    counts: bytes  # int32 [sampled rows], tokens of each
    tokens: bytes  # int32 [sum of counts]
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[RowEmbedding, ...] = ()


class SampleResult(Message, frozen=True):
    """Like StepResult, of a Sample."""

    iteration: int
    rows: bytes
    counts: bytes
    tokens: bytes
    logprobs: tuple[RowLogprobs, ...] = ()


class StepFailed(Message, frozen=True):
    """The step (or a Sample of it) failed, or came after one that did and before the Resync."""

    iteration: int
    error: ErrorInfo


class KvReady(Message, frozen=True):
    """Answers ReceiveKv: the KV is in the sequence's pages. `token_ids` is the token that was
    sampled behind it. It may be empty, and then the last token is computed here.
    """

    request_id: str
    child: int
    token_ids: bytes  # int32
    logprobs: tuple[RowLogprobs, ...] = ()  # of that token, of whatever row


class KvFailed(Message, frozen=True):
    """Answers ReceiveKv: the KV did not come, and nothing writes to the pages any more."""

    request_id: str
    child: int
    error: ErrorInfo


class SeqLens(Record, frozen=True):
    """Published lengths of a step: KV length of each named row after it."""

    iteration: int
    rows: bytes  # int32
    lens: bytes  # int32


class BuildMask(Message, frozen=True):
    """Fill the mask for output `position` of a sequence; `new_ids` are the outputs since the
    last BuildMask.
    """

    request_id: str
    child: int
    position: int
    new_ids: bytes  # int32


class MaskReady(Message, frozen=True):
    """`is_slow`: the masks of this request take long, so that it gets few rows from now on."""

    request_id: str
    child: int
    position: int
    mask: bytes  # int32 [ceil(vocab / 32)]
    error: ErrorInfo | None = None
    is_slow: bool = False
