"""The messages of one step: `ScheduleBatch`, which the scheduler decides, and the effects around
it.

Rows are 1..max_rows. Row 0 is padding, and so are page 0 and its slots. Data-parallel ranks have
rows in turn: with D of them, row r is one of rank (r - 1) mod D.
"""

from __future__ import annotations

from aserve.messages.base import MAX_INT32, Message, Record
from aserve.picture import Picture


def stamp_of(iteration: int) -> int:
    """Returns the int32 by which the future map names the step that wrote a row. It is the
    iteration below 2^31, and then counts from 1 again. 0 stays 0: such a step writes no row.
    """
    if not iteration:
        return 0
    return 1 + (iteration - 1) % MAX_INT32


class RowInit(Record, frozen=True):
    """The sampling state of a row that is new in this step. It is sent once, and the device keeps
    it in its row tables.
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
    prompt_len: int  # outputs start here, and presence and frequency penalties count from here
    min_len: int  # end_ids are not sampled for positions below it
    end_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    num_logprobs: int  # -1 none, 0 the chosen token only
    raw_logprobs: bool = False  # logprobs before penalties, bias and mask
    allowed_ids: tuple[int, ...] = ()  # empty: all
    # the last id of a word is not sampled after its other ids
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int = -1  # like num_logprobs, for the prompt's tokens
    lora_slot: int = 0  # the row's adapter on the device; 0: none
    embeds: bool = False  # the step with the last prompt token returns a RowEmbedding
    prediction_ids: bytes = b""  # int32, tokens that its output may repeat in parts
    pictures: tuple[Picture, ...] = ()
    namespace: str = ""  # of the prefix cache; its rows may see each other's outputs


class PageWrites(Record, frozen=True):
    """New page-table entries of one layer group: table[rows[i], columns[i]] = pages[i]."""

    rows: bytes = b""  # int32
    columns: bytes = b""  # int32
    pages: bytes = b""  # int32


class DraftTree(Record, frozen=True):
    """The trees of rows' drafts, whose roots are the rows' last known tokens. Their shapes are
    known on the device only, as parents: draft i, counted from 1, follows draft parents[i - 1], or
    the root if that is 0. A parent comes before its children, so the first drafts of a tree are a
    tree, too.
    """

    max_depth: int  # no path has more drafts
    max_nodes: int | None = None  # more drafts than these are a chain, in a row with a prediction

    def depth(self, num_drafts: int) -> int:
        """Returns the most drafts that a path through the first `num_drafts` can have."""
        if self.max_nodes is not None and num_drafts > self.max_nodes:
            return num_drafts
        return min(self.max_depth, num_drafts)


class StateCopies(Record, frozen=True):
    """The checkpoints of recurrent states that a step reads and writes, as pairs of a row and a
    page. Before the step the states of `read_rows` become those of the pages; after it, the states
    at the end of each of `written_rows` are copied to the pages.
    """

    read_rows: bytes  # int32 [reads]
    read_pages: bytes  # int32 [reads]
    written_rows: bytes  # int32 [writes]
    written_pages: bytes  # int32 [writes]


class VerifyPlan(Record, frozen=True):
    """Present if rows have drafts: the last num_drafts[i] tokens of row i in this step are drafts
    from the future map. A row with only drafts is a block of new tokens (see DecodeCaps). Drafts
    are a chain or a tree; of a tree, the step moves the KV of the accepted path into place.
    """

    num_drafts: bytes  # int32 [rows]
    tree: DraftTree | None = None


class StepStats(Record, frozen=True):
    """Statistics for logs and metrics, as of the launch of the step."""

    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_retracted: int = 0
    # prompt tokens found in the prefix cache, of the rows admitted in this step
    num_cached_tokens: int = 0
    used_pages: int = 0
    total_pages: int = 0


class ScheduleBatch(Message, frozen=True):
    """Everything that is decided for one step, in host values. It is never changed.

    An unsampled token is -row in `input_ids`: the device replaces it by the row's last sampled
    token. Drafts (see VerifyPlan) are -row as well. `kv_lens` are the KV lengths before this step.
    Where `bounds` is 1 it is an upper bound, and the device reads the length from the future map.
    `expects[i]` is the stamp of the step whose token, drafts or length row i reads from the future
    map, 0 if it reads nothing. The first `shared_pages` pages of the first layer group are the same
    for all rows, and all tokens of this step come after them. It is 0 unless the EngineSpec asks
    for it.
    """

    iteration: int
    rows: bytes  # int32 [rows]
    query_lens: bytes  # int32 [rows], tokens of each row in this step
    input_ids: bytes  # int32 [tokens]
    # int32 [rows], the token after those of each row; -row if a step in flight or this one samples
    # it, or if there is none
    next_ids: bytes
    kv_lens: bytes  # int32 [rows]
    bounds: bytes  # uint8 [rows]
    expects: bytes  # int32 [rows]
    sample_rows: bytes  # int32 [samples], rows that sample in this step, in order of `rows`
    held_rows: bytes = b""  # int32 [held], rows whose logits wait for Sample(iteration)
    page_writes: tuple[PageWrites, ...] = ()  # one per layer group
    row_inits: tuple[RowInit, ...] = ()
    verify: VerifyPlan | None = None
    states: StateCopies | None = None
    stats: StepStats = StepStats()
    shared_pages: int = 0
    skips_drafter: bool = False  # no row drafts soon: the step runs the target model alone


class Launch(Message, frozen=True):
    """Launches one step. Each data-parallel rank has its own batch, with the rank's own rows and
    pages, and a rank without work has one without rows. All of them have the same iteration, and
    the first one has the statistics of all.
    """

    batches: tuple[ScheduleBatch, ...]


class Sample(Message, frozen=True):
    """Samples held rows of step `iteration`. Bit v % 32 of word v // 32 of a mask allows
    token v.
    """

    iteration: int
    rows: bytes  # int32 [rows]
    masks: bytes  # int32 [tokens of the rows' windows, ceil(vocab / 32)]


class Resync(Message, frozen=True):
    """Sent after a StepFailed: the device runs steps again from `iteration` on."""

    iteration: int
