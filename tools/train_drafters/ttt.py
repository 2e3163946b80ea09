"""Training-time test: attention of a drafter that is unrolled over its own outputs (EAGLE-3).

Row t is a draft that starts after position t. Its step j stands at position t + j and attends to
the step-0 keys of positions <= t, which the target's hidden states made, and to the keys of its
own steps 1 to j, as it does when it drafts. See Li et al., 2025, "EAGLE-3".
"""

import torch
from torch import Tensor

from tools.train_drafters.layers import Attention, causal, per_query_head


class Unrolled:
    """The keys and values of the steps so far. Later steps have fewer rows."""

    def __init__(self, attention: Attention, *, cos: Tensor, sin: Tensor) -> None:
        self.attention = attention
        self.cos, self.sin = cos, sin
        self.steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, hidden: Tensor) -> Tensor:
        """Returns the outputs of all heads for the next step, [rows, heads, length, head_dim]."""
        step, length = len(self.steps), hidden.shape[1]
        cos, sin = self.cos[step : step + length], self.sin[step : step + length]
        queries = self.attention.queries(hidden, cos, sin)
        keys, values = self.attention.keys_values(hidden, cos, sin)
        num_heads = queries.shape[1]
        if step == 0:
            self.steps.append((per_query_head(keys, num_heads), per_query_head(values, num_heads)))
            return causal(queries, keys, values)
        self.steps.append((per_query_head(keys, num_heads), per_query_head(values, num_heads)))
        return self.with_own_steps(queries)

    def with_own_steps(self, queries: Tensor) -> Tensor:
        length = queries.shape[2]
        scale = queries.shape[-1] ** -0.5
        (first_keys, first_values), *own = [
            (keys[:, :, :length], values[:, :, :length]) for keys, values in self.steps
        ]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(queries @ first_keys.mT * scale).masked_fill(later, -torch.inf)]
        scores += [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in own]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        mixed = weights[..., :length] @ first_values
        for index, (_, values) in enumerate(own):
            mixed = mixed + weights[..., length + index, None] * values
        return mixed
