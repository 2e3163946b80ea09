"""Files that are absent, spoiled or contradictory, stacked experts, and a rank's own part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import aserve.gpu.weights.files
from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.files import INDEX, SINGLE
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import (
    WHOLE,
    ExpertPart,
    LoadProgress,
    Shard,
    Target,
    WeightSource,
)
from aserve.tiny import MODEL_DIR
from tests.gpu.weights.checkpoints import write_checkpoint, write_sharded
from tests.load_model import load_model

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

    monkeypatch.setattr(aserve.gpu.weights.files, "safe_open", on_the_cpu)
    with Checkpoint(write_checkpoint(tmp_path, A), torch.device("cuda", 1)):
        assert asked == ["cuda:1"]


@pytest.mark.gpu
def test_values_are_read_straight_to_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    with Checkpoint(write_checkpoint(tmp_path, A), device) as checkpoint:
        read = checkpoint.read("a")
    assert read.device == device
    assert torch.equal(read.cpu(), A["a"])


TWO = {"1.safetensors": A, "2.safetensors": B}


def test_shards_that_contradict_their_index_are_refused(tmp_path: Path) -> None:
    twice = {"1.safetensors": {**A, "c": torch.ones(1)}, "2.safetensors": {**A, **B}}
    said = refusal_of(write_sharded(tmp_path / "twice", twice))
    assert "tensor a is in two files, 1.safetensors and 2.safetensors" in said
    directory = write_sharded(tmp_path / "absent", TWO)
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    assert refusal_of(directory).endswith("names tensors that are not in their files: b, c")
    directory = write_sharded(tmp_path / "unlinked", TWO)
    (directory / "2.safetensors").unlink()
    assert "2.safetensors does not exist" in refusal_of(directory)


@pytest.mark.parametrize("file_name", ["../secret.safetensors", "/etc/passwd", "", 3])
def test_an_index_cannot_lead_out_of_its_directory(file_name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file_name}}))
    assert "a is said to be in" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'),
        *("[" * 100_000, '{"weight_map": {"\\ud800": "1.safetensors"}}'),
    ],
)
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


EXPERTS = "model.layers.0.mlp.experts"
PARTS = {"gate_proj": 6, "up_proj": 6}
NUM_EXPERTS = 4
COLUMNS = {"gate_proj.weight": 0, "up_proj.weight": 0, "up_proj.bias": 0, "out_proj.weight": 1}


def weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{EXPERTS}.{expert}.{part}.weight": (rows, 8)
        for expert in range(NUM_EXPERTS)
        for part, rows in PARTS.items()
    }
    shapes |= {"a.gate_proj.weight": (6, 8), "a.up_proj.weight": (4, 8)}
    shapes |= {"a.gate_proj.bias": (6,), "a.up_proj.bias": (4,)}
    shapes |= {"a.out_proj.weight": (8, 10), "a.norm.weight": (8,), "a.joined.weight": (10, 8)}
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Sources:
    """Both sources of values: a checkpoint, and random weights."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._checkpoint = stack.enter_context(Checkpoint(write_checkpoint(directory, weights())))

    def make(self, kind: str, shard: Shard = WHOLE) -> WeightSource:
        progress = LoadProgress(0, dtype=torch.float32)
        if kind == "dummy":
            return DummyWeights(Target(shard=shard), dtype=torch.float32, progress=progress)
        target = Target(shard=shard)
        return WeightReader(self._checkpoint, target, dtype=torch.float32, progress=progress)


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    with ExitStack() as stack:
        yield Sources(tmp_path, stack)


def stacked(source: WeightSource, *, count: int = NUM_EXPERTS, divisor: int = 1) -> Tensor:
    parts = {name: rows // divisor for name, rows in PARTS.items()}
    stack = source.stacked(EXPERTS, parts, count=count, in_features=8)
    assert isinstance(stack, Tensor)
    return stack


def linear(source: WeightSource, name: str, rows: int, in_features: int) -> Tensor:
    made = source.linear({name: rows}, in_features=in_features, bias=False)
    assert isinstance(made, Linear)
    return made.weight


def test_a_stack_holds_each_experts_joined_rows(sources: Sources) -> None:
    stored = weights()
    expected = [
        torch.cat([stored[f"{EXPERTS}.{expert}.{part}.weight"] for part in PARTS])
        for expert in range(NUM_EXPERTS)
    ]
    assert torch.equal(stacked(sources.make("checkpoint")), torch.stack(expected))


@pytest.mark.parametrize("kind", ["checkpoint", "dummy"])
def test_ranks_hold_slices_of_the_whole_stack(kind: str, sources: Sources) -> None:
    whole = stacked(sources.make(kind))
    for rank in range(2):
        of_experts = sources.make(kind, Shard(rank, 2, COLUMNS, experts=ExpertPart(rank, 2)))
        assert torch.equal(stacked(of_experts), whole[2 * rank : 2 * rank + 2])
        of_rows = stacked(sources.make(kind, Shard(rank, 2, COLUMNS)), divisor=2)
        gate, up = whole.split(6, dim=1)
        own = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(of_rows, torch.cat((gate[:, own], up[:, own]), dim=1))


@pytest.mark.parametrize("kind", ["checkpoint", "dummy"])
def test_ranks_hold_slices_of_whole_tensors(kind: str, sources: Sources) -> None:
    whole = sources.make(kind)
    for rank in range(2):
        source = sources.make(kind, Shard(rank, 2, COLUMNS))
        columns = slice(5 * rank, 5 * rank + 5)
        out = linear(source, "a.out_proj", 8, 5)
        assert torch.equal(out, linear(whole, "a.out_proj", 8, 10)[:, columns])
        joined = source.linear({"a.gate_proj": 3, "a.up_proj": 2}, in_features=8, bias=False)
        assert isinstance(joined, Linear)
        gate = linear(whole, "a.gate_proj", 6, 8)[3 * rank : 3 * rank + 3]
        up = linear(whole, "a.up_proj", 4, 8)[2 * rank : 2 * rank + 2]
        assert torch.equal(joined.weight, torch.cat((gate, up)))
        bias = source.tensor("a.up_proj.bias", (2,))
        assert torch.equal(bias, whole.tensor("a.up_proj.bias", (4,))[2 * rank : 2 * rank + 2])
        norm = source.tensor("a.norm.weight", (8,))
        assert torch.equal(norm, whole.tensor("a.norm.weight", (8,)))


@pytest.mark.parametrize("kind", ["checkpoint", "dummy"])
def test_ranks_hold_slices_of_each_section(kind: str, sources: Sources) -> None:
    """The sections of the tensor have 4, 4 and 2 rows."""
    shard = Shard(1, 2, {"joined.weight": 0}, sections={"joined.weight": (4, 4, 2)})
    whole = linear(sources.make(kind), "a.joined", 10, 8)
    own = linear(sources.make(kind, shard), "a.joined", 5, 8)
    assert torch.equal(own, whole[[2, 3, 6, 7, 9]])


def test_rows_of_a_layer_and_of_its_bias_are_put_in_order(sources: Sources) -> None:
    """The rows of a rank's part, joined."""
    order = torch.tensor([2, 1, 0, 4, 3])
    source = sources.make("checkpoint", Shard(1, 2, COLUMNS))
    parts = {"a.gate_proj": 3, "a.up_proj": 2}
    plain = source.linear(parts, in_features=8, bias=False)
    ordered = source.linear(parts, in_features=8, bias=False, row_order=order)
    assert isinstance(plain, Linear)
    assert isinstance(ordered, Linear)
    assert torch.equal(ordered.weight, plain.weight[order])
    own = source.linear({"a.up_proj": 2}, in_features=8, bias=True, row_order=torch.tensor([1, 0]))
    assert isinstance(own, Linear)
    assert own.bias is not None
    assert torch.equal(own.bias, source.tensor("a.up_proj.bias", (2,)).flip(0))


def test_an_inventory_expects_whole_tensors_and_counts_the_ranks_part(tmp_path: Path) -> None:
    stored = {name: x for name, x in weights().items() if EXPERTS in name or "out_proj" in name}
    shard = Shard(1, 2, {"out_proj.weight": 1}, experts=ExpertPart(1, 2))
    with Checkpoint(write_checkpoint(tmp_path, stored)) as checkpoint:
        inventory = Inventory(torch.float32, shard)
        stacked(inventory)
        inventory.linear({"a.out_proj": 8}, in_features=5, bias=False)
        check_fit(inventory, checkpoint)
        assert inventory.num_weights == 2 * 12 * 8 + 8 * 5
        unsharded = Inventory(torch.float32)
        stacked(unsharded)
        unsharded.linear({"a.out_proj": 8}, in_features=5, bias=False)
        with pytest.raises(ConfigError, match=r"out_proj\.weight is 8x10 instead of 8x5"):
            check_fit(unsharded, checkpoint)


def test_a_model_in_transformers_code_is_not_divided() -> None:
    with pytest.raises(ConfigError, match="cannot be divided among 2 devices"):
        load_model(MODEL_DIR, model_impl="transformers", target=Target(shard=Shard(0, 2)))
