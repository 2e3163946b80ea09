"""Root mean square norm over the last dimension.

It knows nothing of what it norms: hidden states, or all heads of a token together.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, /, *, eps: float) -> None:
        self.weight = weight  # [size]
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, size] -> the same shape and dtype.

        Half types are summed in float32, and multiplied in the weight's dtype before they are
        rounded.
        """
        if x.dtype == self.weight.dtype:
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, self.shape, self.weight, self.eps).to(x.dtype)
