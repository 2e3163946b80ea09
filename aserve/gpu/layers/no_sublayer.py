"""Stands for the mixer or the MLP of a decoder's layer that has only the other one."""

from __future__ import annotations

import torch
from torch import Tensor


class NoSublayer:
    """A decoder's block does not call it."""

    __slots__ = ()

    @property
    def layer(self) -> None:
        return None

    def __call__(self, x: Tensor, *_others: object) -> Tensor:
        return torch.zeros_like(x)


NO_SUBLAYER = NoSublayer()
