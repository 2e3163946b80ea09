"""What requests got of their prompts, against one forward of each prompt alone."""

from __future__ import annotations

import numpy as np
import pytest

from aserve.gpu.models.base import CausalModel
from aserve.messages.base import array_f32, array_i32
from aserve.messages.requests import AdmitRequest
from tests.gpu.drive import Served
from tests.gpu.plain_engine import plain_embedding, plain_logprobs
from tests.stories import joined


def assert_prompt(
    model: CausalModel, asked: AdmitRequest, child: int, served: Served, *, tolerance: float = 1e-5
) -> None:
    """Scores and embedding are those of the prompt in one forward, each given once."""
    key = asked.request_id, child
    embeddings = served.embeddings.get(key, [])
    assert len(embeddings) == asked.embeds
    for embedding in embeddings:
        assert embedding == pytest.approx(plain_embedding(model, asked), abs=tolerance)
    runs = served.scores.get(key, [])
    num_top = asked.sampling.prompt_logprobs
    if num_top is None or child or len(asked.prompt_ids) == 4:
        assert not runs
        return
    run = joined(runs)
    expected = plain_logprobs(model, asked)
    token_ids = array_i32(asked.prompt_ids)[1:]
    chosen = expected[np.arange(len(expected)), token_ids]
    assert run.position == 1
    assert array_f32(run.chosen) == pytest.approx(chosen, abs=tolerance)
    ranks = 1 + (expected > chosen[:, None]).sum(axis=1)
    assert array_i32(run.ranks).tolist() == ranks.tolist()
    top_ids = np.argsort(-expected, axis=1)[:, :num_top]
    assert array_i32(run.top_ids).reshape(top_ids.shape).tolist() == top_ids.tolist()
    best = np.take_along_axis(expected, top_ids, axis=1).reshape(-1)
    assert array_f32(run.top_logprobs) == pytest.approx(best, abs=tolerance)
