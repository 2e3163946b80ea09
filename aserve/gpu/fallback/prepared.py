"""What is changed in a model of transformers before it runs: its linear layers and frequencies.

It knows no architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.weights.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_linears(model: PreTrainedModel, target: Target, *, dtype: torch.dtype) -> None:
    """Gives every plain linear layer the form that the device wants, as in aserve's own models."""
    for name, module in list(model.named_modules()):
        # A subclass computes something else, and what has a dtype of its own needs it (routers).
        if type(module) is nn.Linear and module.weight.dtype == dtype:
            linear = Linear(module.weight.detach(), _detached(module.bias))
            op = target.prepare(linear, target.device, dtype=dtype)
            model.set_submodule(name, _PreparedLinear(op, module))


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


class _PreparedLinear(nn.Module):
    """Has no values any more; a model that looks for them finds their shape and dtype."""

    def __init__(self, op: LinearOp, plain: nn.Linear) -> None:
        super().__init__()
        self._op = op
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = torch.empty_like(plain.weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._op(x.flatten(0, -2)).view(*x.shape[:-1], -1)


@torch.no_grad()
def fix_frequencies(model: PreTrainedModel, context_len: int) -> None:
    """Rotary frequencies that follow the length of each call: those of the whole context, always.

    WHY: KV is shared between rows and kept between steps, so a key's rotation must never change.
    """
    at_end = torch.tensor([[context_len - 1]], device=model.device)
    like = torch.zeros((), dtype=model.dtype, device=model.device)
    rotary: Any
    for rotary in model.modules():
        match getattr(rotary, "rope_type", None):
            case str():
                rotary(like, at_end)
                rotary.rope_type = "default"
            case dict() as kinds:
                for layer_type in kinds:
                    rotary(like, at_end, layer_type)
                rotary.rope_type = dict.fromkeys(kinds, "default")
