"""Data-parallel attention: ranks with rows of their own give the tokens of one rank, and no rank
waits for one that has nothing to do.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from torch import Tensor

from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.parallel.joint import pads_to_most
from aserve.gpu.step.ticket import StepTicket
from aserve.messages.base import array_f32, array_i32, num_values, pack_i32
from aserve.messages.changes import LoadLora, LoadWeights
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.messages.step import ScheduleBatch
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import RankLost
from aserve.tiny import MODEL_DIR
from tests.fakes.lora_adapters import write_adapter
from tests.gpu.drive import Served, request, serve, serve_between
from tests.parallel.test_rank_traces import (
    DRAFTERS,
    FIRST_SEED,
    NUM_TRACES,
    RankThread,
    joined,
    options_of,
    requests_of,
)
from tests.parallel.test_ranks import (
    CROWDED,
    FAR,
    MOVING,
    RECIPE,
    asks,
    loaded,
    pid_of,
    resolved_of,
)
from tools.train_models.folder import MODELS_DIR, complete_folder

TWO: dict[str, Any] = {"enable_dp_attention": True, "replicas": 2}
SUMMED = {"expert_parallel_size": 2, **MOVING}
MOVED = {**SUMMED, "all2all_backend": "deepep_low_latency"}


def counts_of(batches: list[ScheduleBatch], num_ranks: int = 2) -> list[tuple[int, ...]]:
    """The tokens of each rank in each step."""
    counts = [num_values(batch.input_ids) for batch in batches]
    return [tuple(counts[at : at + num_ranks]) for at in range(0, len(counts), num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}, MOVED])
def test_experts_of_all_ranks_change_no_token(options: dict[str, Any], tmp_path: Path) -> None:
    """Experts are divided each, or whole; or rows travel to experts that move."""
    model = complete_folder(MODELS_DIR / "moe", tmp_path / "model")
    asked = asks(is_plain=True)[1:]
    one = serve(loaded(model), asked)
    two = joined(resolved_of(**TWO, **options), tmp_path / "store", model)
    assert serve(two, asked, chaos=3).outputs == one.outputs


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["STANDALONE", "FROZEN_KV_MTP", "NEXTN"])
def test_drafters_of_each_rank_change_no_token(drafter: str, tmp_path: Path) -> None:
    one = serve(loaded(), asks())
    few = {**CROWDED, "num_pages": 17, "speculative_algorithm": drafter}
    resolved = resolved_of(**TWO, **few)
    two = serve(joined(resolved, tmp_path / "store"), asks(), chaos=3)
    assert two.outputs == one.outputs
    assert two.num_retracted > 0
    assert any(batch.verify is not None for batch in two.batches)


def test_adapters_of_all_ranks_change_no_token(tmp_path: Path) -> None:
    """Rows with and without an adapter run beside each other, on one rank and on both; an MLP has
    the tokens of both, in both ways of padding."""
    adapter = LoadLora(1, 1, str(write_adapter(tmp_path / "adapter", RECIPE)))
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16}
    asked = [
        msgspec.structs.replace(each, lora_slot=number % 3 % 2, namespace=str(number % 3 % 2))
        for number, each in enumerate([*asks(is_plain=True), *renamed(asks(is_plain=True))])
    ]
    executors = loaded(**options), joined(resolved_of(**TWO, **options), tmp_path / "store")
    one, two = (asyncio.run(adapted(executor, adapter, asked)) for executor in executors)
    assert two.outputs == one.outputs
    counts = counts_of(two.batches)
    assert {pads_to_most(each) for each in counts} == {True, False}
    assert any(0 in each for each in counts)


def renamed(asked: list[AdmitRequest]) -> list[AdmitRequest]:
    return [msgspec.structs.replace(each, request_id=f"again {each.request_id}") for each in asked]


async def adapted(executor: LocalExecutor, job: LoadLora, asked: list[AdmitRequest]) -> Served:
    executor.start(asyncio.get_running_loop())
    try:
        assert await executor.run_job(job) is None
        return await serve_between(executor, asked, first_iteration=1)
    finally:
        executor.close()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_TRACES))
def test_any_trace_gives_the_tokens_of_one_rank(seed: int, tmp_path: Path) -> None:
    """On three ranks, of which one has mostly nothing. A barrier that times out ends the test."""
    rng = random.Random(seed)
    options, asked = options_of(rng, DRAFTERS[seed % len(DRAFTERS)]), requests_of(rng)
    options["max_num_seqs"] += 2
    one = serve(loaded(num_pages=2000, page_size=1), asked)
    cancels = [Cancel(each.request_id, None, 0, "cancelled") for each in asked[:1]]
    resolved = resolved_of(enable_dp_attention=True, replicas=3, **options)
    executor = joined(resolved, tmp_path / "store")
    executor.patience.seconds = 20.0
    three = serve(executor, [*asked, *cancels], chaos=seed)
    for key, outputs in one.outputs.items():
        found = three.outputs.get(key, [])
        was_cancelled = three.reasons[key] == ["cancelled"]
        assert found == outputs[: len(found)] if was_cancelled else found == outputs
    assert any(0 in each for each in counts_of(three.batches, 3))


def test_a_request_that_fails_on_its_rank_ends_alone_and_no_rank_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of rank 1 fail before their first layer, and those behind them are refused."""
    resolved = resolved_of(**TWO)
    asked = [request(f"r{n}", [*range(3, 14 - n % 2)], max_tokens=9) for n in range(3)]
    one = serve(loaded(), asked)
    executor = joined(resolved, tmp_path / "store")
    executor.patience.seconds = 5.0
    [rank] = executor.ranks
    assert isinstance(rank, RankThread)
    broken = cast(TorchExecutor, rank.executor)
    rows: set[int] = set()
    step = broken._step

    def fail_at_times(batch: ScheduleBatch, ticket: StepTicket) -> None:
        rows.update(init.row for init in batch.row_inits if init.prompt_len == 10)
        if rows.intersection(array_i32(batch.rows).tolist()):
            raise RuntimeError("a product broke")
        step(batch, ticket)

    monkeypatch.setattr(broken, "_step", fail_at_times)
    two = serve(executor, asked, launches_ahead=True)
    assert two.reasons[("r1", 0)] == ["error"]
    del one.outputs[("r1", 0)]
    assert two.outputs == one.outputs
    assert two.num_resyncs > 1


@pytest.mark.parametrize(
    ("name", "lora", "experts"),
    [("", {}, {}), ("", {"enable_lora": True}, {}), ("moe", {}, SUMMED)],
    ids=["plain", "adapters", "experts move"],
)
def test_steps_that_fail_between_collectives_are_tried_again_and_no_rank_waits(
    name: str,
    lora: dict[str, Any],
    experts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every fourth step of rank 1 fails before a collective, as if an allocation did: before it
    gathers tokens or slots, or in an MLP before its sum. Where experts move, it has counted the
    tokens of that MLP by then."""
    folder = complete_folder(MODELS_DIR / name, tmp_path / "model") if name else MODEL_DIR
    asked = [request(f"r{n}", [*range(3, 14 - n % 2)], max_tokens=20) for n in range(3)]
    one = serve(loaded(folder, **lora), asked)
    executor = joined(resolved_of(**TWO, **lora, **experts), tmp_path / "store", folder)
    executor.patience.seconds = 5.0
    [rank] = executor.ranks
    assert isinstance(rank, RankThread)
    broken = cast(TorchExecutor, rank.executor)
    assert broken._joint is not None
    ranks, step = broken._joint._ranks, broken._step
    nums_entered = [5, 2, 1, 0]  # collectives of the steps that fail
    left: list[bool] = []  # one for each collective until the step fails
    numbers = itertools.count()

    def begin(batch: ScheduleBatch, ticket: StepTicket) -> None:
        if nums_entered and next(numbers) % 4 == 0:
            left.extend([True] * (nums_entered.pop() + 1))
        step(batch, ticket)

    def failing(work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def enter(x: Tensor) -> Tensor:
            if left and left.pop() and not left:
                raise RuntimeError("there is no memory")
            return work(x)

        return enter

    monkeypatch.setattr(broken, "_step", begin)
    for name in ("sum", "concat"):
        monkeypatch.setattr(ranks, name, failing(getattr(ranks, name)))
    two = serve(executor, asked, launches_ahead=True)
    assert not nums_entered
    assert two.num_resyncs == 4
    assert two.outputs == one.outputs


async def test_tokens_are_those_of_one_rank_until_a_rank_stops() -> None:
    """With prefix hits, chunks, retraction and grammars, in both ways of padding; and again after
    new weights. All in one engine, because a start takes long."""
    executor = loaded(**TWO, **{**CROWDED, "num_pages": 17})
    assert isinstance(executor, ParallelExecutor)
    assert executor.spec.dp_size == 2
    executor.start(asyncio.get_running_loop())
    try:
        await executor.warm_up()
        assert executor.patience.seconds == 60.0
        two = await serve_between(executor, asks(), first_iteration=1)
        assert await executor.run_job(LoadWeights(1)) is None
        again = await serve_between(executor, asks(), first_iteration=FAR)
        executor.patience.seconds = 0.5
        [rank] = executor.ranks
        os.kill(pid_of(rank), signal.SIGSTOP)
        stuck = asyncio.ensure_future(serve_between(executor, asks(), first_iteration=2 * FAR))
        async with asyncio.timeout(10):
            reason = await executor.died
        stuck.cancel()
    finally:
        executor.close()
    assert isinstance(reason, RankLost)
    assert "rank 1, which did not come to a collective" in str(reason)
    one = loaded()
    one.start(asyncio.get_running_loop())
    alone = await serve_between(one, asks(), first_iteration=1)
    one.close()
    assert two.outputs == again.outputs == alone.outputs
    assert two.reasons == alone.reasons
    assert two.num_retracted > 0
    assert two.num_cached > 0
    counts = counts_of(two.batches)
    assert {pads_to_most(each) for each in counts} == {True, False}
    assert any(0 in each for each in counts)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"replicas": 1}, "needs --data-parallel-size of 2 or more"),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4"),
        ({"max_num_seqs": 1}, "--max-num-seqs 1"),
        ({"enable_hisparse": True, "pipeline_parallel_size": 2}, "-size and --enable-hisparse do"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        resolved_of(**{**TWO, **options})


def test_padding_moves_the_fewest_rows() -> None:
    """Of two ranks, the largest part counts three times, and each row twice."""
    assert [pads_to_most(counts) for counts in [(4, 2), (4, 1), (1, 0)]] == [True, False, False]
    assert [pads_to_most((4, 4, other)) for other in (0, 1, 4)] == [True, True, True]
    assert not pads_to_most((4, 1, 1))


def test_scores_embeddings_and_predicted_tokens_come_from_any_rank(tmp_path: Path) -> None:
    prompt = [*range(5, 25)]
    kinds: list[dict[str, Any]] = [{"prompt_logprobs": 2}, {"embeds": True}, {"max_tokens": 16}]
    asked = [request(f"r{n}", prompt, **kinds[n % 3]) for n in range(6)]
    one = serve(loaded(), asked)
    predicted = pack_i32(one.outputs["r2", 0])
    asked[2:] = [msgspec.structs.replace(each, prediction_ids=predicted) for each in asked[2:]]
    two = serve(joined(resolved_of(**TWO, no_prefix_cache=True), tmp_path / "store"), asked)
    assert two.outputs == one.outputs
    assert any(batch.verify is not None for batch in two.batches)
    for key, embeddings in one.embeddings.items():
        assert two.embeddings[key][0] == pytest.approx(embeddings[0], abs=1e-6)
    for key, scores in one.scores.items():
        found = b"".join(each.chosen for each in two.scores[key])
        expected = b"".join(each.chosen for each in scores)
        assert array_f32(found) == pytest.approx(array_f32(expected), abs=1e-6)
    assert any(0 not in counts for counts in counts_of(two.batches))
