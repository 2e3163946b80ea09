"""`GraphLimits`: how large captured steps and forwards are at most, and the memory that the driver
keeps for them, which the KV cache does not get.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.gpu.attention.select import Attention
from aserve.gpu.cudagraph.forwards import (
    ForwardGraphs,
    ForwardParts,
    takes_pieces,
    token_counts,
)
from aserve.gpu.cudagraph.shapes import row_counts
from aserve.gpu.device.base import Device
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel
from aserve.gpu.step.resolve import DeviceState
from aserve.messages.base import MIB

# What the driver keeps for a captured graph beside the tensors, which all graphs share and the
# profile run measures. vLLM reports 0.5 to 0.6 GiB for 67 graphs of an 8B model.
GRAPH_BYTES = 8 * MIB
NUM_SAMPLINGS = 3


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """`tokens` is that of the largest forward in pieces. With None forwards are captured within
    whole steps only."""

    rows: int  # of the largest decode; 0: nothing is captured
    tokens: int | None

    @classmethod
    def of(
        cls, device: Device, rows: int | None, tokens: int | None, *, max_rows: int, max_tokens: int
    ) -> GraphLimits:
        """The first two are the user's options; `max_rows` and `max_tokens` are those of a step."""
        most = device.graph_rows
        rows = min(most if rows is None else rows, max_rows) if most else 0
        return cls(rows, min(tokens, max_tokens) if rows and tokens is not None else None)

    @property
    def reserved_bytes(self) -> int:
        """Returns an estimate of what all graphs take: for each number of rows a decode with each
        kind of sampling and a forward, and a forward for each number of tokens."""
        num_kinds = NUM_SAMPLINGS + (self.tokens is not None)
        num_graphs = len(row_counts(self.rows)) * num_kinds + len(token_counts(self.tokens or 0))
        return num_graphs * GRAPH_BYTES

    def forwards(
        self,
        model: CausalModel,
        state: DeviceState,
        attention: Attention,
        *,
        device: Device,
        loras: LoraTables | None,
    ) -> ForwardGraphs | None:
        if self.tokens is None:
            return None
        own = ForwardParts(
            model,
            state,
            attention.backend,
            device,
            loras,
            row_counts(self.rows if attention.capabilities.can_capture else 0),
            token_counts(self.tokens if takes_pieces(model) else 0),
        )
        return ForwardGraphs(own)
