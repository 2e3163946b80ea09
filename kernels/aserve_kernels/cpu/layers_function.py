"""The layers of a decoder as one function of C, which forwards, steps and chains of drafts call.

There is one for each dtype of a model and of its KV, so those that call it know neither attention
nor KV, and teams of any size share it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, empty_array
from aserve_kernels.cpu.callback import Callback, call_at, compile_callback
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    LORA,
    MODEL,
    Records,
    buffers_in,
    num_narrow,
    num_wide,
    run_layers,
)
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at
from aserve_kernels.cpu.team import MEETING_LEN, Team

NUM_ARGUMENTS = 24
MODEL_LIKE, LAYER_LIKE, LORA_LIKE = np.empty(0, MODEL), np.empty(0, LAYER), np.empty(0, LORA)


@njit(nogil=True)
def call_layers(
    function: int, ids: Int64s, hiddens: Floats, rows: Int64s, lens: Int64s, starts: Int64s,
    query_lens: Int64s, num_read: Int64s, slots: Int64s, models: Records, layers: Records,
    loras: Records, captured: Int64s, out: Floats, streams: Floats, wide: Float32s, narrow_: Floats,
    team: Team,
) -> None:  # fmt: skip
    """Calls `run_layers`, of the function at this address. All arrays are contiguous. `wide` and
    `narrow_` have the sizes that `num_wide` and `num_narrow` return.

    WHY not inlined: numba frees an array after the last line that names it, which would be here,
    where its address is read. The caller of a function keeps what it passes.
    """
    call_at(
        function,
        (
            ids.ctypes.data, hiddens.ctypes.data, rows.ctypes.data, lens.ctypes.data,
            starts.ctypes.data, query_lens.ctypes.data, num_read.ctypes.data, slots.ctypes.data,
            models.ctypes.data, layers.ctypes.data, loras.ctypes.data, captured.ctypes.data,
            out.ctypes.data, streams.ctypes.data, wide.ctypes.data, narrow_.ctypes.data,
            team.meeting.ctypes.data, ids.shape[0], rows.shape[0], layers.shape[0], loras.shape[0],
            captured.shape[0], team.worker, team.num_workers,
        ),
    )  # fmt: skip


@cache
def layers_function(dtype: torch.dtype, kv_dtype: torch.dtype) -> Callback:
    """Returns `run_layers` of a model of this dtype with KV of `kv_dtype`, for `call_layers`."""
    like, kv_like = empty_array((0,), dtype), empty_array((0,), kv_dtype)

    def run_layers_at(
        ids: int, hiddens: int, rows: int, lens: int, starts: int, query_lens: int, num_read: int,
        slots: int, models: int, layers: int, loras: int, captured: int, out: int, streams: int,
        wide: int, narrow_: int, meeting: int, num_tokens: int, num_rows: int, num_layers: int,
        num_loras: int, num_captured: int, worker: int, num_workers: int,
    ) -> None:  # fmt: skip
        model = array_at(models, (1,), MODEL_LIKE)[0]
        shape, num_slots = (num_tokens, model["hidden"]), num_tokens if num_loras else 0
        floats = array_at(wide, (num_wide(num_tokens, model),), FLOAT32_LIKE)
        elements = array_at(narrow_, (num_narrow(num_tokens, model),), like)
        kv = array_at(narrow_, (0,), kv_like)
        run_layers(
            array_at(ids, (num_tokens,), INT64_LIKE),
            array_at(hiddens, (num_tokens, model["joined"]), like),
            array_at(rows, (num_rows,), INT64_LIKE),
            array_at(lens, (num_rows,), INT64_LIKE),
            array_at(starts, (num_rows,), INT64_LIKE),
            array_at(query_lens, (num_rows,), INT64_LIKE),
            array_at(num_read, (num_rows,), INT64_LIKE),
            array_at(slots, (num_slots,), INT64_LIKE),
            model,
            array_at(layers, (num_layers,), LAYER_LIKE),
            array_at(loras, (num_loras,), LORA_LIKE),
            array_at(captured, (num_captured,), INT64_LIKE),
            array_at(out, shape, like),
            array_at(streams, (num_captured, *shape), like),
            buffers_in(floats, elements, num_tokens, model, kv),
            Team(worker, num_workers, array_at(meeting, (MEETING_LEN,), INT64_LIKE)),
        )

    return compile_callback(run_layers_at, NUM_ARGUMENTS)
