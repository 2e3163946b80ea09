"""The path from nothing to a loadable folder, in a few steps of each stage."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from aserve.tiny import MODEL_DIR
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.muon import Muon, orthogonalised
from tools.train_tiny.network import Llama, Shape
from tools.train_tiny.packing import Packer
from tools.train_tiny.recipe import FULL, QUICK, Rates
from tools.train_tiny.tokenizer import EOS, EOT, load_tokenizer
from tools.train_tiny.train import fastest_precision
from tools.train_tiny.training import Progress, Run, save_checkpoint, train


@pytest.mark.slow
def test_a_quick_training_runs_end_to_end(tmp_path: Path) -> None:
    options = ["--quick", "--precision", "float32", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.train_tiny.train", *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "chat_smalltalk" in done.stdout
    assert_equal_to_transformers(tmp_path)


def test_the_bundled_model_is_the_same_network_in_transformers() -> None:
    assert_equal_to_transformers(MODEL_DIR)


def assert_equal_to_transformers(model_dir: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ours = load_network(model_dir)
    ids = torch.tensor(
        [AutoTokenizer.from_pretrained(model_dir)("Once upon a time, 27+15=").input_ids]
    )
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.eos_token_id == [EOS, EOT]


def test_the_bundled_files_are_small_and_bfloat16() -> None:
    sizes = [path.stat().st_size for path in MODEL_DIR.iterdir()]
    assert sum(sizes) < 5_000_000
    weights = load_file(MODEL_DIR / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_cached_generation_of_padded_rows_equals_the_whole_network() -> None:
    network = load_network(MODEL_DIR)
    tokenizer = load_tokenizer(MODEL_DIR)
    prompts = [tokenizer.encode(text).ids for text in ("27+15=", "Once upon a time,", "Count: 5 6")]
    for prompt, answer in zip(prompts, generate(network, prompts, 12), strict=True):
        ids = list(prompt)
        for _ in answer:
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
        assert ids[len(prompt) :] == answer


def test_a_new_network_begins_without_any_layer_having_a_say() -> None:
    network = Llama(Shape(num_hidden_layers=2))
    ids = torch.tensor([[5, 9, 5]])
    weight = network.model.embed_tokens.weight
    expected = network.model.norm(weight[ids]) @ weight.T
    torch.testing.assert_close(network(ids), expected)


def test_a_step_of_muon_turns_all_directions_equally() -> None:
    torch.manual_seed(0)
    for shape in ((3, 64, 32), (3, 32, 64)):
        spread = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert spread.min() > 0.4
        assert spread.max() < 1.4


def test_muon_lowers_a_loss() -> None:
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([matrix], lr=0.05)
    for _ in range(40):
        loss = (matrix - torch.eye(8)).square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 1.0


def test_the_rate_warms_up_and_ends_low() -> None:
    rates = Rates(warmup_steps=10, decay_part=0.4, last_part=0.03)
    assert rates.factor(0, 0.0) == pytest.approx(0.1)
    assert rates.factor(50, 0.6) == pytest.approx(1.0)
    assert rates.factor(90, 1.0) == pytest.approx(0.03)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    recipe = replace(QUICK, stages=QUICK.stages[:1])
    network = Llama(Shape(num_hidden_layers=1))
    path = tmp_path / "run.safetensors"
    save_checkpoint(network, path, next_step=9)
    seen: list[Progress] = []
    run = Run(recipe, tokenizer, seed=0, precision=torch.float32, checkpoint=path)
    train(Llama(Shape(num_hidden_layers=1)), run, report=seen.append)
    assert [progress.step for progress in seen] == [9, 10, 11]
    assert seen[-1].num_tokens == recipe.num_tokens


def test_every_stage_of_the_recipe_fits_the_context() -> None:
    for stage in FULL.stages:
        assert stage.length <= Shape().max_position_embeddings
        Packer(load_tokenizer(MODEL_DIR), stage, seed=0)


def test_training_takes_bfloat16_only_where_the_cpu_has_instructions_for_it() -> None:
    assert fastest_precision("flags : fma avx2 f16c") == "float32"
    assert fastest_precision("flags : avx512f avx512_bf16") == "bfloat16"
    assert fastest_precision("flags : amx_tile amx_bf16") == "bfloat16"
