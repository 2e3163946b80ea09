"""The small trained models: how they are trained, saved and read, and what the committed ones "
"do."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeForCausalLM,
)

from aserve.tiny import MODEL_DIR
from tools.train_models.__main__ import main
from tools.train_models.card import tensor_rows
from tools.train_models.dllm import THRESHOLD, write
from tools.train_models.dsa import attention_and_scores, layers_of, masked
from tools.train_models.expert_load import least_load
from tools.train_models.folder import (
    MODELS_DIR,
    complete_folder,
    fused,
    load_member,
    split_experts,
)
from tools.train_models.llada import BLOCK_SIZE, Llada
from tools.train_models.mla import nextn_agreement
from tools.train_models.ngram_emb import MAX_N, NUM_SPLITS, VOCAB_RATIO, NgramLlama, ngram_rows
from tools.train_models.pictures import picture
from tools.train_models.registry import MEMBERS
from tools.train_models.vl import captions, model_inputs, patches
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.evaluate import held_out_loss, held_out_rows
from tools.train_tiny.export import CONFIG, WEIGHTS
from tools.train_tiny.tokenizer import BOS, EOS, MASK, load_tokenizer

TOKENIZER = load_tokenizer(MODEL_DIR)
OF_TRANSFORMERS: dict[str, Any] = {
    "moe": Qwen3MoeForCausalLM,
    "mla": DeepseekV3ForCausalLM,
    "vl": Qwen2VLForConditionalGeneration,
    "dsa": DeepseekV32ForCausalLM,
}
COMMITTED = [name for name in MEMBERS if (MODELS_DIR / name / WEIGHTS).exists()]
MAX_BYTES = 30_000_000


@pytest.fixture(scope="module", params=MEMBERS)
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a member after two training steps."""
    output = tmp_path_factory.mktemp("quick")
    precision = ["--precision", "float32"]
    main(["train", request.param, "--quick", "--output", str(output), *precision])
    main(["measure", request.param, "--quick", "--output", str(output)])
    return output / request.param


def test_a_quick_training_writes_what_transformers_reads(quick: Path) -> None:
    ours = load_member(MEMBERS[quick.name](), quick)
    assert all(bool(weight.isfinite().all()) for weight in ours.parameters())
    if quick.name not in OF_TRANSFORMERS:
        return
    theirs = OF_TRANSFORMERS[quick.name].from_pretrained(quick, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor(held_out_rows(TOKENIZER, "story", 1))}
    if quick.name == "vl":
        inputs = picture_inputs()
    with torch.inference_mode():
        torch.testing.assert_close(
            ours(**inputs).logits, theirs(**inputs).logits, atol=1e-4, rtol=1e-4
        )


def picture_inputs() -> dict[str, torch.Tensor]:
    shown = [picture(Random(1), Split.TRAIN)]
    ids = torch.tensor([[BOS, 9, *[8] * 16, 10, 77, 78]])
    return model_inputs(ids, patches(shown), num_pictures=1)


def test_experts_are_saved_one_by_one_and_read_together() -> None:
    stacked = {
        "layer.experts.gate_up_proj": torch.randn(3, 2 * 5, 4),
        "layer.experts.down_proj": torch.randn(3, 4, 5),
    }
    split = {
        name: part
        for stack_name, stack in stacked.items()
        for name, part in split_experts(stack_name, stack).items()
    }
    gates = stacked["layer.experts.gate_up_proj"][:, :5]  # transformers has them first
    assert torch.equal(split["layer.experts.2.gate_proj.weight"], gates[2])
    again = fused(split)
    assert all(torch.equal(again[name], stack) for name, stack in stacked.items())


def test_the_rows_of_ngrams_are_those_of_the_formula() -> None:
    """Few different ids, so that texts end often."""
    ids = torch.randint(0, 6, (1, 200), generator=torch.Generator().manual_seed(0))
    assert EOS < 6
    expected = [naive_rows(ids[0].tolist(), place) for place in range(200)]
    assert ngram_rows(ids, 2048)[0].tolist() == expected


def naive_rows(ids: list[int], place: int) -> list[int]:
    rows = []
    for n in range(2, MAX_N + 1):
        for split in range(NUM_SPLITS):
            total = 0
            for back in range(n):
                if back > place or (back and ids[place - back] == EOS):
                    break
                total += ids[place - back] * 2048**back
            rows.append(total % (VOCAB_RATIO * 2048 + 2 * ((n - 2) * NUM_SPLITS + split) + 1))
    return rows


def test_the_training_of_diffusion_sees_what_decoding_sees() -> None:
    """Each noisy block, after clean ones, has the logits of a decoding step with a cache."""
    network = MEMBERS["dllm"]().build()
    assert isinstance(network, Llada)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(16, 2048, (1, 5 * BLOCK_SIZE), generator=generator)
    noisy = clean.masked_fill(torch.rand(clean.shape, generator=generator) < 0.5, MASK)
    with torch.inference_mode():
        trained = network.denoised(noisy, clean)
        cache = None
        for start in range(0, clean.shape[1], BLOCK_SIZE):
            block = slice(start, start + BLOCK_SIZE)
            decoded, _ = network(noisy[:, block], cache)
            torch.testing.assert_close(decoded, trained[:, block], atol=1e-4, rtol=1e-4)
            cache = network(clean[:, block], cache)[1]


def test_the_indexer_is_trained_on_the_scores_that_transformers_takes() -> None:
    network = MEMBERS["dsa"]().build()
    ids = torch.tensor(held_out_rows(TOKENIZER, "recall", 1))[:, :120]
    taken: list[torch.Tensor] = []
    handles = [
        layer.self_attn.indexer.register_forward_hook(lambda _, __, out: taken.append(out))
        for layer in layers_of(network)
    ]
    scores = [scores for _, scores in attention_and_scores(network, ids)]
    for chosen, layer_scores in zip(taken, scores, strict=True):
        best = masked(layer_scores).topk(chosen.shape[-1], dim=-1).indices
        assert torch.equal(best[:, -1, :8], chosen[:, -1, :8].long())
    for handle in handles:
        handle.remove()


def test_a_model_and_its_tokenizer_share_a_folder(tmp_path: Path) -> None:
    folder = complete_folder(MODEL_DIR, tmp_path)
    assert AutoTokenizer.from_pretrained(folder)("A time").input_ids[0] == BOS


def test_the_committed_models_are_small() -> None:
    sizes = [file.stat().st_size for file in MODELS_DIR.rglob("*") if file.is_file()]
    assert COMMITTED
    assert sum(sizes) <= MAX_BYTES


@pytest.fixture(scope="module", params=COMMITTED)
def committed(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, load_member(MEMBERS[request.param](), MODELS_DIR / request.param)


def test_a_card_describes_the_files(committed: tuple[str, nn.Module]) -> None:
    name, network = committed
    folder = MODELS_DIR / name
    card = (folder / "README.md").read_text()
    assert json.loads((folder / CONFIG).read_text()) == MEMBERS[name]().config()
    assert all(row in card for row in tensor_rows(folder / WEIGHTS))
    assert f"{sum(weight.numel() for weight in network.parameters()):,} parameters" in card


@pytest.mark.slow
def test_a_committed_model_does_what_it_is_for(committed: tuple[str, nn.Module]) -> None:
    name, network = committed
    match name:
        case "moe":
            assert least_load(network, TOKENIZER, num_experts=8) >= 0.03
        case "mla":
            assert least_load(network, TOKENIZER, num_experts=8) >= 0.03
            assert nextn_agreement(network, TOKENIZER) >= 0.8
        case "ngram_emb":
            assert isinstance(network, NgramLlama)
            own, late = (
                held_out_loss(logits_of, TOKENIZER, kind="story", num_documents=4)
                for logits_of in (
                    network,
                    lambda ids: network.with_ngrams(ids, ids.roll(1, dims=1)),
                )
            )
            assert own < late / 2
        case "dllm":
            assert isinstance(network, Llada)
            prompt = held_out_rows(TOKENIZER, "story", 1)[0][:24]
            written = write(network, prompt, threshold=THRESHOLD, max_tokens=80)
            assert len(written.ids) >= 2 * written.num_forwards
        case "vl":
            rng = Random("captions")
            shown = [picture(rng, Split.HELD_OUT) for _ in range(20)]
            exact = sum(
                text == item.caption
                for text, item in zip(captions(network, TOKENIZER, shown), shown, strict=True)
            )
            assert exact >= 19
