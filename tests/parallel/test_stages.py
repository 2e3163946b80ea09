"""Pipelines, each stage a process: their tokens are those of one device. A stage has its own layers
alone, and what it misses of its neighbour ends it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.errors import BugError, ConfigError
from aserve.gpu.layers.linear import Linear
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.decoder import Attention, Decoder
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.stages import StageLayers
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.parallel.stages import Pipeline, StagedDecoder, groups_of
from aserve.gpu.weights.source import HOST, Stage, Target
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import Coordinates, RankLost
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import serve
from tests.parallel.test_ranks import CROWDED, asks, loaded


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 3, "overlap_depth": 3, "speculative_algorithm": "EAGLE3"},
        {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "speculative_algorithm": "NGRAM",
        },
    ],
    ids=["three stages, the last of which drafts", "two stages of two ranks in turns, which draft"],
)
def test_tokens_are_those_of_one_device(options: dict[str, Any]) -> None:
    one = serve(loaded(), asks())
    executor = loaded(**options, **CROWDED)
    assert isinstance(executor, ParallelExecutor)
    spec = executor.spec
    # Stages that share cores take turns, unless they are told not to.
    assert (spec.depth, spec.lead) == (options.get("overlap_depth", 1), 1)
    many = serve(executor, asks(), chaos=3)
    assert many.outputs == one.outputs
    assert many.num_retracted > 0
    assert many.num_cached > 20
    assert any(batch.verify is not None for batch in many.batches)
    assert {rank.process.returncode for rank in executor.ranks} == {0}


def pipes() -> tuple[Pipe, Pipe]:
    """Of the first and the last of two stages."""
    after, before = socket.socketpair()
    return Pipe(None, after), Pipe(before, None)


def stage_of(number: int, pipe: Pipe, folder: Path = MODEL_DIR) -> StagedDecoder:
    stage = Stage(number, 2)
    loader, _ = make_loader(folder)
    model = loader.load(LoadPlan(torch.float64, target=Target(stage=stage)))
    part = Pipeline(stage, pipe).part_of(model)
    assert isinstance(part, StagedDecoder)
    return part


def test_a_stage_has_the_weights_and_the_kv_of_its_own_layers() -> None:
    first, last = (stage_of(number, pipe) for number, pipe in enumerate(pipes()))
    whole, _ = make_loader(MODEL_DIR)
    every = whole.load(LoadPlan(torch.float64, target=HOST)).layers
    assert first.layers + last.layers == every
    assert [len(group.layers) for group in groups_of(first)] == [len(first.layers)]
    part = whole.load(LoadPlan(torch.float64, target=Target(stage=Stage(1, 2))))
    assert isinstance(part, Decoder)
    sources = [weights_of(block.mixer) for block in part.blocks]
    held = {layer.index for layer in last.layers}
    assert [not each.is_meta for each in sources] == [index in held for index in range(len(every))]


def weights_of(mixer: object) -> torch.Tensor:
    assert isinstance(mixer, Attention)
    assert isinstance(mixer.qkv, Linear)
    return mixer.qkv.weight


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("model.embed_tokens.weight", [0]),
        ("model.layers.0.mlp.up_proj.weight", [0]),
        ("model.layers.2.input_layernorm.weight", [0, 1]),
        ("model.layers.2.self_attn.q_proj.weight", [1]),
        ("model.layers.4.self_attn.q_proj.weight", [2]),
        ("model.norm.weight", [2]),
        ("lm_head.weight", [2]),
    ],
)
def test_who_holds_a_weight(name: str, stages: list[int]) -> None:
    """Five layers on three stages. The norm behind a stage's last layer is part of that layer."""
    parts = [StageLayers(*ends, 5, embeds_last=False) for ends in ((0, 2), (2, 4), (4, 5))]
    assert [number for number, part in enumerate(parts) if part.holds(name)] == stages


def test_a_pipe_drops_steps_that_were_not_asked_for() -> None:
    first, last = pipes()
    for iteration in (1, 2, 3):
        first.send(iteration, torch.full((2, 3), float(iteration), dtype=torch.bfloat16))
    into = torch.empty(2, 3, dtype=torch.bfloat16)
    last.receive(3, into)
    assert into.tolist() == [[3.0] * 3] * 2


@pytest.mark.parametrize("sent", [torch.zeros(5, 3), torch.zeros(1, 3), torch.zeros(2, 3).half()])
def test_b26_hidden_states_of_another_size_are_an_error_and_no_hang(sent: torch.Tensor) -> None:
    """A stage that verifies drafts sends a row for each of them, and all stages expect as many."""
    first, last = pipes()
    first.send(4, sent)
    with pytest.raises(BugError, match="step 4"):
        last.receive(4, torch.empty(2, 3))


def test_a_neighbour_that_ends_is_noticed_at_once() -> None:
    after, before = socket.socketpair()
    first, last = Pipe(None, after), Pipe(before, None)
    after.close()
    with pytest.raises(RankLost, match="before has ended"):
        last.receive(1, torch.empty(3))
    with pytest.raises(RankLost, match="does not read"):
        first.send(1, torch.empty(3))


def test_rank_0_is_in_the_last_stage() -> None:
    places = [Coordinates(rank, 2, "store", 3) for rank in range(6)]
    assert [place.stage for place in places] == [2, 2, 1, 1, 0, 0]
    assert [place.in_stage.rank for place in places] == [0, 1] * 3
    assert len({place.in_stage.store for place in places}) == 3
    assert [place.is_last_stage for place in places] == [True, True, *[False] * 4]


def test_what_does_not_go_with_stages_is_refused() -> None:
    pipeline = Pipeline(Stage(0, 2))
    with pytest.raises(ConfigError, match="--enable-two-batch-overlap does not go with stages"):
        pipeline.target(
            HOST, beside={"--enable-two-batch-overlap": True, "--enable-hisparse": None}
        )
    loader, _ = make_loader(MODEL_DIR)
    with pytest.raises(ConfigError, match="cannot be divided among 99 stages"):
        loader.load(LoadPlan(torch.float32, target=Target(stage=Stage(0, 99))))
