"""Every message between actors, the one batch type, and the protocols of the executor.

Knows nothing of asyncio's loop, torch or HTTP; all records are frozen and travel as msgpack. Arrays
are `bytes` (little endian, read with `array_i32` and friends), so that messages compare, hash and
cross a socket as they are. Rows are 1..max_rows: row 0 is padding and never a request. Page 0 and
its slots are padding, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from aserve.errors import ErrorInfo

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "shutdown", "error"]
CancelReason: TypeAlias = Literal["stop", "cancelled", "deadline", "shutdown"]
ServerPhase: TypeAlias = Literal["starting", "ready", "draining", "dead"]
ChildKey: TypeAlias = tuple[str, int]  # request_id and child
ArrayI32: TypeAlias = npt.NDArray[np.int32]
ArrayF32: TypeAlias = npt.NDArray[np.float32]


def pack_i32(values: ArrayI32 | list[int] | tuple[int, ...]) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def array_i32(data: bytes) -> ArrayI32:
    """A read-only view; copy it before writing."""
    return np.frombuffer(data, dtype=np.int32)


def array_f32(data: bytes) -> ArrayF32:
    return np.frombuffer(data, dtype=np.float32)


def stamp_of(iteration: int) -> int:
    """What the relay says about who wrote it: the iteration while that is below 2^31, then counted
    from 1 again, so that it fits int32 and is never 0.
    """
    return 1 + (iteration - 1) % (2**31 - 1)


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of what crosses an actor's border."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of what is only part of a message."""


# ---------------------------------------------------------------- requests: http -> tokenizer ->
# scheduler


class Grammar(Record, frozen=True):
    """The language that an output must be in. `source` is the JSON text of a schema, a regular
    expression, EBNF as llama.cpp writes it, or a JSON list of texts; json_object needs none.
    `param` is the field that asked for it, which errors name.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    source: str = ""
    param: str = "structured_outputs"


class SamplingParams(Record, frozen=True):
    """What a client may ask of sampling, already validated (http/ and engine.py do that).

    temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 are off. `seed` is always set: http
    draws one for a request that has none. `logprobs` is the number of alternatives per token, None
    for no logprobs at all, and `prompt_logprobs` the same of the prompt's tokens; `raw_logprobs`
    are those before penalties, bias and masks. `echo` gives the prompt's text back before the
    output. `max_tokens` None means the rest of the context; the tokenizer actor resolves it. With 0
    the prompt is computed and nothing is sampled.
    `include_stop_str_in_output` shows what ended the text, `return_token_ids` also the prompt's
    ids. Only `allowed_token_ids` are sampled, and what ends a sequence; empty allows all.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    grammar: Grammar | None = None


EMBED = SamplingParams(seed=0, max_tokens=0)  # of a request that embeds: nothing is sampled


class TextPrompt(Record, frozen=True, tag="text"):
    text: str
    add_special_tokens: bool = True  # what the tokenizer puts around a text


class TokenPrompt(Record, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]


class ChatPrompt(Record, frozen=True, tag="chat"):
    """`messages` is the JSON of the message list and `tools` that of the tools, as the client
    sent them; `variables` is that of an object with what else the template may look at. Special
    tokens are the template's to add, and it opens the assistant's turn.
    """

    messages: bytes
    tools: bytes | None = None
    variables: bytes | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool = True


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class GenerateRequest(Message, frozen=True):
    """http -> tokenizer. `request_id` is made by the server and is matched whole, never by
    prefix. One that `embeds` is answered with an embedding of its prompt, and has max_tokens 0.
    `timeout_s` counts from its arrival at the tokenizer, and covers everything that follows.
    `outputs` has one int32 array per child: the tokens that an earlier engine generated for it,
    and its text side was given. The request goes on behind them, and their text is not sent again.
    `client` is an opaque id of who asks; the scheduler shares the engine fairly between clients.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    timeout_s: float | None = None
    # the last so many tokens of the prompt, -1 for all that leave room for max_tokens
    truncate_prompt_tokens: int | None = None
    embeds: bool = False
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    client: str = ""


class OpenText(Message, frozen=True):
    """tokenizer -> detokenizer, before the AdmitRequest: what the text side of a request needs
    to know. `outputs` are those of the GenerateRequest: their text counts as sent.
    """

    request_id: str
    prompt_len: int
    sampling: SamplingParams
    prompt_ids: bytes = b""  # int32 [prompt_len] where the client wants to see them
    # what each token of the prompt adds to its text, where it is echoed or scored
    prompt_texts: tuple[str, ...] = ()
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]


class AdmitRequest(Message, frozen=True):
    """tokenizer -> scheduler. `outputs` are those of the GenerateRequest. `deadline_s` is when its
    timeout ends, by time.monotonic, which all processes of a machine share.

    `end_ids` are the token ids that end a sequence (eos and stop_token_ids; empty with ignore_eos
    and no stops), `bad_word_ids` the spellings of bad words.
    `sampling.max_tokens` is resolved: prompt_len + max_tokens <= max_model_len.
    It `embeds` as its GenerateRequest does, and comes from the same `client`.
    """

    request_id: str
    prompt_ids: bytes  # int32 [prompt_len]
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    embeds: bool = False
    # the cache keys of the prompt's whole pages, 16 bytes each (cache/keys.py); the scheduler
    # computes those that are not here
    page_keys: bytes = b""
    client: str = ""


class Cancel(Message, frozen=True):
    """To the scheduler from http, the detokenizer or the scheduler actor's timer. child None: all
    children.

    `kept` is the number of output tokens that the client got; for an unknown request the message is
    ignored.
    """

    request_id: str
    child: int | None
    kept: int
    reason: CancelReason


# ---------------------------------------------------------------- one step: scheduler -> executor


class RowInit(Record, frozen=True):
    """Sampling state of a row that is new in this step: sent once, kept in the device's row
    tables.
    """

    row: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    prompt_len: int  # outputs start at this position; presence and frequency count from here
    min_len: int  # no id of end_ids is sampled for a position below this
    end_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    num_logprobs: int  # -1 none, 0 the chosen token only
    raw_logprobs: bool = False  # of the model's own distribution, whatever is sampled from
    allowed_ids: tuple[int, ...] = ()  # no other is sampled; empty for any
    # of each word the last id is not sampled where those before it were
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int = -1  # the same of the prompt's tokens
    embeds: bool = False  # the hidden state of the last prompt token is wanted


class PageWrites(Record, frozen=True):
    """Page table entries of one layer group: table[rows[i], columns[i]] = pages[i]."""

    rows: bytes = b""  # int32
    columns: bytes = b""  # int32
    pages: bytes = b""  # int32


class VerifyPlan(Record, frozen=True):
    """Present when rows carry drafts: the last num_drafts[i] tokens of row i's span come from
    the relay's drafts.
    """

    num_drafts: bytes  # int32 [rows]


class StepStats(Record, frozen=True):
    """What logs and metrics say about a step, frozen at launch."""

    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_retracted: int = 0
    # prompt tokens of the rows admitted in this step that the prefix cache had
    num_cached_tokens: int = 0
    used_pages: int = 0
    total_pages: int = 0


class ScheduleBatch(Message, frozen=True):
    """Everything decided for one step, in host values; complete and never changed.

    An unknown token stands in `input_ids` as -row: the device puts the row's last sampled token
    there. Draft positions (see VerifyPlan) hold -row as well. `kv_lens` is the KV length before
    this step, exact, or where `bounds` is 1 an upper bound that the device replaces from the
    relay's published length. `expects[i]` is the stamp of the step whose stash row i reads from the
    relay (token, drafts or length), 0 where it reads nothing. The first `shared_pages` pages of the
    first layer group are the same for all rows, and lie before what any of them computes here:
    named where the spec asks for it.
    """

    iteration: int
    rows: bytes  # int32 [rows]
    spans: bytes  # int32 [rows], tokens of each row in this step
    input_ids: bytes  # int32 [tokens]
    # int32 [rows], the token after each row's span, -row where this step or another in flight
    # samples it, or nothing comes after
    next_ids: bytes
    kv_lens: bytes  # int32 [rows]
    bounds: bytes  # uint8 [rows]
    expects: bytes  # int32 [rows]
    sample_rows: bytes  # int32 [samples], rows that sample in this step, in order of `rows`
    held_rows: bytes = b""  # int32 [held], rows whose logits wait for Sample(iteration)
    page_writes: tuple[PageWrites, ...] = ()  # one per layer group
    row_inits: tuple[RowInit, ...] = ()
    verify: VerifyPlan | None = None
    stats: StepStats = StepStats()
    shared_pages: int = 0


class Launch(Message, frozen=True):
    batch: ScheduleBatch


class Sample(Message, frozen=True):
    """Samples held rows of step `iteration`. Masks: int32 [rows, ceil(vocab / 32)], bit v % 32
    of word v // 32 allows v.
    """

    iteration: int
    rows: bytes  # int32 [rows]
    masks: bytes


class Resync(Message, frozen=True):
    """After a StepFailed: steps from `iteration` on are good again."""

    iteration: int


# ---------------------------------------------------------------- results: executor -> scheduler


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


class SeqLens(Record, frozen=True):
    """Published lengths of a step: KV length of each named row after it."""

    iteration: int
    rows: bytes  # int32
    lens: bytes  # int32


# ---------------------------------------------------------------- grammars: scheduler <-> workers


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


class FailRequest(Message, frozen=True):
    """masks -> scheduler: the request ends with this error, all its children at once. For an
    unknown request the message is ignored.
    """

    request_id: str
    error: ErrorInfo


# ---------------------------------------------------------------- text: scheduler -> detokenizer ->
# http


class SequenceOutput(Record, frozen=True):
    """New tokens of one sequence. `position` counts outputs: token_ids[0] is output number
    `position`. What belongs to the prompt comes once, in order, and before the first output.
    """

    request_id: str
    child: int
    position: int
    token_ids: bytes  # int32
    cached_len: int  # prompt tokens that the prefix cache had at first admission
    logprobs: tuple[RowLogprobs, ...] = ()  # each covers a run of the tokens, in order
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None  # float32 [hidden]


class StepOutput(Message, frozen=True):
    iteration: int
    sequences: tuple[SequenceOutput, ...]


class Retired(Message, frozen=True):
    """The last message of every sequence, exactly once. `stop_id` is the token id that ended it
    (eos or stop id).
    """

    request_id: str
    child: int
    reason: FinishReason
    num_outputs: int
    stop_id: int | None = None
    error: ErrorInfo | None = None


class Refused(Message, frozen=True):
    """The last message of a request that was never admitted; from the tokenizer or the
    scheduler.
    """

    request_id: str
    error: ErrorInfo


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
    """A scored token of the prompt; nothing predicts the first."""

    token_id: int
    token: str
    token_bytes: bytes
    text_offset: int  # characters of the prompt's text before this token
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TopLogprob, ...] = ()


class PromptPart(Record, frozen=True):
    """The next tokens of a prompt, as it goes back to the client."""

    text: str = ""  # where it is echoed
    tokens: tuple[PromptToken, ...] = ()  # where they are scored


def join_parts(parts: Sequence[PromptPart]) -> PromptPart | None:
    """Parts that follow each other as one; None of none."""
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


class OutputChunk(Message, frozen=True):
    """detokenizer -> http. Text, token ids and logprobs of one child since its last chunk. All that
    it says of the prompt comes before the first of them.

    finish_reason is set in the child's last chunk; `is_last` in the last chunk of the whole
    request, exactly once, whether it finished, failed or was refused (then `error` says why).
    `usage` counts the child so far.
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
    prompt_ids: bytes = b""  # int32, in the child's first chunk if they are asked for
    prompt: PromptPart | None = None
    embedding: bytes = b""  # float32 [hidden], in the last chunk of a request that embeds


def failed_chunk(request_id: str, error: ErrorInfo) -> OutputChunk:
    """All that is left to say to a request's client."""
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


# A Cancel goes the same way as its request, so that it cannot overtake it.
TokenizerEvent: TypeAlias = GenerateRequest | Cancel
EngineEvent: TypeAlias = AdmitRequest | Cancel  # what enters the engine, from the text side
SchedulerEvent: TypeAlias = (
    AdmitRequest | Cancel | StepResult | SampleResult | StepFailed | MaskReady | FailRequest
)
SchedulerEffect: TypeAlias = Launch | Sample | Resync | StepOutput | Retired | Refused | BuildMask
DetokenizerEvent: TypeAlias = OpenText | StepOutput | Retired | Refused


# ---------------------------------------------------------------- what the engine is, for the
# scheduler


class GroupSpec(Record, frozen=True):
    """Layers that share a page table. window None sees everything; else a query sees the last
    `window` positions, itself included. The first group has no window: token ids lie beside its
    slots.
    """

    name: str
    num_pages: int  # page 0 included, which is never given out
    window: int | None = None


class DecodeCaps(Record, frozen=True):
    """What a decode mode can do, as data."""

    max_tokens_per_step: int = 1  # a decode's span at most: 1 + drafts
    mixes_prefill: bool = True


class EngineSpec(Record, frozen=True):
    page_size: int
    groups: tuple[GroupSpec, ...]
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    vocab_size: int
    depth: int = 2
    lead: int = 2
    max_waiting: int = 512  # sequences
    prefix_cache: bool = True
    decode: DecodeCaps = DecodeCaps()
    names_shared_pages: bool = False  # attention gains from it
    mixed_prompt_tokens: int | None = None  # in a step that decodes too; None: as many as fit


# ---------------------------------------------------------------- the executor, as actors see it


class TokenFuture(Protocol):
    """One row's token of one step: await it on the host, gather it on the device, name it in the
    next batch.
    """

    iteration: int
    row: int

    @property
    def placeholder(self) -> int:
        """-row, the value that stands for the token in the next batch's input_ids."""

    def __await__(self) -> Generator[Any, None, tuple[int, ...]]: ...


class Ticket(Protocol):
    """A launched step. Awaiting it gives its result; a failed step is a value, too, not an
    exception.
    """

    iteration: int

    @property
    def seq_lens(self) -> Awaitable[SeqLens]: ...

    def __getitem__(self, row: int) -> TokenFuture: ...

    def __await__(self) -> Generator[Any, None, StepResult | SampleResult | StepFailed]: ...


class Executor(Protocol):
    """Device work in order of the calls. Called on the event loop's thread; no call blocks."""

    spec: EngineSpec

    def launch(self, batch: ScheduleBatch) -> Ticket: ...

    def sample(self, sample: Sample) -> Ticket: ...

    def resync(self, resync: Resync) -> None: ...
