"""Files that are not there, spoiled, or contradict one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import aserve.gpu.weights.checkpoint
from aserve.errors import ConfigError
from aserve.gpu.weights.checkpoint import INDEX, SINGLE, Checkpoint
from tests.gpu.weights.checkpoints import write_checkpoint, write_sharded

A = {"a": torch.ones(2, 3)}
B = {"b": torch.zeros(4, dtype=torch.bfloat16)}


def refusal_of(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught, Checkpoint(directory):
        pass
    return str(caught.value)


def test_files_are_opened_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def on_the_cpu(path: Path, *, framework: str, device: str) -> object:
        asked.append(device)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(aserve.gpu.weights.checkpoint, "safe_open", on_the_cpu)
    with Checkpoint(write_checkpoint(tmp_path, A), torch.device("cuda", 1)):
        assert asked == ["cuda:1"]


@pytest.mark.gpu
def test_values_are_read_straight_to_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    with Checkpoint(write_checkpoint(tmp_path, A), device) as checkpoint:
        read = checkpoint.read("a")
    assert read.device == device
    assert torch.equal(read.cpu(), A["a"])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    first = {**A, "c": torch.ones(1)}
    directory = write_sharded(tmp_path, {"1.safetensors": first, "2.safetensors": {**A, **B}})
    assert "tensor a is in two files, 1.safetensors and 2.safetensors" in refusal_of(directory)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path, {"1.safetensors": A, "2.safetensors": B})
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    assert refusal_of(directory).endswith("names tensors that are not in their files: b, c")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path, {"1.safetensors": A, "2.safetensors": B})
    (directory / "2.safetensors").unlink()
    assert "2.safetensors does not exist" in refusal_of(directory)


@pytest.mark.parametrize("file_name", ["../secret.safetensors", "/etc/passwd", "", 3])
def test_an_index_cannot_lead_out_of_its_directory(file_name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file_name}}))
    assert "a is said to be in" in refusal_of(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_spoiled_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal_of(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, A) / SINGLE
    file.write_bytes(file.read_bytes()[:-4])
    assert f"{file} is not a readable safetensors file" in refusal_of(tmp_path)


def test_pickled_weights_are_not_read_but_explained(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    message = refusal_of(tmp_path)
    assert "has no model.safetensors and no model.safetensors.index.json" in message
    assert "pytorch_model.bin is in a format that is not read" in message
