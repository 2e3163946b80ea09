"""Root mean square norm over the last dimension.

It knows nothing of what it norms: hidden states, or single heads (qk-norm).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        self.weight = weight  # [dim]
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape and dtype; half types are summed in float32."""
        return functional.rms_norm(x, self.shape, self.weight, self.eps)
