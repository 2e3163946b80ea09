"""The description of an engine, the unions of the scheduler's events and effects, and the protocols
of the executor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from aserve.messages.base import Record
from aserve.messages.changes import Amend, Amended, ChangeSettings
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.results import (
    BuildMask,
    MaskReady,
    SampleResult,
    SeqLens,
    StepFailed,
    StepResult,
    StepTimes,
)
from aserve.messages.step import DraftTree, Launch, Resync, Sample, ScheduleBatch
from aserve.messages.transfers import KvAnswer, KvEffect

SchedulerEvent: TypeAlias = (
    AdmitRequest
    | Cancel
    | Amend
    | StepResult
    | SampleResult
    | StepFailed
    | MaskReady
    | KvAnswer
    | FailRequest
    | ChangeSettings
    | StepTimes
)
SchedulerEffect: TypeAlias = (
    Launch | Sample | Resync | StepOutput | Retired | Refused | Amended | BuildMask | KvEffect
)

Task: TypeAlias = Literal["generate", "embed", "classify"]
# Which pages go down to the tiers below the prefix cache: all when they enter it, or when they are
# evicted.
TierPolicy: TypeAlias = Literal["off", "write_through", "write_back"]


class GroupSpec(Record, frozen=True):
    """A layer group: layers that share a page table. A query sees the last `window` positions,
    itself included, or all if it is None. The first group has no window, because the token ids of
    the sequences lie beside its slots.
    """

    name: str
    num_pages: int  # page 0, the padding, included
    window: int | None = None


class DecodeCaps(Record, frozen=True):
    """The capabilities of a decode mode.

    A decode computes `root_len` known tokens without KV, and then tokens that only the device
    knows. With `root_len` 1 these are the last sampled token and its drafts. With 0 they are a
    block of new tokens, as in a diffusion model; the block starts anew if the row reads nothing
    from the future map. Such a mode takes no host-side masks. If blocks have a `block_len`, they
    are cut from position 0 on, and a step decodes the rest of a block. The KV of a position then
    depends on all tokens of its block.
    """

    min_tokens_per_step: int = 1  # 0: a step may give a row nothing, as a denoising pass does
    # also the most tokens that a decode computes, but for rows with a prediction
    max_tokens_per_step: int = 1
    root_len: int = 1
    mixes_prefill: bool = True
    tree: DraftTree | None = None  # of max_tokens_per_step - 1 drafts; None: a chain
    # later tokens on which the KV of a position depends, as in a drafter with shifted inputs
    key_lookahead: int = 0
    max_predicted: int = 0  # drafts of a row whose client predicts its output
    # tokens depend on the windows, so these have all their drafts or none, whatever the load is
    whole_windows: bool = False
    # A row keeps a state that belongs to its end alone, which cannot be taken back: a row whose
    # results are dropped begins anew at its last checkpoint, or with its first token.
    is_recurrent: bool = False
    continues_repeats: bool = False  # drafts are what followed the row's last tokens before
    block_len: int = 1

    def most_tokens(self, *, is_predicted: bool) -> int:
        """Returns the most tokens that a decode of a row computes."""
        predicted = self.root_len + self.max_predicted if is_predicted else 0
        return max(self.max_tokens_per_step, predicted)


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
    num_checkpoints: int = 0  # pages with recurrent states of cached prefixes, page 0 included
    checkpoint_interval: int = 256  # tokens
    kv_tiers: TierPolicy = "off"
    decode: DecodeCaps = DecodeCaps()
    names_shared_pages: bool = False  # ScheduleBatch.shared_pages is set, because attention uses it
    max_mixed_prefill_tokens: int | None = None  # of a step that also decodes; None: as many as fit
    dtype: str = ""  # of the model's activations
    task: Task = "generate"  # of the model; any other one answers a prompt with one vector
    whole_prompts: bool = False  # a prompt is computed in one step, and its KV is never shared
    hot_bytes_per_row: int = 0  # device memory of a request's hot rows (HiSparse)
    # Ranks that have rows, pages and a prefix cache of their own. The rows are those of all ranks;
    # the pages and the tokens of a step are those of one.
    dp_size: int = 1

    @property
    def total_pages(self) -> int:
        """The pages of the first layer group that sequences of all ranks can have."""
        return self.dp_size * (self.groups[0].num_pages - 1)

    def changed(self, change: ChangeSettings, *, least_tokens: int = 1) -> EngineSpec:
        return msgspec.structs.replace(
            self,
            max_waiting=change.max_waiting,
            max_batched_tokens=max(change.max_batched_tokens, least_tokens),
            max_mixed_prefill_tokens=change.max_mixed_prefill_tokens,
        )


class TokenFuture(Protocol):
    """The token of one row of one step, which may not be sampled yet. The host awaits it, and the
    next batch names it by its placeholder.
    """

    iteration: int
    row: int

    @property
    def placeholder(self) -> int:
        """Returns -row, which stands for the token in the input_ids of the next batch."""

    def __await__(self) -> Generator[Any, None, tuple[int, ...]]: ...


class Ticket(Protocol):
    """A launched step. Awaiting it returns its result; a failed step returns StepFailed and raises
    nothing.
    """

    iteration: int

    @property
    def seq_lens(self) -> Awaitable[SeqLens]: ...

    def __getitem__(self, row: int) -> TokenFuture: ...

    def __await__(self) -> Generator[Any, None, StepResult | SampleResult | StepFailed]: ...


class Executor(Protocol):
    """Runs steps on the device in the order of the calls. The event loop calls it, and no call
    blocks.
    """

    spec: EngineSpec

    def launch(self, *batches: ScheduleBatch) -> Ticket:
        """Launches the batches of a Launch, one for each rank of this executor."""

    def sample(self, sample: Sample) -> Ticket: ...

    def resync(self, resync: Resync) -> None: ...
