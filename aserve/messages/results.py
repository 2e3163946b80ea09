"""The results of a step: tokens, logprobs, failures and published lengths; and grammar masks."""

from __future__ import annotations

import msgspec

from aserve.errors import ErrorInfo
from aserve.messages.base import Message, Record


class RowLogprobs(Record, frozen=True):
    """Natural logprobs of one row's tokens in a step, before temperature, and after penalties, bias
    and mask unless the row wants raw_logprobs.
    """

    row: int
    chosen: bytes  # float32 [tokens]
    top_ids: bytes  # int32 [tokens, k], best first
    top_logprobs: bytes  # float32 [tokens, k]


class PromptLogprobs(Record, frozen=True):
    """Natural logprobs of consecutive prompt tokens of a row, from the model's distribution without
    penalties, bias, mask and temperature. `position` is that of the first of them, 1 or more,
    because token 0 is not predicted.
    """

    row: int
    position: int
    chosen: bytes  # float32 [tokens]
    ranks: bytes  # int32 [tokens], 1 for the most likely token
    top_ids: bytes  # int32 [tokens, k], best first
    top_logprobs: bytes  # float32 [tokens, k]


class RowEmbedding(Record, frozen=True):
    """The vector that the model's pooler makes of a row's prompt (gpu/models/pooling.py): an
    embedding, or the scores of a classifier's labels.
    """

    row: int
    values: bytes  # float32 [size]


class RowDrafts(Record, frozen=True):
    """The drafts of a held row, whose window waits for its masks."""

    row: int
    tokens: bytes  # int32 [drafts]
    parents: bytes = b""  # int32 [drafts], as in DraftTree; empty: a chain


class StepResult(Message, frozen=True):
    """The tokens of each sampled row, concatenated. The middle chunk of a prompt has no tokens, but
    it may have prompt logprobs.
    """

    iteration: int
    rows: bytes  # int32 [sampled rows]
    counts: bytes  # int32 [sampled rows], tokens of each
    tokens: bytes  # int32 [sum of counts]
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[RowEmbedding, ...] = ()
    drafts: tuple[RowDrafts, ...] = ()  # of held rows
    took_us: float = 0.0  # of the device, which computed nothing else; 0: not known
    ran: str = ""  # "replayed", "forward", "pieces" or "eager"; empty on devices without graphs


class SampleResult(Message, frozen=True):
    """The result of a Sample, as in StepResult."""

    iteration: int
    rows: bytes
    counts: bytes
    tokens: bytes
    logprobs: tuple[RowLogprobs, ...] = ()


class StepFailed(Message, frozen=True):
    """The step or its Sample failed, or was launched after a failed one and before the Resync."""

    iteration: int
    error: ErrorInfo


class SeqLens(Record, frozen=True):
    """The published lengths of a step: the KV length of each row after it."""

    iteration: int
    rows: bytes  # int32
    lens: bytes  # int32


class BuildMask(Message, frozen=True):
    """Asks for the mask of output `position` of a sequence, and for those after each of the drafts.
    `new_ids` are the outputs since the last BuildMask.
    """

    request_id: str
    child: int
    position: int
    new_ids: bytes  # int32
    drafts: bytes = b""  # int32 [drafts]
    parents: bytes = b""  # int32 [drafts], as in DraftTree; empty: a chain


class MaskReady(Message, frozen=True):
    """The mask of output `position`, and of the outputs after each draft. If `is_slow`, the masks
    of this request take long, and it gets few rows from now on.
    """

    request_id: str
    child: int
    position: int
    mask: bytes  # int32 [1 + drafts, ceil(vocab / 32)]
    error: ErrorInfo | None = None
    is_slow: bool = False


class StepTimes(Message, frozen=True):
    """Times of decode steps, measured when the engine starts, for these numbers of rows."""

    num_rows: tuple[int, ...]  # ascending
    plain_us: tuple[float, ...]  # of steps that skip the drafter
    # by the number of drafts of every row; with 0 the drafter only catches up with the step
    window_us: dict[int, tuple[float, ...]]
    # by that number, too, if only one row drafts; a number that is missing was not measured
    first_us: dict[int, tuple[float, ...]] = msgspec.field(default_factory=dict)
