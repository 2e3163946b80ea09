"""Tensor parallel engines, each rank a process: their tokens are those of one rank.

The death of a rank is the death of the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError, EngineDead
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.weights.source import ONE_STAGE, ExpertPart, Shard, Stage, Target
from aserve.load import load_executor
from aserve.messages.changes import CheckWeights, EngineJob, LoadLora, LoadWeights
from aserve.messages.requests import AdmitRequest
from aserve.parallel import leader
from aserve.parallel.launch import first_place
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.processes import RankProcess, spawned_rank
from aserve.parallel.topology import Coordinates, RankLost, RankUp, StartRank
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged
from tests.fakes.toy_device import TOY
from tests.gpu.drive import request, serve, serve_between
from tests.parity.picture_models import KINDS, PicturePrompt, random_picture, save_picture_model
from tests.parity.references import make_reference
from tools.train_models.folder import MODELS_DIR, complete_folder

FAR = 1000  # more steps than any of these tests takes
RECIPE = Recipe(6, rank=4, config={"rank_pattern": {"down_proj": 12}})
STORY = "One day Sam and Mia found a red boat near the lake. fox=3729\n"
PROMPTS = ["Once upon a time", STORY * 2, STORY * 2 + "They"]
# Few tokens in a step and few pages: chunks beside decodes, overlap, cache hits and retraction.
CROWDED: dict[str, Any] = {"page_size": 4, "num_pages": 21, "max_num_batched_tokens": 24}
DRAFTED = {"speculative_algorithm": "NEXTN"}  # with the modules in the model's checkpoint
MOVING = {"enable_eplb": True, "eplb_num_redundant_experts": 4, "eplb_step_interval": 5}


def resolved_of(**options: Any) -> Resolved:
    given = {"dtype": "float64", "num_pages": 60, "max_num_seqs": 4, "device": "cpu", **options}
    words = {name: str(value) for name, value in {**given, "debug_checks": "true"}.items()}
    return resolve(Raw(command_line=words), Facts(default_model=str(MODEL_DIR)))


def loaded(folder: Path = MODEL_DIR, **options: Any) -> LocalExecutor:
    return load_executor(resolved_of(**options), folder)


def pid_of(rank: RankProcess) -> int:
    assert isinstance(rank.process, subprocess.Popen)
    return rank.process.pid


def asks(*, is_plain: bool = False) -> list[AdmitRequest]:
    encode = load_tokenizer(MODEL_DIR).encode
    prompts = [[1, *encode(text, with_special=False)] for text in PROMPTS]
    greedy = [request(f"r{n}", ids, max_tokens=14) for n, ids in enumerate(prompts)]
    warm = request("warm", prompts[-1], max_tokens=12, temperature=0.8, top_p=0.9, seed=4, n=2)
    if is_plain:
        return [*greedy, warm]
    penalized = request("penalized", prompts[0], max_tokens=8, frequency_penalty=0.8, logprobs=3)
    return [*greedy, warm, penalized, request("grammar", prompts[0], max_tokens=6, grammar=TOY)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_are_those_of_one_rank(num_ranks: int) -> None:
    """With four ranks, two share each of the two KV heads."""
    one = serve(loaded(), asks())
    executor = loaded(tensor_parallel_size=num_ranks, **CROWDED)
    assert isinstance(executor, ParallelExecutor)
    assert f"on {num_ranks} ranks" in executor.about
    many = serve(executor, asks(), chaos=3)
    assert many.outputs == one.outputs
    assert many.num_retracted > 0
    assert many.num_cached > 20
    assert [rank.process.returncode for rank in executor.ranks] == [0] * (num_ranks - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "drafter"), [("", "STANDALONE"), ("moe", "NGRAM"), ("mla", "")])
def test_b13_drafters_experts_and_latents_change_no_token(
    folder: str, drafter: str, tmp_path: Path
) -> None:
    """Drafters are whole on each rank; experts and the heads of latent attention are divided."""
    model = complete_folder(MODELS_DIR / folder, tmp_path / "model") if folder else MODEL_DIR
    speculative = {"speculative_algorithm": drafter} if drafter else {}
    one = serve(loaded(model), asks(is_plain=True))
    two = serve(loaded(model, tensor_parallel_size=2, **speculative), asks(is_plain=True), chaos=3)
    assert two.outputs == one.outputs
    assert any(batch.verify is not None for batch in two.batches) is bool(drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("ernie4.5-moe", 2), ("glm4", 4), ("minimax-m2", 2), ("olmo2-biased", 2), ("olmo3", 4)],
)
def test_heads_with_norms_and_orders_of_their_own_are_divided(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    """Norms that span the heads of all ranks, and rows that are loaded in another order. With four
    ranks, two share each KV head."""
    make_reference(kind, tmp_path)
    prompts = [[5, 9, 2], list(range(40)), [*range(40), 7]]
    asked = [request(f"r{n}", ids, max_tokens=14) for n, ids in enumerate(prompts)]
    one = serve(loaded(tmp_path), asked)
    many = serve(loaded(tmp_path, tensor_parallel_size=num_ranks), asked, chaos=3)
    assert many.outputs == one.outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "options", "num_asks"),
    [
        ("moe", {"tensor_parallel_size": 4, "enable_expert_parallel": True, **MOVING}, 1),
        ("mla", {"expert_parallel_size": 2, "enable_two_batch_overlap": True, **DRAFTED}, 4),
    ],
)
def test_whole_experts_on_ranks_change_no_token(
    folder: str, options: dict[str, Any], num_asks: int, tmp_path: Path
) -> None:
    """Rows travel. The other layers are divided on four ranks, and replicated on two, where every
    rank drafts. On four, experts move after every fifth forward."""
    model = complete_folder(MODELS_DIR / folder, tmp_path / "model")
    asked = asks(is_plain=True)[:num_asks]
    one = serve(loaded(model), asked)
    executor = loaded(model, all2all_backend="deepep_low_latency", **options)
    assert isinstance(executor, ParallelExecutor)
    many = serve(executor, asked, chaos=3)
    assert many.outputs == one.outputs
    has_drafts = any(batch.verify is not None for batch in many.batches)
    assert has_drafts is ("speculative_algorithm" in options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_encodes_the_pictures(kind: str, tmp_path: Path) -> None:
    save_picture_model(kind, tmp_path)
    prompt = PicturePrompt.of(8, random_picture(2, 3), 7, kind=kind)
    asked = request("pictured", prompt.ids.tolist(), max_tokens=12)
    asked = msgspec.structs.replace(asked, pictures=prompt.pictures)
    one = serve(loaded(tmp_path), [asked])
    two = serve(loaded(tmp_path, tensor_parallel_size=2), [asked])
    assert two.outputs == one.outputs


async def test_ranks_take_adapters_and_new_weights_and_a_rank_that_stops_ends_the_engine(
    tmp_path: Path,
) -> None:
    """All in one engine, because a start takes long. A file that does not fit changes no rank."""
    adapter = write_adapter(tmp_path / "adapter", RECIPE)
    merged = write_merged(tmp_path / "merged", adapter, RECIPE)
    jobs: list[EngineJob] = [
        LoadLora(1, 1, str(adapter)),
        LoadWeights(1, str(merged)),
        LoadWeights(2),
    ]
    one = loaded(enable_lora=True, max_lora_rank=16)
    two = loaded(enable_lora=True, max_lora_rank=16, tensor_parallel_size=2)
    assert isinstance(two, ParallelExecutor)
    plain, adapted, replaced, plain_again = await outputs_after(one, jobs)
    one.close()
    assert plain == plain_again != adapted
    assert replaced != plain
    try:
        assert await outputs_after(two, jobs) == [plain, adapted, replaced, plain_again]
        assert await two.run_job(CheckWeights(3, compares=False)) is None
        assert await two.run_job(CheckWeights(4, compares=True)) is None
        assert await two.run_job(jobs[1]) is None
        differing = await two.run_job(CheckWeights(5, compares=True))
        assert differing is not None
        assert differing.code == "weights_differ"
        refused = await two.run_job(LoadLora(2, 1, str(tmp_path)))
        assert refused is not None
        assert "adapter_config.json" in refused.message
        assert not two.died.done()
        [rank] = two.ranks
        os.kill(pid_of(rank), signal.SIGSTOP)
        stuck = asyncio.ensure_future(outputs_of(two, slot=0, first_iteration=9 * FAR))
        async with asyncio.timeout(10):
            reason = await two.died
        stuck.cancel()
    finally:
        two.close()
    assert isinstance(reason, RankLost)
    assert "rank 1, which did not come to a collective in 5 s" in str(reason)
    assert rank.process.returncode == -signal.SIGKILL


async def outputs_after(executor: LocalExecutor, jobs: list[EngineJob]) -> list[object]:
    """What the executor answers at first, and after each of the jobs. Rows of an adapter's slot are
    asked after the first one."""
    executor.start(asyncio.get_running_loop())
    await executor.warm_up()
    found: list[object] = [await outputs_of(executor, slot=0, first_iteration=1)]
    for number, job in enumerate(jobs):
        assert await executor.run_job(job) is None
        first = FAR * (number + 1)
        found.append(await outputs_of(executor, slot=int(number == 0), first_iteration=first))
    return found


async def outputs_of(executor: LocalExecutor, *, slot: int, first_iteration: int) -> object:
    asked = [msgspec.structs.replace(each, lora_slot=slot) for each in asks(is_plain=True)]
    served = await serve_between(executor, asked, first_iteration=first_iteration)
    return served.outputs


def test_a_rank_that_loads_ends_with_rank_0_and_leaves_no_files(tmp_path: Path) -> None:
    """A killed rank 0 closes its sockets, and cannot remove the folder."""
    folder = tmp_path / "launch"
    folder.mkdir()
    place = Coordinates(1, 2, f"{folder}/store")
    resolved = resolved_of(tensor_parallel_size=2)
    rank = spawned_rank(StartRank(resolved, str(MODEL_DIR), os.getcwd(), place))
    rank.expect(RankUp, timeout_s=60)  # it waits for rank 0 now
    rank.close()
    assert rank.process.returncode == 0
    assert not folder.exists()


async def test_a_killed_rank_ends_the_engine_at_once() -> None:
    executor = loaded(tensor_parallel_size=2)
    assert isinstance(executor, ParallelExecutor)
    [rank] = executor.ranks
    executor.start(asyncio.get_running_loop())
    os.kill(pid_of(rank), signal.SIGKILL)
    async with asyncio.timeout(10):
        reason = await executor.died
    executor.close()
    assert isinstance(reason, EngineDead)
    assert str(reason) == "rank 1 was ended by SIGKILL"
    assert rank.process.returncode == -signal.SIGKILL


def test_a_rank_that_loads_late_is_logged_long_before_the_engine_gives_it_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    start = StartRank(resolved_of(), str(MODEL_DIR), os.getcwd(), Coordinates(1, 2))
    rank = RankProcess(start, ours, subprocess.Popen(["true"]))
    with theirs, pytest.raises(EngineDead, match="rank 1 did not answer in 1 s"):
        leader._loaded(rank, limit_s=1.0)
    rank.close()
    assert caplog.messages == ["ranks load late ranks=[1] waited_s=0 limit_s=1"]


@pytest.mark.parametrize(("option", "expected"), [(10, 60), (900, 900)])
def test_ranks_may_meet_as_late_as_they_may_load(option: int, expected: int) -> None:
    place = first_place(resolved_of(tensor_parallel_size=2, ranks_timeout=option), store="s")
    for each in (place, place.in_stage, place.among_all):
        assert each.meet_s == expected


async def test_a_rank_that_hangs_in_a_job_ends_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No step waits for it, and no request comes while weights are replaced."""
    executor = loaded(tensor_parallel_size=2, ranks_timeout=30)
    assert isinstance(executor, ParallelExecutor)
    [rank] = executor.ranks
    executor.start(asyncio.get_running_loop())
    assert executor.patience.long_s == 30
    executor.patience.long_s = 1.0
    os.kill(pid_of(rank), signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            error = await executor.run_job(LoadWeights(1))
    finally:
        executor.close()
    assert error is not None
    assert error.message == "the engine ended: rank 1 has not answered in 1 s"
    assert str(executor.died.result()) == "rank 1 has not answered in 1 s"
    assert "ranks load late ranks=[1] waited_s=0 limit_s=1" in caplog.messages


@pytest.mark.parametrize(
    ("shard", "stage"),
    [
        (Shard(0, 2), ONE_STAGE),
        (Shard(0, 2, experts=ExpertPart(0, 2)), ONE_STAGE),
        (Shard(experts=ExpertPart(0, 2)), ONE_STAGE),
        (Shard(0, 2, has_own_rows=True), ONE_STAGE),
        (Shard(), Stage(0, 2)),
    ],
    ids=[
        "tensor parallel",
        "tensor and expert parallel",
        "expert parallel",
        "data parallel",
        "pipeline parallel",
    ],
)
def test_ranks_refuse_a_diffusion_model_before_any_weight_is_read(
    shard: Shard, stage: Stage
) -> None:
    """It would be refused for its size, too, which is looked at before any weight is read."""
    loader, _ = make_loader(MODELS_DIR / "dllm")
    target = Target(memory_bytes=0, shard=shard, stage=stage)
    with pytest.raises(ConfigError, match=r"is a diffusion language model.*--enable-dp-attention"):
        loader.load(LoadPlan(torch.float32, target=target))
