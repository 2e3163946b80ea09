"""What the columns of the row tables are, as kernels read them: int64 and float64, a row of each
table for every row of the server. It knows no kernel.
"""

from __future__ import annotations

import triton.language as tl

INT_COLUMNS = ("seed", "top_k", "prompt_len")
FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)

SEED: tl.constexpr = tl.constexpr(INT_COLUMNS.index("seed"))
TOP_K: tl.constexpr = tl.constexpr(INT_COLUMNS.index("top_k"))
PROMPT_LEN: tl.constexpr = tl.constexpr(INT_COLUMNS.index("prompt_len"))

TEMPERATURE: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("temperature"))
TOP_P: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("top_p"))
MIN_P: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("min_p"))
PRESENCE: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("presence_penalty"))
FREQUENCY: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("frequency_penalty"))
REPETITION: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("repetition_penalty"))
