"""The MLX executor under the real scheduler, on the random traces of torch's executor: each request
gets the tokens of the plain engine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from aserve.gpu.build import BuildOptions
from aserve.gpu.mlx.build import assemble_mlx
from aserve.gpu.mlx.executor import MlxExecutor
from tests.fakes.hash_model import HashModel
from tests.gpu.mlx.hash_models import MlxHashModel
from tests.gpu.test_traces import Trace, assert_plain, serve_trace, traces

SMALL = {"page_size": 4, "num_pages": 65, "max_rows": 5, "max_batched_tokens": 64}


def make_mlx_executor(model: MlxHashModel, **options: Any) -> MlxExecutor:
    build = BuildOptions(Path("of-no-model"), **{**SMALL, **options})
    return assemble_mlx(model, build, about="float64")


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of new KV is moved into the pools every other step or so."""
    monkeypatch.setattr("aserve.gpu.mlx.kv.LOG_TOKENS", 7)


@pytest.mark.slow
@pytest.mark.usefixtures("short_log")
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(traces().filter(lambda trace: not trace.is_latent))
def test_any_trace_gives_the_tokens_of_the_plain_engine(trace: Trace) -> None:
    trace = dataclasses.replace(trace, mode="plain", id_window=1)  # MLX has no n-gram embeddings
    plain = HashModel(window=trace.window, second_window=trace.second_window)
    model = MlxHashModel(plain, trace.fails, is_unsound=trace.is_unsound)
    assert_plain(trace, serve_trace(make_mlx_executor(model, **trace.options), trace))
