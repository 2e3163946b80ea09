"""Reads or draws the weights of a transformers model, and prepares its linear layers and rotary
frequencies for the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.transformers.attention import PAGED
from aserve.gpu.weights.files import listed
from aserve.gpu.weights.source import OnProgress, Target

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def prepare_linears(model: PreTrainedModel, target: Target, *, dtype: torch.dtype) -> None:
    """Replaces every plain linear layer by the device's own, as in aserve's native models."""
    for name, module in list(model.named_modules()):
        # Subclasses compute something else, and layers in another dtype need it (MoE routers).
        if type(module) is nn.Linear and module.weight.dtype == dtype:
            linear = Linear(module.weight.detach(), _detached(module.bias))
            op = target.prepare(linear, target.device, dtype=dtype)
            model.set_submodule(name, _PreparedLinear(op, module))


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


class _PreparedLinear(nn.Module):
    """Wraps a `LinearOp`. `weight` is a meta tensor, for models that look at its shape or dtype."""

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
    """Fixes rotary frequencies that depend on the length of a call to those of the whole context.

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


DUMMY_SEED = 0


def read_weights(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    plan: LoadPlan,
    *,
    model_dir: Path,
    size_bytes: int,
) -> PreTrainedModel:
    """Reads the checkpoint on the CPU. Missing, unexpected and misshapen tensors are errors."""
    try:
        with _progress(plan.on_progress, size_bytes):
            loaded: Any = kind.from_pretrained(
                str(model_dir),
                config=config,
                dtype=plan.dtype,
                attn_implementation=PAGED,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are in the report, which is an error below
                output_loading_info=True,
            )
    except (OSError, SafetensorError) as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(f"the weights in {model_dir} cannot be read: {text}") from error
    model: PreTrainedModel = loaded[0]
    report: dict[str, Iterable[object]] = loaded[1]
    complaints = [
        f"{what.removesuffix('_keys')}: {listed(map(str, names))}"
        for what, names in report.items()
        if names
    ]
    if complaints:
        text = "; ".join(complaints)
        raise ConfigError(f"the weights in {model_dir} don't fit its config: {text}")
    return model


def draw_weights(
    kind: type[PreTrainedModel], config: PreTrainedConfig, plan: LoadPlan
) -> PreTrainedModel:
    """Initialises the model on the target as the architecture does, with a fixed seed."""
    with torch.random.fork_rng(), plan.target.device:
        torch.manual_seed(DUMMY_SEED)
        model: PreTrainedModel = kind._from_config(
            config, dtype=plan.dtype, attn_implementation=PAGED
        )
    return model


@contextmanager
def _progress(on_progress: OnProgress, total_bytes: int) -> Iterator[None]:
    """Reports progress in place of transformers' own progress bar, which counts tensors."""
    from transformers.utils import logging

    def shown(_factory: object, arguments: tuple[Any, ...], _options: object) -> Iterator[Any]:
        items = list(arguments[0])
        for done, item in enumerate(items):
            on_progress(total_bytes * done // len(items), total_bytes)
            yield item

    before = logging.set_tqdm_hook(shown)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
    on_progress(total_bytes, total_bytes)
