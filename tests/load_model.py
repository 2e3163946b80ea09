"""A model without an executor around it, for tests that look at its numbers."""

from __future__ import annotations

from pathlib import Path

from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.weights.format import parse_dtype
from aserve.gpu.weights.source import HOST, OnProgress, Target, ignore_progress


def load_model(
    model_dir: Path,
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    load_format: str = "auto",
    model_impl: str = "auto",
    target: Target = HOST,
    on_progress: OnProgress = ignore_progress,
) -> CausalModel:
    """`load_format` "dummy" draws weights at random and needs no checkpoint.

    `on_progress` is called on this thread.
    """
    loader, _ = make_loader(model_dir, model_impl)
    return loader.load(
        LoadPlan(parse_dtype(dtype), max_model_len, load_format == "dummy", target, on_progress)
    )
