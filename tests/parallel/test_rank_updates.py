"""New weights and checks of weights on ranks, which are threads here: each layout answers as one
device does, and no job ends the engine. Its end leaves nothing in the event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.engine_core import LocalExecutor
from aserve.gpu.profiler import Profiler
from aserve.host.threads import in_thread
from aserve.messages.changes import CheckWeights, LoadWeights, Profile
from aserve.parallel.topology import LONG_S, Patience
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import serve_between
from tests.parallel.test_rank_traces import LAYOUTS, RankThread, joined
from tests.parallel.test_ranks import FAR, MOVING, asks, loaded, resolved_of
from tools.train_models.folder import MODELS_DIR, complete_folder

BALANCED = "ep 2, experts move"
CASES = {
    **{name: LAYOUTS[name] for name in ("tp 2", "pp 2", "dp 2", "ep 2")},
    BALANCED: ({"expert_parallel_size": 2, **MOVING}, "moe"),
}
IMPATIENT_S = 2.0
SNAPSHOT, COMPARE = CheckWeights(1, compares=False), CheckWeights(2, compares=True)


@pytest.mark.parametrize("layout", CASES)
async def test_weights_are_checked_and_replaced_on_all_ranks(layout: str, tmp_path: Path) -> None:
    """The other stages of a pipeline do not have the tensor that does not fit. Where experts move,
    there is nothing to compare."""
    options, name = CASES[layout]
    folder = complete_folder(MODELS_DIR / name, tmp_path / "model") if name else MODEL_DIR
    update = LoadWeights(1, "", (str(changed_tensors(folder, tmp_path)),))
    misfit = LoadWeights(2, "", (str(misshapen_tensor(tmp_path)),))
    one = loaded(folder)
    expected = [await first_outputs(one), await outputs_after(update, one, 2)]
    one.close()
    assert expected[0] != expected[1]
    executor = joined(resolved_of(**options), tmp_path / "store", folder)
    try:
        found = [await first_outputs(executor)]
        codes = [await code_of(executor, SNAPSHOT)]
        assert await outputs_of(executor, 2) == found[0]
        codes.append(await code_of(executor, COMPARE))
        found.append(await outputs_after(update, executor, 3))
        codes.append(await code_of(executor, COMPARE))
        assert await code_of(executor, misfit) == "invalid_checkpoint"
        assert await outputs_of(executor, 4) == found[1]
        again = await outputs_after(LoadWeights(3), executor, 5)
        assert not executor.died.done()
    finally:
        executor.close()
    assert found == expected
    assert again == found[0]
    expected_codes = [None, None, "weights_differ"]
    assert codes == (["experts_move"] * 3 if layout == BALANCED else expected_codes)


async def test_ranks_wait_for_a_profile_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch reads what it recorded on the thread that runs the steps of rank 0."""
    monkeypatch.setattr(Patience, "serve", serve_impatiently)
    monkeypatch.setattr(Profiler, "begin", lambda self, flags: hold_thread)
    executor = joined(resolved_of(tensor_parallel_size=2), tmp_path / "store")
    try:
        expected = await first_outputs(executor)
        [rank] = executor.ranks
        assert isinstance(rank, RankThread)
        profiled = asyncio.create_task(executor.run_job(Profile(1)))
        async with asyncio.timeout(20):
            assert await outputs_of(executor, 2) == expected
        assert await profiled is None
        gone = asyncio.create_task(executor.run_job(Profile(1)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert executor.patience.seconds == LONG_S, "the profile goes on"
        async with asyncio.timeout(20):
            assert await outputs_of(executor, 3) == expected
            assert await executor._profile is None
        assert await outputs_of(executor, 4) == expected
        assert rank.patience.seconds == executor.patience.seconds == IMPATIENT_S
    finally:
        executor.close()


def serve_impatiently(patience: Patience, *, has_own_rows: bool) -> None:
    patience.seconds = IMPATIENT_S


def hold_thread() -> None:
    threading.Event().wait(1.5 * IMPATIENT_S)


@pytest.mark.parametrize("in_loop", [True, False], ids=["in the loop", "in a thread"])
async def test_an_engine_that_has_closed_leaves_no_reader_in_the_loop(
    in_loop: bool, tmp_path: Path
) -> None:
    """The next engine of the loop may get a socket of the same number."""
    executor = joined(resolved_of(tensor_parallel_size=2), tmp_path / "store")
    loop = asyncio.get_running_loop()
    executor.start(loop)
    [number] = [rank.socket.fileno() for rank in executor.ranks]
    if in_loop:
        executor.close()
    else:
        await in_thread(executor.close, name="close")
    assert not loop.remove_reader(number)


async def first_outputs(executor: LocalExecutor) -> object:
    executor.start(asyncio.get_running_loop())
    await executor.warm_up()
    return await outputs_of(executor, 1)


async def outputs_after(update: LoadWeights, executor: LocalExecutor, number: int) -> object:
    assert await executor.run_job(update) is None
    return await outputs_of(executor, number)


async def outputs_of(executor: LocalExecutor, number: int) -> object:
    asked = asks(is_plain=True)[:2]
    served = await serve_between(executor, asked, first_iteration=number * FAR)
    return served.outputs


async def code_of(executor: LocalExecutor, job: CheckWeights | LoadWeights) -> str | None:
    error = await executor.run_job(job)
    return None if error is None else error.code


def changed_tensors(folder: Path, into: Path) -> Path:
    """Writes the MLPs of the model, each with another scale. No two experts are alike then."""
    [file] = folder.glob("*.safetensors")
    changed = {name: each for name, each in load_file(file).items() if "mlp" in name}
    for number, name in enumerate(changed):
        changed[name] = changed[name] * (1 + 0.5 * ((number * 7) % 5) / 5)
    save_file(changed, into / "changed.safetensors")
    return into / "changed.safetensors"


def misshapen_tensor(into: Path) -> Path:
    tensors: dict[str, Any] = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5)}
    save_file(tensors, into / "misfit.safetensors")
    return into / "misfit.safetensors"
