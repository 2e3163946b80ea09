"""Modules of multi-token prediction under the names of their three kinds of checkpoints, in
directories of their own and in the target's. The modules are the bundled ones, renamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.config.model import parse_config, read_fields
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.spec.frozen_kv import FrozenKv
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.gpu.spec.nextn import load
from aserve.gpu.spec.nextn_model import Modules
from aserve.gpu.spec.recurrent import RecurrentChain
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter, SpecOptions
from aserve.gpu.weights.inventory import Inventory
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import request, serve
from tests.parity.dense_attend import DenseAttend

BUNDLED = DRAFTERS_DIR / "mtp"
PLAN = LoadPlan(torch.float32)
DEEPSEEK = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
QWEN = {
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "input_proj": "fc",
    "final_layernorm": "norm",
}


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return make_loader(MODEL_DIR)[0].load(PLAN)


def load_from(target: CausalModel, directory: Path, **options: Any) -> LoadedDrafter:
    spec = SpecOptions("NEXTN", draft_model_dir=directory, **options)
    return load(DraftRequest(spec, target, PLAN))


def write(
    directory: Path,
    rename: Callable[[int, str], str],
    *,
    num_modules: int = 3,
    more: Mapping[str, Tensor] | None = None,
    **fields: object,
) -> Path:
    """Writes the bundled modules with the embedding first; `rename` gets a module's number and the
    rest of a tensor's name."""
    tensors = dict(more or {})
    for name, tensor in load_file(BUNDLED / "model.safetensors").items():
        number, rest = re.fullmatch(r"model\.mtp_layers\.(\d+)\.(.*)", name).groups()  # type: ignore[union-attr]  # all have it
        if int(number) < num_modules:
            if rest.startswith("input_proj"):
                tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
            tensors[rename(int(number), rest)] = tensor.contiguous()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((BUNDLED / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return directory


def renamed(rest: str, names: Mapping[str, str]) -> str:
    part, _, kind = rest.rpartition(".")
    return f"{names[part]}.{kind}" if part in names else rest


def deepseek(number: int, rest: str) -> str:
    return f"model.layers.{6 + number}.{renamed(rest, DEEPSEEK)}"


def qwen(number: int, rest: str) -> str:
    own = renamed(rest, QWEN)
    return f"mtp.{own}" if own != rest else f"mtp.layers.0.{rest}"


def outputs(model: object, number: int) -> tuple[Tensor, Tensor]:
    """What a module returns for some tokens and hidden states, and its logits."""
    assert isinstance(model, Modules)
    module, generator = model.modules[number], torch.Generator().manual_seed(8)
    hidden = torch.randn(7, 128, generator=generator)
    got = module.forward(torch.arange(7), torch.arange(7), DenseAttend(), hidden=hidden)
    return got, module.logits(got)


def test_other_names_and_the_other_order_give_the_same_modules(
    target: CausalModel, tmp_path: Path
) -> None:
    bundled = load_from(target, BUNDLED)
    copies = {"model.layers.6.embed_tokens.weight": torch.zeros(2048, 128)}
    found = load_from(target, write(tmp_path / "deepseek", deepseek, more=copies))
    assert isinstance(bundled.drafter, MultiLayer)
    for number in range(3):
        torch.testing.assert_close(outputs(found.model, number), outputs(bundled.model, number))


def test_a_single_module_is_recurrent_and_returns_what_left_its_norm(
    target: CausalModel, tmp_path: Path
) -> None:
    found = load_from(target, write(tmp_path / "qwen", qwen, num_modules=1), num_steps=5)
    assert isinstance(found.drafter, RecurrentChain)
    assert found.drafter.max_drafts == 5
    assert load_from(target, tmp_path / "qwen", topk=2).drafter.tree is not None
    bundled = load_from(target, BUNDLED)
    assert isinstance(bundled.model, Modules)
    hidden, logits = outputs(bundled.model, 0)
    normed, same_logits = outputs(found.model, 0)
    torch.testing.assert_close(normed, bundled.model.modules[0].decoder.head_norm(hidden))
    torch.testing.assert_close(same_logits, logits)


def test_modules_lie_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    own = load_file(MODEL_DIR / "model.safetensors")
    layer = "model.layers.0."
    module = {
        f"model.layers.6.{name.removeprefix(layer)}": tensor.clone()
        for name, tensor in own.items()
        if name.startswith(layer)
    }
    ends = {
        **{f"model.layers.6.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm")},
        "model.layers.6.shared_head.norm.weight": torch.ones(128),
        "model.layers.6.eh_proj.weight": torch.eye(128, 256),
    }
    save_file({**own, **module, **ends}, tmp_path / "model.safetensors")
    config = json.loads((MODEL_DIR / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    target = make_loader(tmp_path)[0].load(PLAN)
    assert len(target.layers) == 6
    found = load(DraftRequest(SpecOptions("NEXTN"), target, PLAN, target_dir=tmp_path))
    assert isinstance(found.drafter, RecurrentChain)


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "v_head_dim": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 3,
    "index_head_dim": 6,
    "index_topk": 3,
}


def write_deepseek(path: Path, config: dict[str, Any]) -> None:
    """The layer of its module is the last one, and the module's other weights are ones."""
    (path / "config.json").write_text(json.dumps(config))
    fields = read_fields(path)
    family, inventory = FAMILIES[config["architectures"][0]], Inventory(torch.float32)
    family.build(parse_config(fields, defaults=family.defaults), inventory, max_model_len=1)
    generator = torch.Generator().manual_seed(2)
    own = {
        name: torch.randn(shape, generator=generator) for name, shape in inventory.shapes.items()
    }
    last, module = "model.layers.1.", "model.layers.2."
    layer = {
        name.replace(last, module): tensor.clone()
        for name, tensor in own.items()
        if name.startswith(last)
    }
    ends = {
        **{f"{module}{name}.weight": torch.ones(16) for name in ("enorm", "hnorm")},
        f"{module}shared_head.norm.weight": torch.ones(16),
        f"{module}eh_proj.weight": torch.eye(16, 32),
    }
    save_file({**own, **layer, **ends}, path / "model.safetensors")


@pytest.mark.parametrize("config", [DEEPSEEK_V3, DEEPSEEK_V32])
def test_a_module_of_deepseek_has_latent_attention_and_experts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """It returns what the target's last layer makes of the embeddings; that of V3.2 is sparse."""
    write_deepseek(tmp_path, config)
    target = make_loader(tmp_path)[0].load(PLAN)
    assert isinstance(target, Decoder)
    found = load(DraftRequest(SpecOptions("NEXTN"), target, PLAN, target_dir=tmp_path))
    assert isinstance(found.model, Modules)
    ids = torch.tensor([3, 17, 5, 39])
    zeros = torch.zeros(4, 16)
    got = found.model.forward(ids, torch.arange(4), DenseAttend(), hidden=zeros)
    norm = RmsNorm(torch.ones(16), eps=1e-6)
    hidden = norm(target.embeddings[ids])
    normed = target.blocks[0].before_next(hidden, zeros)[1]
    cos_sin = target.rotaries[0].at(torch.arange(4))
    made, _ = target.blocks[1](hidden, normed, cos_sin, DenseAttend())
    torch.testing.assert_close(got, norm(made))
    assert all(bool(layer.index_dim) is (config is DEEPSEEK_V32) for layer in found.model.layers)


def test_a_sparse_module_drafts_for_a_sparse_model(tmp_path: Path) -> None:
    """The drafter has index keys of its own, over the page tables of the model. Some rows are
    retracted."""
    write_deepseek(tmp_path, DEEPSEEK_V32)
    asked = [request(f"r{n}", [1 + n, 5, 9, 2 + n], max_tokens=20) for n in range(4)]
    served = [
        serve(
            build_executor(
                BuildOptions(
                    tmp_path,
                    dtype="float64",
                    page_size=4,
                    num_pages=16,
                    max_rows=4,
                    debug_checks=True,
                    speculative=SpecOptions("NEXTN", num_steps=2) if drafts else None,
                )
            ),
            asked,
        )
        for drafts in (False, True)
    ]
    assert served[1].outputs == served[0].outputs
    assert served[1].num_retracted > 0
    assert any(batch.verify is not None for batch in served[1].batches)


def test_fewer_steps_use_the_first_modules(target: CausalModel) -> None:
    found = load_from(target, BUNDLED, num_steps=2)
    assert found.drafter.max_drafts == 2
    assert found.model is not None
    assert len(found.model.layers) == 2


def test_an_assistant_without_kv_is_loaded_as_what_it_is(target: CausalModel) -> None:
    for algorithm in ("NEXTN", "EAGLE"):
        options = SpecOptions(algorithm, draft_model_dir=DRAFTERS_DIR / "frozen_kv")
        assert isinstance(
            ALGORITHMS[algorithm](DraftRequest(options, target, PLAN)).drafter, FrozenKv
        )
    options = SpecOptions("EAGLE3", draft_model_dir=DRAFTERS_DIR / "frozen_kv")
    with pytest.raises(ConfigError, match="hidden_size is 64"):
        ALGORITHMS["EAGLE3"](DraftRequest(options, target, PLAN))


def test_what_does_not_fit_is_refused(target: CausalModel, tmp_path: Path) -> None:
    experts = {"model.layers.6.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    for directory, options, message in (
        (write(tmp_path / "experts", deepseek, more=experts), {}, "experts, which are not"),
        (MODEL_DIR, {}, "has no modules of multi-token prediction"),
        (BUNDLED, {"num_steps": 4}, "has 3 modules, which draft one token each"),
        (BUNDLED, {"topk": 2}, "NEXTN drafts a chain"),
        (write(tmp_path / "wide", deepseek, hidden_size=64), {}, "hidden_size is 64"),
        (write(tmp_path / "slides", deepseek, use_sliding_window=True), {}, "see all tokens"),
        (BUNDLED, {"token_tree": "static"}, "NEXTN drafts a chain"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_from(target, directory, **options)
