"""Drafts by prompt lookup: the longest suffix of the row's tokens is found where it occurred last
in its own prompt and output, and what followed there is the draft. It needs no model.

The token ids of every row lie in the token pool on the device, those that the host does not know
yet included. So the drafter sees the newest tokens under overlap, and has no state to keep.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import AFTER_NORM, DraftRows, Drafts, Verified, histories_of
from aserve.gpu.spec.fused import FusedLookup
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter, SpecOptions
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.messages.step import DraftTree
from aserve_kernels.suffix_match import MatchWindow, SuffixMatch

SHORTEST = 1
LONGEST = 12


class NgramDrafter:
    """A chain of `max_drafts` tokens."""

    __slots__ = (
        *("_match", "_window", "fields", "key_lookahead", "max_drafts", "num_forwards", "tree"),
        "wants",
    )

    def __init__(self, max_drafts: int, window: MatchWindow, match: SuffixMatch) -> None:
        self._window = window
        self._match = match
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.wants = AFTER_NORM
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 0

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        return Drafts(self.look_up(runner.state, rows))

    def look_up(self, state: DeviceState, rows: DraftRows) -> Tensor:
        """Returns the drafts, int64 [rows, num_drafts]."""
        return self._match.history(histories_of(state, rows), self._window, rows.num_drafts)

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        return {}


def load(request: DraftRequest) -> LoadedDrafter:
    num_drafts = request.chain_len(default=7)
    window = _window(request.options)
    about = f"{num_drafts} tokens after matches of {window.shortest} to {window.longest}"
    drafter = NgramDrafter(num_drafts, window, request.ops.suffix_match)
    return LoadedDrafter(
        drafter, None, about, fuse=lambda _make, state: FusedLookup(drafter.look_up, state)
    )


def _window(options: SpecOptions) -> MatchWindow:
    shortest, longest = options.min_match_len or SHORTEST, options.max_match_len or LONGEST
    if shortest > longest:
        raise ConfigError(
            f"a match of at least {shortest} tokens cannot have at most {longest}; change "
            "--speculative-min-match-len or --speculative-max-match-len",
            param="speculative_min_match_len",
        )
    return MatchWindow(shortest, longest)
