"""Where a model is loaded to.

It knows no model and no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aserve.errors import ConfigError
from aserve.gpu.layers.elementwise import PLAIN, Elementwise
from aserve.gpu.layers.linear import Prepare, prepare
from aserve.gpu.weights.memory import available_memory_bytes

CPU = torch.device("cpu")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """`memory_bytes`: what the device has free; None asks the host."""

    device: torch.device = CPU
    memory_bytes: int | None = None
    prepare: Prepare = prepare
    elementwise: Elementwise = PLAIN

    def check_room(self, size_bytes: int, dtype: torch.dtype) -> None:
        """Before a value is read."""
        free_bytes = available_memory_bytes() if self.memory_bytes is None else self.memory_bytes
        if size_bytes > free_bytes:
            raise ConfigError(
                f"the model's weights need {size_bytes / GIB:.3f} GiB as "
                f"{str(dtype).removeprefix('torch.')}, but only {free_bytes / GIB:.3f} GiB are "
                "available; take a smaller dtype or a smaller model"
            )


HOST = Target()
