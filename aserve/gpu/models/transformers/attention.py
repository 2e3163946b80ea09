"""Hooks into transformers' modelling code, which looks up its attention function by name.

Two names are registered there. The function behind them calls a callback that each forward passes
down to its layers as a keyword argument, so nothing is kept between forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "aserve"  # under this name transformers makes no mask
PROBED = "aserve_probe"  # under this name a layer gets its mask's rule instead of a mask
KEYWORD = "aserve_attention"

# (batch, head, query position, key position), integer tensors -> whether the query sees the key.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class OnAttention(Protocol):
    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        /,
        *,
        mask: object,
        arguments: Mapping[str, object],
    ) -> Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> like q."""


class UnmadeMask:
    """Stands in for a mask tensor and holds its rule. A model that does more with its mask than
    pass it to attention fails on this object."""

    __slots__ = ("_rule",)

    def __init__(self, rule: MaskRule) -> None:
        self._rule = rule

    def rows(self, positions: Tensor, *, num_keys: int) -> Tensor:
        """positions int64 [n] -> bool [n, num_keys]: the keys that each position's query sees."""
        zero = torch.zeros((), dtype=torch.int64)
        seen = self._rule(zero, zero, positions[:, None], torch.arange(num_keys))
        return seen.expand(len(positions), num_keys)


def register() -> None:
    """Registers both names with transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PAGED, PROBED):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(PROBED, _mask)


def run(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, on_attention: OnAttention
) -> Any:
    """Runs input_ids and positions, int64 [tokens], as one sequence. The output has
    last_hidden_state [1, tokens, hidden], or logits [1, tokens, vocab] if the model has a head."""
    return model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        **{KEYWORD: on_attention},
    )


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: object,
    **arguments: object,
) -> tuple[Tensor, None]:
    """Has the signature of transformers' attention functions: q, k and v are [1, heads, tokens,
    head_dim], the result is [1, tokens, heads, head_dim]."""
    on_attention = arguments.pop(KEYWORD, None)
    if not callable(on_attention):
        raise TypeError("keyword arguments of the model don't reach its attention")
    q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
    out: Tensor = on_attention(module, q, k, v, mask=attention_mask, arguments=arguments)
    return out.contiguous().unsqueeze(0), None


def _mask(*, mask_function: MaskRule, **_: object) -> UnmadeMask:
    return UnmadeMask(mask_function)
