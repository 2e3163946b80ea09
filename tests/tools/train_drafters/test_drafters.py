"""The drafters: what they are trained on is what they draft from, and how they are saved."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaForCausalLM,
)

from aserve.tiny import MODEL_DIR
from tools.train_drafters.dflash import BLOCK_SIZE, DFlash
from tools.train_drafters.drafter import STEP_DECAY, Drafter, chain_loss
from tools.train_drafters.eagle import Eagle
from tools.train_drafters.eagle3 import Eagle3
from tools.train_drafters.frozen_kv import FrozenHeads, FrozenKv
from tools.train_drafters.mtp import MultiTokenPrediction
from tools.train_drafters.oracle import first_rows
from tools.train_drafters.registry import DRAFT_VOCAB_SIZE, DRAFTERS, export, load
from tools.train_drafters.small_lm import SmallLm
from tools.train_drafters.target import TargetStates, target_states
from tools.train_drafters.texts import Text, padded
from tools.train_drafters.training import weights_of_rows
from tools.train_tiny.export import load_network
from tools.train_tiny.network import Llama

LENGTH = 23
EVERY_THIRD = torch.arange(0, 3 * DRAFT_VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_network(MODEL_DIR).requires_grad_(False)


def random_drafter(name: str, target: Llama) -> Drafter:
    """No weight is zero, so that every input counts."""
    torch.manual_seed(7)
    drafter = DRAFTERS[name](target, EVERY_THIRD)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape) * (weight.std(correction=0) + 0.2))
    return drafter.eval()


def trained_logits(drafter: Drafter, seen: TargetStates) -> list[Tensor]:
    """The logits of each step of a chain, as the loss sees them, over the target's ids."""
    match drafter:
        case Eagle():
            return [seen.head(hidden) for hidden in drafter.unrolled_features(seen)]
        case Eagle3():
            wide = torch.full((*seen.ids.shape, seen.logits.shape[-1]), -torch.inf)
            ids = drafter.target_ids(torch.arange(DRAFT_VOCAB_SIZE))
            steps = drafter.unrolled_logits(seen)
            return [wide[:, : logits.shape[1]].index_copy(-1, ids, logits) for logits in steps]
        case MultiTokenPrediction():
            return list(drafter.module_logits(seen))
        case FrozenKv():
            return list(drafter.unrolled_logits(seen))
        case SmallLm():
            logits = drafter(seen.ids)
            return [logits[:, 1 + step :] for step in range(drafter.num_drafts)]
    raise AssertionError(drafter)


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "dflash"])
def test_a_chain_drafts_what_its_unrolled_training_predicts(
    target: Llama, name: str, seed: int
) -> None:
    drafter = random_drafter(name, target)
    ids = torch.randint(16, 2048, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    bonus = 77
    drafts = drafter.draft(target_states(target, ids), bonus, drafter.num_drafts)
    # The training sees the same ids, and the target's states of those after the bonus as well.
    text = torch.cat((ids, torch.tensor([[bonus, *drafts, 5, 5]])), dim=1)
    seen = target_states(target, text)
    last_rows = [logits[0, LENGTH - 1] for logits in trained_logits(drafter, seen)]
    assert [int(logits.argmax()) for logits in last_rows] == drafts
    # These states are of ids that are not committed when the drafts are made.
    other = spoilt_after(seen, LENGTH)
    for logits, same in zip(trained_logits(drafter, other), last_rows, strict=True):
        torch.testing.assert_close(logits[0, LENGTH - 1], same)


def spoilt_after(seen: TargetStates, length: int) -> TargetStates:
    row = torch.arange(seen.ids.shape[1])
    late = (row >= length)[:, None] * 3.0
    return replace(
        seen,
        residuals=tuple(residual + late for residual in seen.residuals),
        normed=seen.normed + late,
        last_keys=seen.last_keys + late,
        last_values=seen.last_values + late,
    )


@torch.inference_mode()
def test_a_block_drafts_what_its_training_predicts(target: Llama) -> None:
    drafter = random_drafter("dflash", target)
    assert isinstance(drafter, DFlash)
    ids = torch.randint(16, 2048, (1, 40), generator=torch.Generator().manual_seed(3))
    seen = target_states(target, ids)
    committed = first_rows(seen, LENGTH)
    trained = drafter.block_logits(seen, torch.tensor([30, 5, LENGTH]))[0, 2]
    drafted = drafter.block_logits(committed, torch.tensor([LENGTH]), ids=ids[:, LENGTH, None])
    torch.testing.assert_close(drafted[0, 0], trained)
    bonus = int(ids[0, LENGTH])
    drafts = drafter.draft(committed, bonus, BLOCK_SIZE - 1)
    assert drafts == trained.argmax(dim=-1).tolist()
    assert drafter.draft(committed, bonus, 4) == drafts[:4]
    another = drafter.block_logits(committed, torch.tensor([LENGTH]), ids=torch.tensor([[5]]))
    assert ((another - drafted).abs().amax(dim=-1) > 0.01).all()  # every row sees the first id


def test_a_block_sees_the_ids_before_its_anchor_at_their_positions(target: Llama) -> None:
    drafter = random_drafter("dflash", target)
    assert isinstance(drafter, DFlash)
    blocks = drafter.blocks_at(torch.tensor([5, 2]), context_len=9)
    places = torch.tensor([*range(5, 5 + BLOCK_SIZE), *range(2, 2 + BLOCK_SIZE)])
    assert torch.equal(blocks.block_rotation[0], drafter.cos[places])
    assert torch.equal(blocks.context_rotation[1], drafter.sin[:9])
    assert blocks.visible.sum(dim=1).tolist() == [5] * BLOCK_SIZE + [2] * BLOCK_SIZE
    assert blocks.visible[:, :2].all()


def test_a_step_of_a_chain_learns_the_rows_of_its_ids() -> None:
    """Only the generated ids, 3 and 4, are learnt: by rows 2 and 3 of the target's logits."""
    weights = weights_of_rows(padded([Text([9, 9, 9, 1, 1], prompt_len=3)]))
    assert weights.tolist() == [[0, 0, 1, 1, 0]]
    labels = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0))
    steps = [torch.zeros(1, 4, 7), torch.zeros(1, 3, 7)]
    steps[0][0, 1:3] = labels[0, 2:4]  # rows 1 and 2 draft ids 3 and 4 after ids 2 and 3
    steps[1][0, 0:2] = labels[0, 2:4]
    entropy = torch.distributions.Categorical(logits=labels[0, 2:4]).entropy().mean()
    torch.testing.assert_close(chain_loss(steps, labels, weights), entropy * (1 + STEP_DECAY))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_loss_reaches_every_weight_and_counts_no_other_rows(target: Llama, name: str) -> None:
    drafter = random_drafter(name, target)
    ids = torch.randint(16, 2048, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    weights = torch.ones(2, LENGTH)
    weights[1] = 0
    torch.manual_seed(0)
    loss = drafter.loss(target_states(target, ids), weights)
    torch.autograd.backward(loss)
    for weight_name, weight in drafter.named_parameters():
        assert weight.grad is not None, weight_name
        assert weight.grad.abs().max() > 0, weight_name
    ids[1] = 9
    torch.manual_seed(0)
    torch.testing.assert_close(drafter.loss(target_states(target, ids), weights), loss)


ATTENTION = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (128, 128)}
WIDE = {"q_proj": (128, 256), "k_proj": (64, 256), "v_proj": (64, 256), "o_proj": (128, 128)}


def layer(
    prefix: str, attention: Mapping[str, tuple[int, ...]], *norms: str, width: int = 256
) -> dict[str, object]:
    mlp = {"gate_proj": (width, 128), "up_proj": (width, 128), "down_proj": (128, width)}
    names: dict[str, object] = {
        f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()
    }
    names |= {f"{prefix}.mlp.{name}.weight": shape for name, shape in mlp.items()}
    return names | {f"{prefix}.{norm}.weight": (128,) for norm in norms}


NORMS = ("input_layernorm", "post_attention_layernorm")
MTP_NORMS = (*NORMS, "token_layernorm", "hidden_layernorm", "final_layernorm")
QK_NORMS: dict[str, tuple[int, ...]] = {"q_norm": (64,), "k_norm": (64,)}
# The names and shapes of published checkpoints (yuhuili/EAGLE*, MiMo, z-lab/DFlash), for a target
# of hidden size 128 and drafters of two heads of 64.
TENSORS: dict[str, dict[str, object]] = {
    "eagle": {
        "fc.weight": (128, 256),
        "fc.bias": (128,),
        **layer("layers.0", ATTENTION, "post_attention_layernorm"),
    },
    "eagle3": {
        "fc.weight": (128, 384),
        "norm.weight": (128,),
        "lm_head.weight": (512, 128),
        "d2t": (512,),
        "t2d": (2048,),
        **layer("midlayer", WIDE, *NORMS, "hidden_norm", width=128),
    },
    "mtp": {
        name: shape
        for index in range(3)
        for name, shape in {
            **layer(f"model.mtp_layers.{index}", ATTENTION, *MTP_NORMS),
            f"model.mtp_layers.{index}.input_proj.weight": (128, 256),
            f"model.mtp_layers.{index}.self_attn.q_proj.bias": (128,),
            f"model.mtp_layers.{index}.self_attn.k_proj.bias": (64,),
            f"model.mtp_layers.{index}.self_attn.v_proj.bias": (64,),
        }.items()
    },
    "dflash": {
        "fc.weight": (128, 384),
        "hidden_norm.weight": (128,),
        "norm.weight": (128,),
        **layer("layers.0", ATTENTION | QK_NORMS, *NORMS),
        **layer("layers.1", ATTENTION | QK_NORMS, *NORMS),
    },
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_drafter_is_saved_in_published_names(target: Llama, name: str, tmp_path: Path) -> None:
    drafter = random_drafter(name, target)
    export(drafter, tmp_path / name)
    tensors = load_file(tmp_path / name / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == TENSORS[name]
    weights = [tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
    loaded = load(name, target, tmp_path).state_dict()
    for key, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded[key], tensor, rtol=0.01, atol=0, msg=key)


def test_the_vocabulary_map_holds_offsets(target: Llama, tmp_path: Path) -> None:
    export(random_drafter("eagle3", target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (torch.arange(DRAFT_VOCAB_SIZE) + tensors["d2t"]).equal(EVERY_THIRD)
    assert tensors["t2d"].nonzero()[:, 0].equal(EVERY_THIRD)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT_VOCAB_SIZE


@torch.inference_mode()
def test_the_small_model_is_transformers_llama(target: Llama, tmp_path: Path) -> None:
    export(random_drafter("small_lm", target), tmp_path / "small_lm")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "small_lm", dtype=torch.float32).eval()
    ids = torch.arange(20, 20 + LENGTH)[None]
    ours = load("small_lm", target, tmp_path)(ids)
    torch.testing.assert_close(ours, theirs(ids).logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_frozen_drafter_is_the_assistant_of_transformers(
    target: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Version 5.23 refuses every model whose layers all share KV, which is what an assistant is.
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", ["reuse", "reuse"])
    export(random_drafter("frozen_kv", target), tmp_path / "frozen_kv")
    loading: Any = Gemma4AssistantForCausalLM.from_pretrained(
        tmp_path / "frozen_kv", dtype=torch.float32, output_loading_info=True
    )
    theirs, report = loading
    assert not any(report.values()), report
    ours = load("frozen_kv", target, tmp_path)
    assert isinstance(ours, FrozenKv)
    seen = target_states(target, torch.arange(20, 20 + LENGTH)[None])
    heads = FrozenHeads(
        keys=seen.last_keys,
        values=seen.last_values,
        cos=ours.cos[LENGTH - 1 : LENGTH],
        sin=ours.sin[LENGTH - 1 : LENGTH],
    )
    embedded, hidden = seen.embed(torch.tensor([[70]])), seen.normed[:, -1:]
    logits, projected = ours.step(embedded, hidden, heads)
    kv = (seen.last_keys, seen.last_values)
    answer = theirs.eval()(
        inputs_embeds=torch.cat((embedded * 128**0.5, hidden), dim=-1),
        position_ids=torch.tensor([[LENGTH - 1]]),
        shared_kv_states={"full_attention": kv, "sliding_attention": kv},
    )
    torch.testing.assert_close(logits, answer.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(projected, answer.last_hidden_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_transformers_reads_the_config(target: Llama, name: str, tmp_path: Path) -> None:
    """But for MiMo, whose model type only its own code knows."""
    drafter = random_drafter(name, target)
    export(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if name == "mtp":
        config["model_type"] = "qwen2"
        (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == config["architectures"]
    text = read.get_text_config()
    assert (text.vocab_size, text.head_dim, text.num_hidden_layers) == (
        2048,
        64,
        config.get("text_config", config)["num_hidden_layers"],
    )
