"""The engine's static description, and the protocols of the executor as actors see it."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Protocol, TypeAlias

from aserve.messages.base import Record
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.results import (
    BuildMask,
    KvFailed,
    KvReady,
    MaskReady,
    SampleResult,
    SeqLens,
    StepFailed,
    StepResult,
)
from aserve.messages.step import DraftTree, Launch, ReceiveKv, Resync, Sample, ScheduleBatch

SchedulerEvent: TypeAlias = (
    AdmitRequest
    | Cancel
    | StepResult
    | SampleResult
    | StepFailed
    | MaskReady
    | KvReady
    | KvFailed
    | FailRequest
)


SchedulerEffect: TypeAlias = (
    Launch | Sample | Resync | StepOutput | Retired | Refused | BuildMask | ReceiveKv
)


class GroupSpec(Record, frozen=True):
    """Layers that share a page table. window None sees everything; else a query sees the last
    `window` positions, itself included. The first group has no window: token ids lie beside its
    slots.
    """

    name: str
    num_pages: int  # page 0 included, which is never given out
    window: int | None = None


class DecodeCaps(Record, frozen=True):
    """What a decode mode can do, as data.

    A decode computes `root_len` known tokens without KV and then tokens that only the device knows.
    With `root_len` 1 these are the last sampled token and its drafts. With 0 they are a block of
    new tokens, as in a diffusion model, which begins anew where a row reads nothing from the relay.
    Such a mode takes no host-side masks.
    """

    min_tokens_per_step: int = 1  # 0: a step may give a row nothing, as a denoising pass does
    max_tokens_per_step: int = 1  # also the most tokens that a decode computes
    root_len: int = 1
    mixes_prefill: bool = True
    tree: DraftTree | None = None  # of max_tokens_per_step - 1 drafts; None: a chain
    # tokens behind a position on which its KV depends, as in a drafter whose inputs are shifted
    key_lookahead: int = 0


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
    max_mixed_prefill_tokens: int | None = None  # in a step that decodes too; None: as many as fit


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

    def launch(self, *batches: ScheduleBatch) -> Ticket:
        """Launches the batches of a Launch, one for each rank of this executor."""

    def sample(self, sample: Sample) -> Ticket: ...

    def resync(self, resync: Resync) -> None: ...
