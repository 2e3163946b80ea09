"""Trains drafters side by side: a batch runs through the target once, then through each drafter."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.train_drafters.drafter import Drafter
from tools.train_drafters.target import TargetStates, target_states
from tools.train_drafters.texts import Batch, Text, batches
from tools.train_tiny.network import Llama
from tools.train_tiny.recipe import Rates
from tools.train_tiny.training import (
    CHECKPOINT_EVERY_S,
    optimizers_for,
    restored_step,
    save_checkpoint,
    set_rates,
)

RATES = Rates(muon=3e-3, adam=2e-3, warmup_steps=30, decay_part=0.6)


@dataclass(frozen=True)
class Plan:
    steps: int
    tokens: int = 2048  # of a batch, padding included
    rates: Rates = RATES
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    step: int
    losses: dict[str, float]  # of this step's batch, by drafter


class Course:
    """A drafter in training, with its optimisers and its checkpoint."""

    def __init__(self, drafter: Drafter, plan: Plan, checkpoint: Path) -> None:
        self.drafter = drafter
        self.plan = plan
        self.checkpoint = checkpoint
        self.optimizers = optimizers_for(drafter, plan.rates)
        self.next_step = restored_step(drafter, checkpoint)

    def step(self, seen: TargetStates, weights: Tensor) -> float:
        progress = self.next_step / self.plan.steps
        set_rates(self.optimizers, self.plan.rates.factor(self.next_step, progress))
        loss = self.drafter.loss(seen, weights)
        torch.autograd.backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.next_step += 1
        return loss.item()

    def save(self) -> None:
        save_checkpoint(self.drafter, self.checkpoint, next_step=self.next_step)


def train(
    target: Llama,
    courses: dict[str, Course],
    texts: list[Text],
    plan: Plan,
    *,
    report: Callable[[Progress], None],
) -> None:
    """Trains all drafters to the end of the plan. Each goes on from its own checkpoint."""
    saved_at = time.monotonic()
    for step, batch in enumerate(first_batches(texts, plan)):
        due = {name: course for name, course in courses.items() if course.next_step == step}
        if not due:
            continue
        torch.manual_seed(plan.seed + step)
        seen = target_states(target, batch.ids)
        weights = weights_of_rows(batch)
        report(Progress(step, {name: course.step(seen, weights) for name, course in due.items()}))
        if step + 1 == plan.steps or time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
            for course in due.values():
                course.save()
            saved_at = time.monotonic()


def first_batches(texts: list[Text], plan: Plan) -> Iterator[Batch]:
    endless = batches(texts, tokens=plan.tokens, seed=plan.seed)
    for _ in range(plan.steps):
        yield next(endless)


def weights_of_rows(batch: Batch) -> Tensor:
    """Returns the weight of each row of logits, which predicts the next id."""
    return torch.cat((batch.weights[:, 1:], torch.zeros(len(batch.ids), 1)), dim=1)


def commonest_ids(texts: list[Text], count: int) -> Tensor:
    """Returns the `count` ids that the target generated most often, in ascending order."""
    seen = Counter(token_id for text in texts for token_id in text.ids[text.prompt_len :])
    # A text may use fewer ids than wanted: the smallest of the others follow.
    ranked = [token_id for token_id, _ in seen.most_common()]
    unseen = (token_id for token_id in range(2 * count) if token_id not in seen)
    ranked += [token_id for token_id, _ in zip(unseen, range(count), strict=False)]
    return torch.tensor(sorted(ranked[:count]))
