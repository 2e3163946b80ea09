"""The first layer of the small mixture of experts, quantized as a checkpoint and widened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.architecture.source import ROOT
from tests.gpu.weights.checkpoints import write_checkpoint

MODEL = ROOT / "tests" / "models" / "moe"
EXPERTS = "model.layers.0.mlp.experts"
HIDDEN, SIZE, COUNT = 128, 96, 8
PARTS = {"gate_proj": SIZE, "up_proj": SIZE}


def write_mixtures(folder: Path, quantize: Any, config: Mapping[str, object]) -> tuple[Path, Path]:
    """Writes the layer with all its linear layers but the router quantized, by a function of
    published.py, and with the weights that these stand for."""
    loaded = load_file(MODEL / "model.safetensors")
    meant = {
        name: weight.float()
        for name, weight in loaded.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    stored, generator = dict(meant), torch.Generator().manual_seed(1)
    for name in [name for name in meant if "_proj.weight" in name]:
        layer, values = name.removesuffix(".weight"), meant[name]
        del stored[name]
        for suffix, tensor in quantize(values, generator):
            if suffix:
                stored[f"{layer}.{suffix}"] = tensor
            else:
                meant[name] = tensor
    fields = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    own = write_checkpoint(folder / "own", stored, **fields, quantization_config=config)
    return own, write_checkpoint(folder / "wide", meant, **fields)
