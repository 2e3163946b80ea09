"""Tensor parallel engines, each rank a process: their tokens are those of one rank.

The death of a rank is the death of the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from aserve.config import Facts, Raw, resolve
from aserve.engine_core import LocalExecutor
from aserve.errors import EngineDead
from aserve.load import load_executor
from aserve.messages.requests import AdmitRequest, LoadWeights
from aserve.parallel.leader import ParallelExecutor
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.toy_device import TOY
from tests.gpu.drive import request, serve
from tools.train_models.folder import MODELS_DIR, complete_folder

STORY = "One day Sam and Mia found a red boat near the lake. fox=3729\n"
PROMPTS = ["Once upon a time", STORY * 2, STORY * 2 + "They"]
# Few tokens in a step and few pages: chunks beside decodes, overlap, cache hits and retraction.
CROWDED: dict[str, Any] = {"page_size": 4, "num_pages": 21, "max_num_batched_tokens": 24}
MOVING = {"enable_eplb": True, "eplb_num_redundant_experts": 4, "eplb_step_interval": 5}


def loaded(folder: Path = MODEL_DIR, **options: Any) -> LocalExecutor:
    given = {"dtype": "float64", "num_pages": 60, "max_num_seqs": 4, "device": "cpu", **options}
    words = {name: str(value) for name, value in {**given, "debug_checks": "true"}.items()}
    return load_executor(
        resolve(Raw(command_line=words), Facts(default_model=str(MODEL_DIR))), folder
    )


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
    ("folder", "options", "num_asks"),
    [
        ("moe", {"tensor_parallel_size": 4, "enable_expert_parallel": True, **MOVING}, 1),
        ("mla", {"expert_parallel_size": 2, "enable_two_batch_overlap": True}, 4),
    ],
)
def test_whole_experts_on_ranks_change_no_token(
    folder: str, options: dict[str, Any], num_asks: int, tmp_path: Path
) -> None:
    """Rows travel. The other layers are divided on four ranks, and replicated on two. On four,
    experts move after every fifth forward."""
    model = complete_folder(MODELS_DIR / folder, tmp_path / "model")
    asked = asks(is_plain=True)[:num_asks]
    one = serve(loaded(model), asked)
    executor = loaded(model, all2all_backend="deepep_low_latency", **options)
    assert isinstance(executor, ParallelExecutor)
    assert serve(executor, asked, chaos=3).outputs == one.outputs


async def test_the_death_of_a_rank_is_that_of_the_engine_and_new_weights_are_refused() -> None:
    executor = loaded(tensor_parallel_size=2)
    assert isinstance(executor, ParallelExecutor)
    [rank] = executor.ranks
    executor.start(asyncio.get_running_loop())
    try:
        await executor.warm_up()
        refused = await executor.run_job(LoadWeights(1, str(MODEL_DIR)))
        assert refused is not None
        assert not executor.died.done()
        os.kill(rank.process.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            reason = await executor.died
    finally:
        executor.close()
    assert isinstance(reason, EngineDead)
    assert str(reason) == "rank 1 was ended by SIGKILL"
    assert rank.process.returncode == -signal.SIGKILL
