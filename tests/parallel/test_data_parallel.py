"""Data-parallel attention: ranks with rows of their own give the tokens of one rank, and no rank
waits for one that has nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.errors import BugError, ConfigError
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.parallel.collectives import collectives_of
from aserve.gpu.parallel.joint import JointDecoder, JointForward, pads_to_most
from aserve.load import load_rank
from aserve.messages.base import num_values
from aserve.messages.requests import Cancel, LoadWeights
from aserve.messages.results import StepFailed
from aserve.messages.step import ScheduleBatch
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import Coordinates, Patience, RankLost
from aserve.progress import ignore_stage
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import request, serve, serve_between
from tests.parallel.test_rank_traces import (
    FIRST_SEED,
    NUM_TRACES,
    joined,
    options_of,
    requests_of,
)
from tests.parallel.test_ranks import CROWDED, asks, loaded, resolved_of
from tools.train_models.folder import MODELS_DIR, complete_folder

TWO: dict[str, Any] = {"enable_dp_attention": True, "replicas": 2}
DEEPEP = {"expert_parallel_size": 2, "all2all_backend": "deepep_low_latency"}


def counts_of(batches: list[ScheduleBatch], num_ranks: int = 2) -> list[tuple[int, ...]]:
    """The tokens of each rank in each step."""
    counts = [num_values(batch.input_ids) for batch in batches]
    return [tuple(counts[at : at + num_ranks]) for at in range(0, len(counts), num_ranks)]


def test_tokens_are_those_of_one_rank() -> None:
    """With prefix hits, chunks, retraction and grammars, in both ways of padding."""
    one = serve(loaded(), asks())
    executor = loaded(**TWO, **{**CROWDED, "num_pages": 17})
    assert isinstance(executor, ParallelExecutor)
    assert executor.spec.dp_size == 2
    two = serve(executor, asks(), chaos=3)
    assert two.outputs == one.outputs
    assert two.reasons == one.reasons
    assert two.num_retracted > 0
    assert two.num_cached > 0
    counts = counts_of(two.batches)
    assert {pads_to_most(each) for each in counts} == {True, False}
    assert any(0 in each for each in counts)
    assert [rank.process.returncode for rank in executor.ranks] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}, DEEPEP])
def test_experts_of_all_ranks_change_no_token(options: dict[str, Any], tmp_path: Path) -> None:
    """Experts are divided each, or whole; and rows travel to them."""
    model = complete_folder(MODELS_DIR / "moe", tmp_path / "model")
    asked = asks(is_plain=True)
    one = serve(loaded(model), asked)
    assert serve(loaded(model, **TWO, **options), asked, chaos=3).outputs == one.outputs


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_TRACES))
def test_any_trace_gives_the_tokens_of_one_rank(seed: int, tmp_path: Path) -> None:
    """On three ranks, of which one has mostly nothing."""
    rng = random.Random(seed)
    options, asked = options_of(rng, ""), requests_of(rng)
    options["max_num_seqs"] += 2
    one = serve(loaded(num_pages=2000, page_size=1), asked)
    cancels = [Cancel(each.request_id, None, 0, "cancelled") for each in asked[:1]]
    resolved = resolved_of(enable_dp_attention=True, replicas=3, **options)
    three = serve(joined(resolved, tmp_path / "store"), [*asked, *cancels], chaos=seed)
    for key, outputs in one.outputs.items():
        found = three.outputs.get(key, [])
        was_cancelled = three.reasons[key] == ["cancelled"]
        assert found == outputs[: len(found)] if was_cancelled else found == outputs
    assert any(0 in each for each in counts_of(three.batches, 3))
