"""The layers of a decoder as one function of C, which forwards, steps and chains of drafts call.

There is one for each dtype of a model and of its KV, so those that call it know neither attention
nor KV, and teams of any size share it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
from aserve_kernels.cpu.memory import FLOAT32_LIKE, INT64_LIKE, array_at, scratch
from aserve_kernels.cpu.team import MEETING_LEN, Team

# The arguments of `run_layers`: the addresses of its arrays, and their lengths.
CALL: Any = np.dtype(
    [
        *[(name, np.int64) for name in ("ids", "hiddens", "rows", "lens", "starts", "query_lens")],
        *[(name, np.int64) for name in ("num_read", "slots", "model", "layers", "loras")],
        *[(name, np.int64) for name in ("captured", "out", "streams", "wide", "narrow")],
        *[(name, np.int64) for name in ("meeting", "num_tokens", "num_rows", "num_layers")],
        *[(name, np.int64) for name in ("num_loras", "num_captured")],
    ]
)
NUM_WORDS = len(CALL)
NUM_ARGUMENTS = 3  # the address of the record, the worker and the number of workers
CALL_LIKE, MODEL_LIKE = np.empty(0, CALL), np.empty(0, MODEL)
LAYER_LIKE, LORA_LIKE = np.empty(0, LAYER), np.empty(0, LORA)


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
    words = scratch((NUM_WORDS,), INT64_LIKE)
    call = array_at(words.ctypes.data, (1,), CALL_LIKE)[0]
    call["ids"], call["hiddens"] = ids.ctypes.data, hiddens.ctypes.data
    call["rows"], call["lens"] = rows.ctypes.data, lens.ctypes.data
    call["starts"], call["query_lens"] = starts.ctypes.data, query_lens.ctypes.data
    call["num_read"], call["slots"] = num_read.ctypes.data, slots.ctypes.data
    call["model"], call["layers"] = models.ctypes.data, layers.ctypes.data
    call["loras"], call["captured"] = loras.ctypes.data, captured.ctypes.data
    call["out"], call["streams"] = out.ctypes.data, streams.ctypes.data
    call["wide"], call["narrow"] = wide.ctypes.data, narrow_.ctypes.data
    call["meeting"] = team.meeting.ctypes.data
    call["num_tokens"], call["num_rows"] = ids.shape[0], rows.shape[0]
    call["num_layers"], call["num_loras"] = layers.shape[0], loras.shape[0]
    call["num_captured"] = captured.shape[0]
    call_at(function, (words.ctypes.data, team.worker, team.num_workers))


@cache
def layers_function(dtype: torch.dtype, kv_dtype: torch.dtype) -> Callback:
    """Returns `run_layers` of a model of this dtype with KV of `kv_dtype`, for `call_layers`."""
    like, kv_like = empty_array((0,), dtype), empty_array((0,), kv_dtype)

    def run_layers_at(address: int, worker: int, num_workers: int) -> None:
        call = array_at(address, (1,), CALL_LIKE)[0]
        num_tokens, num_rows = call["num_tokens"], call["num_rows"]
        model = array_at(call["model"], (1,), MODEL_LIKE)[0]
        num_slots = num_tokens if call["num_loras"] else 0
        shape = (num_tokens, model["hidden"])
        wide = array_at(call["wide"], (num_wide(num_tokens, model),), FLOAT32_LIKE)
        narrow_ = array_at(call["narrow"], (num_narrow(num_tokens, model),), like)
        kv = array_at(call["narrow"], (0,), kv_like)
        run_layers(
            array_at(call["ids"], (num_tokens,), INT64_LIKE),
            array_at(call["hiddens"], (num_tokens, model["joined"]), like),
            array_at(call["rows"], (num_rows,), INT64_LIKE),
            array_at(call["lens"], (num_rows,), INT64_LIKE),
            array_at(call["starts"], (num_rows,), INT64_LIKE),
            array_at(call["query_lens"], (num_rows,), INT64_LIKE),
            array_at(call["num_read"], (num_rows,), INT64_LIKE),
            array_at(call["slots"], (num_slots,), INT64_LIKE),
            model,
            array_at(call["layers"], (call["num_layers"],), LAYER_LIKE),
            array_at(call["loras"], (call["num_loras"],), LORA_LIKE),
            array_at(call["captured"], (call["num_captured"],), INT64_LIKE),
            array_at(call["out"], shape, like),
            array_at(call["streams"], (call["num_captured"], *shape), like),
            buffers_in(wide, narrow_, num_tokens, model, kv),
            Team(worker, num_workers, array_at(call["meeting"], (MEETING_LEN,), INT64_LIKE)),
        )

    return compile_callback(run_layers_at, NUM_ARGUMENTS)
