"""What the training and the measurement need of a drafter, whatever its architecture is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_drafters.target import TargetStates

# The loss of step j of a chain counts STEP_DECAY ** j, because it matters only after the steps
# before it were accepted.
STEP_DECAY = 0.8


class Drafter(nn.Module, ABC):
    """A module whose `state_dict` has the tensor names of the published checkpoints."""

    num_drafts: int  # the longest chain that it was made for
    drafts_per_step: int = 1

    @abstractmethod
    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        """Returns the training loss. weights: float32 [rows, length], of each row of logits."""

    @abstractmethod
    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        """Proposes `count` ids greedily after one row of committed ids and the bonus id."""

    @abstractmethod
    def num_read(self, head: int) -> int:
        """Returns how many parameters a draft step reads. `head`: those of the target's head."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """Returns what config.json says, in the keys of the published checkpoints."""


def chain_loss(steps: Iterable[Tensor], labels: Tensor, weights: Tensor) -> Tensor:
    """Adds the losses of the steps of a chain.

    Row i of the logits of step j predicts the id of position i + 2 + j, as row i + 1 + j of the
    labels [rows, length, vocab] and of the weights [rows, length] does.
    """
    total = torch.zeros(())
    for step, logits in enumerate(steps):
        loss = soft_cross_entropy(logits, labels[:, 1 + step :], weights[:, 1 + step :])
        total = total + STEP_DECAY**step * loss
    return total


def soft_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of -sum_v softmax(labels)_v log softmax(logits)_v.

    logits, labels: [..., vocab]; weights: [...].
    """
    losses = functional.cross_entropy(
        logits.flatten(0, -2), labels.softmax(dim=-1).flatten(0, -2), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def num_params(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def shifted_ids(seen: TargetStates, bonus: int) -> Tensor:
    """Returns int64 [1, length]: row i has the id of position i + 1, and the last the bonus."""
    return torch.cat((seen.ids[:, 1:], torch.tensor([[bonus]])), dim=1)


def appended(ids: Tensor, token_id: int) -> Tensor:
    return torch.cat((ids, torch.tensor([[token_id]])), dim=1)
