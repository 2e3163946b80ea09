"""Whatever a test makes is on another device than it says: so a test of kernels, written for
tensors of the CPU, runs on a GPU with the very same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MAKERS = frozenset(
    {
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor),
        *(torch.zeros, Tensor.to),
    }
)


class OnDevice(TorchFunctionMode):
    """Drawn on the CPU, by its generators, and then moved. NOTE: torch shows no mode what becomes a
    tensor of an array; `to` moves that, too.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in MAKERS and isinstance(made, Tensor) and made.device.type == "cpu":
            return made.to(self._device)
        return made
