"""The seam in transformers' modelling code: where a model looks up its attention function by name.

It knows no architecture, pages or rows. What attention does is a keyword argument of each forward,
which the model hands down to its layers: nothing is kept here between forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "aserve"  # under this name no mask is made
PROBED = "aserve_probe"  # under this one a layer gets the rule that its mask would be made by
KEYWORD = "aserve_attention"

# Integer tensors: batch, head, query position, key position -> whether that query sees that key.
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
    """In place of a mask tensor: a model that does anything with it but hand it on fails."""

    __slots__ = ("_rule",)

    def __init__(self, rule: MaskRule) -> None:
        self._rule = rule

    def rows(self, positions: Tensor, *, num_keys: int) -> Tensor:
        """int64 [n] -> bool [n, num_keys]: which keys a query at each of these positions sees."""
        zero = torch.zeros((), dtype=torch.int64)
        seen = self._rule(zero, zero, positions[:, None], torch.arange(num_keys))
        return seen.expand(len(positions), num_keys)


def register() -> None:
    """Makes both names known to transformers; a second time changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (PAGED, PROBED):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(PROBED, _mask)


def run(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, on_attention: OnAttention
) -> Any:
    """int64 [tokens] as one sequence -> the model's answer: last_hidden_state [1, tokens, hidden],
    or logits [1, tokens, vocab] if it has a head.
    """
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
    """As transformers calls it: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    on_attention = arguments.pop(KEYWORD, None)
    if not callable(on_attention):
        raise TypeError("keyword arguments of the model don't reach its attention")
    q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
    out: Tensor = on_attention(module, q, k, v, mask=attention_mask, arguments=arguments)
    return out.contiguous().unsqueeze(0), None


def _mask(*, mask_function: MaskRule, **_: object) -> UnmadeMask:
    return UnmadeMask(mask_function)
