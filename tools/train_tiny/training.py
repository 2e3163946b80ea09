"""The training loop: it runs batches and optimiser steps, saves checkpoints and reports losses."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.muon import Muon
from tools.train_tiny.packing import Batch
from tools.train_tiny.recipe import Rates, Recipe, Stage

CHECKPOINT_EVERY_S = 150.0
# Parts of the names of embeddings, heads and the routers of experts.
WITHOUT_MUON = ("embed", "lm_head", ".gate.")


@dataclass(frozen=True)
class Progress:
    step: int
    stage: Stage
    num_tokens: int
    loss: float  # weighted, of this step's batch


class Batches(Protocol):
    """The batches of a stage. A batch is a pure function of the seed, the stage and the step."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True)
class Run:
    """The input of a training run. `precision` is the dtype of matmuls; weights are float32."""

    recipe: Recipe
    batches: Callable[[Stage], Batches]
    loss: Callable[[Batch], Tensor]
    precision: torch.dtype
    checkpoint: Path | None


def train(network: nn.Module, run: Run, *, report: Callable[[Progress], None]) -> None:
    """Trains the network. It continues from the checkpoint if there is one."""
    optimizers = optimizers_for(network, run.recipe.rates)
    first_step = restored_step(network, run.checkpoint)
    num_tokens = 0
    saved_at = time.monotonic()
    for step, (stage, batches, stage_step) in enumerate(schedule(run)):
        num_tokens += stage.length * stage.rows
        if step < first_step:
            continue
        factor = run.recipe.rates.factor(step, num_tokens / run.recipe.num_tokens)
        set_rates(optimizers, factor)
        loss = train_step(run, batches.batch(stage_step), optimizers)
        report(Progress(step, stage, num_tokens, loss))
        if run.checkpoint and time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
            save_checkpoint(network, run.checkpoint, next_step=step + 1)
            saved_at = time.monotonic()


def schedule(run: Run) -> Iterator[tuple[Stage, Batches, int]]:
    for stage in run.recipe.stages:
        batches = run.batches(stage)
        for stage_step in range(stage.steps):
            yield stage, batches, stage_step


def optimizers_for(network: nn.Module, rates: Rates) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings, heads, routers, norms and biases."""
    named = [item for item in network.named_parameters() if item[1].requires_grad]
    matrices = [weight for name, weight in named if is_matrix(name, weight)]
    others = [weight for name, weight in named if not is_matrix(name, weight)]
    adam = torch.optim.AdamW(others, lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = [Muon(matrices, lr=rates.muon), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def is_matrix(name: str, weight: torch.Tensor) -> bool:
    """A weight of three dimensions is a stack of matrices, such as those of experts."""
    return weight.ndim in (2, 3) and not any(part in name for part in WITHOUT_MUON)


def train_step(run: Run, batch: Batch, optimizers: list[torch.optim.Optimizer]) -> float:
    is_mixed = run.precision != torch.float32
    with torch.autocast("cpu", run.precision) if is_mixed else contextlib.nullcontext():
        loss = run.loss(batch)
    torch.autograd.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The weighted mean of the nats of each next id. logits: [rows, length, vocab]."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.ids[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights.flatten()
    return (losses * weights).sum() / weights.sum()


def save_checkpoint(network: nn.Module, path: Path, *, next_step: int) -> None:
    unfinished = path.with_suffix(".part")
    save_model(network, str(unfinished), metadata={"next_step": str(next_step)})
    unfinished.replace(path)


def restored_step(network: nn.Module, path: Path | None) -> int:
    """Loads the checkpoint and returns its step, or 0 without one. Momenta are not saved, because
    they build up again within some steps.
    """
    if path is None or not path.exists():
        return 0
    load_model(network, path)
    with safe_open(path, framework="pt") as opened:
        return int(opened.metadata()["next_step"])
