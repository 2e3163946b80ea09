"""The fused operators that a device provides for one dtype.

Defaults are plain torch. Each device fills in what it does faster (`Device.ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from aserve.gpu.device.fused_step import FusedDecoder, FusedDraft
from aserve.gpu.kv.store import RopeAndStoreKv, rope_then_store_kv
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.lora.tables import LoraOps, MakeLoraOps
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.step.future_map import PLAIN_ROW_OPS, RowOps
from aserve.gpu.step.resolve import DeviceState, Resolve, resolve
from aserve_kernels.delta_rule import AdvanceRows, advance_rows_ref
from aserve_kernels.suffix_match import TORCH_SUFFIX_MATCH, SuffixMatch

# Makes the fused step of a model; None where the device has none for it.
MakeFusedStep: TypeAlias = Callable[[CausalModel, DeviceState], FusedDecoder | None]
# Makes the compiled calls of a draft model; None where the device has none for it.
MakeFusedDraft: TypeAlias = Callable[[CausalModel | DraftDecoder, DeviceState], FusedDraft | None]


def no_fused_step(_model: CausalModel | DraftDecoder, _state: DeviceState) -> None:
    """The choice of devices that run every step operator by operator."""


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The operators of one device and dtype; each default is the torch reference."""

    elementwise: Elementwise = PLAIN  # norms, residual sums and gated activations
    rope_and_store_kv: RopeAndStoreKv = rope_then_store_kv
    row_ops: RowOps = PLAIN_ROW_OPS  # gathers and scatters rows of the relay
    resolve: Resolve = resolve  # turns a step's staged words into the model's inputs
    sample_ops: SampleOps = PLAIN_OPS
    lora_ops: MakeLoraOps = LoraOps  # of engines with --enable-lora
    fused_step: MakeFusedStep = no_fused_step
    fused_draft: MakeFusedDraft = no_fused_step
    make_advance_rows: Callable[[], AdvanceRows] = lambda: advance_rows_ref
    suffix_match: SuffixMatch = TORCH_SUFFIX_MATCH  # looks up drafts in histories and texts


TORCH_OPS = DeviceOps()
