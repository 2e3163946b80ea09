"""The weights of a model in transformers' code: read from a checkpoint, or drawn at random.

It knows no architecture: transformers does, and how each one's checkpoints are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from aserve.errors import ConfigError
from aserve.gpu.fallback.interface import PAGED
from aserve.gpu.weights.blueprint import LoadPlan
from aserve.gpu.weights.checkpoint import listed
from aserve.gpu.weights.progress import OnProgress

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DUMMY_SEED = 0


def read_weights(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    plan: LoadPlan,
    *,
    model_dir: Path,
    size_bytes: int,
) -> PreTrainedModel:
    """On the CPU. Nothing may be missing, left over or of another shape."""
    try:
        with _shown(plan.on_progress, size_bytes):
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
    found = [
        f"{what.removesuffix('_keys')}: {listed(map(str, names))}"
        for what, names in report.items()
        if names
    ]
    if found:
        raise ConfigError(f"the weights in {model_dir} don't fit its config: {'; '.join(found)}")
    return model


def draw_weights(
    kind: type[PreTrainedModel], config: PreTrainedConfig, plan: LoadPlan
) -> PreTrainedModel:
    """On the target, as the architecture itself begins; the same each time."""
    with torch.random.fork_rng(), plan.target.device:
        torch.manual_seed(DUMMY_SEED)
        model: PreTrainedModel = kind._from_config(
            config, dtype=plan.dtype, attn_implementation=PAGED
        )
    return model


@contextmanager
def _shown(on_progress: OnProgress, total_bytes: int) -> Iterator[None]:
    """Progress where transformers would show a bar of its own: there, tensors count alike."""
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
