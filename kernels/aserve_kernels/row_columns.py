"""The columns of the per-row sampling parameter tables: int64 and float64, [max_rows + 1, columns].

The engine writes the tables, and the sampling kernels read single columns of them by number.
"""

from __future__ import annotations

INT_COLUMNS = ("seed", "top_k", "prompt_len", "lora_slot", "namespace", "share")
FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
