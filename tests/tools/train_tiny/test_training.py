"""The path from nothing to a loadable folder, in a few steps of each stage."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from aserve.tiny import MODEL_DIR
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Llama, Shape
from tools.train_tiny.recipe import QUICK
from tools.train_tiny.tokenizer import EOS, EOT, load_tokenizer
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


def test_cached_generation_of_padded_rows_equals_the_whole_network() -> None:
    network = load_network(MODEL_DIR)
    tokenizer = load_tokenizer(MODEL_DIR)
    prompts = [tokenizer.encode(text).ids for text in ("27+15=", "Once upon a time,", "Count: 5 6")]
    for prompt, answer in zip(prompts, generate(network, prompts, 12), strict=True):
        ids = list(prompt)
        for _ in answer:
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
        assert ids[len(prompt) :] == answer


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
