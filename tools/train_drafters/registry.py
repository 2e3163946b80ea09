"""The drafters by name, and the folders that hold them."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_drafters.dflash import DFlash
from tools.train_drafters.drafter import Drafter
from tools.train_drafters.eagle import Eagle
from tools.train_drafters.eagle3 import Eagle3
from tools.train_drafters.frozen_kv import FrozenKv
from tools.train_drafters.mtp import MultiTokenPrediction
from tools.train_drafters.small_lm import SmallLm
from tools.train_tiny.export import CONFIG, WEIGHTS, write_json
from tools.train_tiny.network import Llama

# Takes the target and the ids that a reduced vocabulary has.
DRAFTERS: dict[str, Callable[[Llama, Tensor], Drafter]] = {
    "eagle": lambda target, _: Eagle(target),
    "eagle3": Eagle3,
    "mtp": lambda target, _: MultiTokenPrediction(target),
    "frozen_kv": lambda target, _: FrozenKv(target),
    "dflash": lambda target, _: DFlash(target),
    "small_lm": lambda target, _: SmallLm(target),
}
DRAFT_VOCAB_SIZE = 512


def export(drafter: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, drafter.config())
    tensors = {name: exported(tensor) for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)


def exported(tensor: Tensor) -> Tensor:
    """Weights become bfloat16; the vocabulary map of EAGLE-3 stays as it is."""
    is_weight = tensor.is_floating_point()
    return (tensor.to(torch.bfloat16) if is_weight else tensor).contiguous()


def load(name: str, target: Llama, folder: Path) -> Drafter:
    """Returns the saved drafter in float32."""
    drafter = DRAFTERS[name](target, torch.arange(DRAFT_VOCAB_SIZE))
    tensors = load_file(folder / name / WEIGHTS)
    drafter.load_state_dict(
        {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    )
    return drafter.eval()
