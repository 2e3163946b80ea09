"""The MLX executor: two steps in flight, the sampler beside torch's, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from aserve.config import Facts, Raw, resolve
from aserve.errors import ConfigError
from aserve.gpu.device.registry import OTHER_EXECUTORS
from aserve.gpu.mlx import executor as module
from aserve.gpu.mlx.build import build_mlx_executor
from aserve.gpu.mlx.decoder import MlxAttend
from aserve.load import EXECUTORS, build_options, load_executor
from aserve.messages.base import pack_i32
from aserve.messages.changes import Profile
from aserve.messages.results import StepFailed
from aserve.messages.step import Sample
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import greedy, running, tokens_of
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.mlx.hash_models import POISON, MlxHashModel
from tests.gpu.mlx.test_mlx_traces import make_mlx_executor
from tests.gpu.plain_engine import plain_outputs, plain_tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
DEADLINE_S = 30.0


class CountedModel(MlxHashModel):
    """`all_built` is set when the graphs of `num` steps are built."""

    def __init__(self, num: int) -> None:
        super().__init__(HashModel())
        self._num = num
        self.all_built = threading.Event()

    def forward(self, input_ids: mx.array, positions: mx.array, attend: MlxAttend) -> mx.array:
        hidden = super().forward(input_ids, positions, attend)
        if self.num_forwards == self._num:
            self.all_built.set()
        return hidden


async def test_eight_graphs_are_built_before_the_first_result_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for a result here before the last graph is built, so that lazy tokens alone
    carry the sequence from step to step.
    """
    model = CountedModel(8)
    waits: list[bool] = []

    def synchronize(event: Any) -> None:
        waits.append(model.all_built.wait(DEADLINE_S))
        mx.eval(event.array)

    monkeypatch.setattr(module._Computed, "synchronize", synchronize)
    async with running(make_mlx_executor(model)) as builder, asyncio.timeout(2 * DEADLINE_S):
        executor = builder.executor
        tickets = [executor.launch(builder.batch({2: PROMPT}, sampling=[2]))]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(7)]
        outputs = [token for ticket in tickets for token in tokens_of(await ticket)]
    assert waits == [True] * 8
    assert outputs == plain_outputs(HashModel(), request("plain", PROMPT))


async def test_held_rows_are_sampled_one_by_one_and_end_when_a_step_names_their_row() -> None:
    """Row 2's request ends while the row is held; row 4's waits for longer than the others."""
    prompts = {row: PROMPT[row:] for row in range(1, 5)}
    async with running(make_mlx_executor(MlxHashModel(HashModel()))) as builder:
        executor = builder.executor
        await executor.launch(builder.batch(prompts, sampling=[], held=[*prompts]))
        again = builder.batch({2: PROMPT}, sampling=[2], inits=[greedy(2)])
        tokens = {2: tokens_of(await executor.launch(again))}
        for row in (1, 3, 4):
            sample = Sample(1, pack_i32([row]), b"\xff" * 8)
            tokens[row] = tokens_of(await executor.sample(sample))
        late = await executor.sample(Sample(1, pack_i32([2]), b"\xff" * 8))
    assert isinstance(late, StepFailed)
    assert "rows [2] are sampled, but not held" in late.error.message
    plain = {row: request(str(row), prompt) for row, prompt in (prompts | {2: PROMPT}).items()}
    assert tokens == {row: plain_outputs(HashModel(), each)[:1] for row, each in plain.items()}


def test_what_a_failed_request_leaves_in_its_pages_reaches_nobody() -> None:
    """The KV of the failed request is NaN. Rows that get its pages read them behind their ends."""
    bad = request("bad", [POISON] * 14, max_tokens=1)
    good = [request(f"r{n}", PROMPT[: (9, 1)[n % 2]], max_tokens=12) for n in range(6)]
    executor = make_mlx_executor(MlxHashModel(HashModel()), page_size=16, num_pages=6, max_rows=2)
    served = serve(executor, [bad, *good])
    assert served.reasons.pop(("bad", 0)) == ["error"]
    assert served.outputs == plain_tokens(good)
    assert served.num_resyncs <= 3  # all of them for the failed request


def test_no_array_is_waited_for_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX does not lock arrays: of two threads that wait for the same one, one may never wake. Here
    the executor thread often waits, to move the log into the pools, and a step fails."""
    evaluate, waited = mx.eval, defaultdict[str, list[mx.array]](list)

    def noted(*arrays: mx.array) -> None:
        waited[threading.current_thread().name].extend(arrays)
        evaluate(*arrays)

    executor = make_mlx_executor(MlxHashModel(HashModel(), fails=(6,)))
    monkeypatch.setattr("aserve.gpu.mlx.kv.LOG_TOKENS", 7)
    monkeypatch.setattr(mx, "eval", noted)
    asked = [request(f"r{n}", PROMPT[: 3 + n], max_tokens=9) for n in range(3)]
    served = serve(executor, asked)
    assert served.outputs == plain_tokens(asked)
    assert served.num_resyncs == 1
    by_executor, by_waiter = waited["aserve-executor"], waited["aserve-waiter"]
    assert by_executor
    assert by_waiter
    assert {id(array) for array in by_executor}.isdisjoint(map(id, by_waiter))


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "raw logprobs": {"raw_logprobs": True, "repetition_penalty": 1.5, "logit_bias": ((7, 9.0),)},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.7, "temperature": 0.8},
    "filters": {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    "allowed": {"temperature": 0.7, "allowed_token_ids": (2, 3, 5, 7, 11)},
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_tokens_and_logprobs_are_those_of_torch(kind: str) -> None:
    asked = [
        request(f"r{seed}", PROMPT[: 3 + seed], seed=seed, logprobs=4, **SAMPLED[kind])
        for seed in range(5)
    ]
    torchs = serve(make_executor(HashModel()), asked)
    own = serve(make_mlx_executor(MlxHashModel(HashModel())), asked)
    assert own.outputs == torchs.outputs
    for key, logprobs in torchs.logprobs.items():
        assert own.logprobs[key] == pytest.approx(logprobs, abs=1e-5)
        assert len(own.top_logprobs[key]) == len(torchs.top_logprobs[key])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": ({"speculative_algorithm": "NGRAM"}, "without speculative decoding"),
    "adapters": ({"enable_lora": True}, "no LoRA adapters"),
    "int8": ({"quantization": "int8"}, "does not quantize weights to int8"),
    "fp8": ({"kv_cache_dtype": "fp8"}, "keeps KV in the model's dtype"),
    "attention": ({"attention_backend": "triton"}, "attention of its own, not triton"),
    "bits": ({"deterministic": True}, "cannot promise --deterministic"),
    "halves": ({"enable_two_batch_overlap": True}, "no two-batch overlap"),
    "code": ({"model_impl": "transformers"}, "native code alone"),
    "experts": ({"model": "tests/models/moe"}, "which has experts"),
    "latents": ({"model": "tests/models/mla"}, "which has"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_mlx_does_not_have_is_refused_by_its_name(what: str) -> None:
    given, says = REFUSED[what]
    given = {"model": str(MODEL_DIR), "device": "mlx", **given}
    resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))
    options = build_options(resolved, Path(given["model"]))
    with pytest.raises(ConfigError, match=says):
        build_mlx_executor(options)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.load.find_spec", lambda _name: None)
    resolved = resolve(Raw(command_line={"device": "mlx"}), Facts(default_model=str(MODEL_DIR)))
    with pytest.raises(ConfigError, match=r"pip install 'aserve\[mlx\]'"):
        load_executor(resolved, MODEL_DIR)
    assert tuple(EXECUTORS) == OTHER_EXECUTORS


async def test_jobs_of_torch_are_refused() -> None:
    executor = make_mlx_executor(MlxHashModel(HashModel()))
    error = await executor.run_job(Profile(1))
    assert error is not None
    assert "Profile is not supported with --device mlx" in error.message
