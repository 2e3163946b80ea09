"""Muon: momentum with orthogonalised updates, for weight matrices (Jordan et al., 2024).

The caller sets `lr` in the parameter groups.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Orthogonalises all matrices of one shape together, in batched products.

    A weight of three dimensions is a stack of matrices.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no closure is ever passed, so no loss is returned
        del closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                stacked = torch.stack([self.direction(m, group["momentum"]) for m in matrices])
                updates = orthogonalised(stacked.flatten(0, -3)).view_as(stacked)
                # WHY the factor: it gives tall and wide matrices the same change per output.
                rate = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.add_(update, alpha=-rate)

    def direction(self, matrix: Tensor, momentum: float) -> Tensor:
        """Returns the Nesterov momentum of one matrix, and updates the optimiser's state."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        running: Tensor = state["momentum"]
        running.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(running, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Returns nearly orthogonal matrices [count, out, in], by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
