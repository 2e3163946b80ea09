"""A causal model of transformers in two: its body makes hidden states, its head makes logits.

It knows no architecture: the head is the whole model with a stand-in for its body, so that it
scales, caps and projects as it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Halves:
    body: PreTrainedModel
    head: PreTrainedModel

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        answer = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: Tensor = answer.logits[0]
        return logits


def body_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part that makes the hidden states; None where `model` is all one."""
    from transformers import PreTrainedModel

    for body in (model.get_decoder(), model.base_model):
        # WHY: some families call their last layer the decoder
        if isinstance(body, PreTrainedModel) and body is not model:
            return body
    return None


def split(model: PreTrainedModel, body: PreTrainedModel, answer: Callable[..., object]) -> Halves:
    """Takes `model` apart: it makes no hidden states any more. `answer`: the class of what `body`
    returns.
    """
    path = next(name for name, module in model.named_modules() if module is body)
    model.set_submodule(path, _GivenHidden(answer))
    return Halves(body, model)


class _GivenHidden(nn.Module):
    def __init__(self, answer: Callable[..., object]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> object:
        return self._answer(last_hidden_state=inputs_embeds)
