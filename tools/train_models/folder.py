"""The folders of the members in Hugging Face format, without the tokenizer.

The tokenizer of all members is that of the bundled model: `complete_folder` makes a folder that has
both, which a server or transformers can load.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aserve.tiny import MODEL_DIR
from tools.train_models.member import Member
from tools.train_tiny.export import CONFIG, WEIGHTS, write_json
from tools.train_tiny.tokenizer import BOS, EOS, EOT, PAD

MODELS_DIR = Path(__file__).parents[2] / "tests" / "models"
FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
OF_AN_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
# These stay in float32, as in the published checkpoints.
FLOAT32 = ("e_score_correction_bias",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_member(member: Member, network: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = member.config()
    write_json(folder / CONFIG, config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": [EOS, EOT], "pad_token_id": PAD, "do_sample": False},
    )
    tensors = {
        renamed(name, member.renames): tensor for name, tensor in published_tensors(network).items()
    }
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    member.save_more(folder)


def load_member(member: Member, folder: Path) -> nn.Module:
    """Returns the saved network in float32."""
    network = member.empty()
    tensors = fused(load_file(folder / WEIGHTS))
    if member.config().get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    network.load_state_dict(
        {name: tensors[renamed(name, member.renames)].float() for name in network.state_dict()}
    )
    return network.eval()


def renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """Returns the name in the file of a tensor of the network."""
    for inside, published in renames:
        if name.startswith(inside):
            return published + name.removeprefix(inside)
    return name


def published_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors in their published names and dtypes, each expert on its own."""
    tensors: dict[str, Tensor] = {}
    for name, weight in network.state_dict().items():
        dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
        parts = split_experts(name, weight) if FUSED.fullmatch(name) else {name: weight}
        for part_name, part in parts.items():
            tensors[part_name] = (
                part.detach().to(dtype).clone(memory_format=torch.contiguous_format)
            )
    return tensors


def split_experts(name: str, stacked: Tensor) -> dict[str, Tensor]:
    """Splits the weights of all experts of a layer, as transformers 5 holds them: gate_up_proj
    [experts, 2 * intermediate, hidden] or down_proj [experts, hidden, intermediate].
    """
    prefix, kind = name.rsplit(".", 1)
    split: dict[str, Tensor] = {}
    for expert, weight in enumerate(stacked):
        if kind == "down_proj":
            split[f"{prefix}.{expert}.down_proj.weight"] = weight
            continue
        gate, up = weight.chunk(2)
        split[f"{prefix}.{expert}.gate_proj.weight"] = gate
        split[f"{prefix}.{expert}.up_proj.weight"] = up
    return split


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_experts` for all layers of a checkpoint."""
    others: dict[str, Tensor] = {}
    by_layer: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        match = OF_AN_EXPERT.fullmatch(name)
        if match is None:
            others[name] = tensor
        else:
            by_layer[match[1]][int(match[2])][match[3]] = tensor
    for prefix, by_expert in by_layer.items():
        experts = [by_expert[expert] for expert in sorted(by_expert)]
        gates_and_ups = [torch.cat((expert["gate_proj"], expert["up_proj"])) for expert in experts]
        others[f"{prefix}.gate_up_proj"] = torch.stack(gates_and_ups)
        others[f"{prefix}.down_proj"] = torch.stack([expert["down_proj"] for expert in experts])
    return others


def complete_folder(model_dir: Path, folder: Path) -> Path:
    """Fills `folder` with links to the files of a member and of the tokenizer, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {name: MODEL_DIR / name for name in TOKENIZER_FILES}
    own = {file.name: file for file in model_dir.iterdir()}
    for name, file in {**shared, **own}.items():
        (folder / name).symlink_to(file.resolve())
    return folder


def read_config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return config
