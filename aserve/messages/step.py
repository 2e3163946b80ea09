"""One step as the scheduler decided it: `ScheduleBatch`, and the effects that launch it.

Rows are 1..max_rows: row 0 is padding and never a request. Page 0 and its slots are padding, too.
"""

from __future__ import annotations

from aserve.messages.base import Message, Record


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


class DraftTree(Record, frozen=True):
    """The tree that a row's drafts form behind its last known token, the root. Draft i, counted
    from 1, follows draft parents[i - 1], or the root for 0. A parent comes before its children, so
    that the first drafts of a tree are a tree as well.
    """

    parents: tuple[int, ...]

    def depth(self, num_drafts: int) -> int:
        """Drafts on the longest path through the first `num_drafts` of them."""
        depths = [0]
        for parent in self.parents[:num_drafts]:
            depths.append(depths[parent] + 1)
        return max(depths)


class VerifyPlan(Record, frozen=True):
    """Present when rows carry drafts: the last num_drafts[i] tokens of row i's span come from
    the relay's drafts. A span of drafts alone is a block of new tokens (see DecodeCaps). Drafts are
    a chain, or a tree of which the step moves the KV of the accepted path to the path's positions.
    """

    num_drafts: bytes  # int32 [rows]
    tree: DraftTree | None = None


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
    query_lens: bytes  # int32 [rows], tokens of each row in this step
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
    """Launches one step. Each data-parallel rank has its own batch, with the rank's own rows and
    pages, and a rank without work has one without rows. All of them have the same iteration.
    """

    batches: tuple[ScheduleBatch, ...]


class Sample(Message, frozen=True):
    """Samples held rows of step `iteration`. Masks: int32 [rows, ceil(vocab / 32)], bit v % 32
    of word v // 32 allows v.
    """

    iteration: int
    rows: bytes  # int32 [rows]
    masks: bytes


class ReceiveKv(Message, frozen=True):
    """Asks for a transfer of the KV of a sequence's first `num_tokens` tokens into its pages.
    Nobody else uses these until KvReady or KvFailed comes, even if the sequence ends before that.
    """

    request_id: str
    child: int
    num_tokens: int
    # int32 [pages] for each layer group, 0 for a page that no later token sees
    pages: tuple[bytes, ...]


class Resync(Message, frozen=True):
    """After a StepFailed: steps from `iteration` on are good again."""

    iteration: int
