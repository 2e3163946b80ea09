"""The texts that clients predict for the outputs of their requests, one row each, on the device.

They are written beside the row parameters, once per request. The table grows to the longest text
that came so far, and without predictions it has no columns: no captured graph reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import array_i32
from aserve.messages.step import RowInit


class PredictedTexts:
    """`ids` int32 [max_rows + 1, longest text] and `lens` int64 [max_rows + 1], 0 for no text."""

    __slots__ = ("ids", "lens")

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.ids = torch.zeros((max_rows + 1, 0), dtype=torch.int32, device=device)
        self.lens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def stage(self, inits: Sequence[RowInit], arrays: HostArrays) -> None:
        """Adds the texts of new rows to a step's arrays."""
        texts = [array_i32(init.prediction_ids) for init in inits]
        lens = [len(text) for text in texts]
        ids = np.zeros((len(texts), max(lens)), np.int32)
        for place, text in zip(ids, texts, strict=True):
            place[: len(text)] = text
        arrays.add("text_lens", np.array(lens, np.int32))
        arrays.add("text_ids", ids.reshape(-1))

    def write(self, rows: Tensor, arrays: DeviceArrays) -> None:
        """Writes what `stage` added. `rows` int64 [n] are the new rows."""
        self.lens.index_copy_(0, rows, arrays.ints("text_lens"))
        ids = arrays.narrow_ints("text_ids").view(len(rows), -1)
        if (width := ids.shape[1]) > self.ids.shape[1]:
            self.ids = pad(self.ids, (0, width - self.ids.shape[1]))
        self.ids[:, :width].index_copy_(0, rows, ids)
