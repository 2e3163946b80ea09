"""Models with recurrent layers on several ranks, which are threads here: tokens are those of one
rank. Each rank has the states of its own heads and channels, and each stage those of its layers.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.engine_core import LocalExecutor
from aserve.gpu.device.cpu import fused_decoder
from aserve.gpu.executor import TorchExecutor
from aserve.messages.base import array_i32
from aserve.messages.changes import EngineJob, LoadLora, LoadWeights
from aserve.messages.requests import AdmitRequest
from aserve.parallel.leader import ParallelExecutor
from aserve_kernels.cpu.decoder_forward import decoder_forward
from aserve_kernels.delta_rule import DeltaStates
from tests.fakes.lora_adapters import Recipe, write_adapter
from tests.gpu.drive import Served, request, serve, serve_between
from tests.gpu.lora.test_other_layers import TARGETS
from tests.gpu.test_recurrent_drafts import add_module
from tests.gpu.test_recurrent_model import fail_forwards
from tests.parallel.test_rank_traces import joined
from tests.parallel.test_ranks import FAR, loaded, resolved_of
from tests.parity.references import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.slow

TP_2 = {"tensor_parallel_size": 2}
PP_2 = {"pipeline_parallel_size": 2, "overlap_depth": 2}
BOTH = {**TP_2, **PP_2}
# Some of these stages have attention alone, and some have none.
PP_4 = {"pipeline_parallel_size": 4, "overlap_depth": 4}
DRAFTED = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
LOOKED_UP = {"speculative_algorithm": "NGRAM"}
SETTINGS = {"page_size": 4, "num_pages": 66, "max_num_seqs": 3}
STEM_LEN, NUM_TOKENS = 75, 12
KINDS = ("qwen3.5", "qwen3-next", "qwen3.5-moe", "lfm2", "lfm2-indexed", "lfm2-moe")
SPACES = ("granite-hybrid", "granite-hybrid-dense", "falcon-h1", "nemotron-h", "bamba")
ADAPTED = {**TARGETS, "lfm2-indexed": ("in_proj",)}

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The model of a kind; that of Qwen3.5 has a module of multi-token prediction."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("recurrent")
            make_reference(kind, made[kind])
            if kind == "qwen3.5":
                add_module(made[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def expected_of(folder_of: FolderOf) -> Callable[[str], Served]:
    """What one rank answers."""
    made: dict[str, Served] = {}

    def expected(kind: str) -> Served:
        if kind not in made:
            made[kind] = serve(loaded(folder_of(kind), **SETTINGS), asks())
        return made[kind]

    return expected


def asks() -> list[AdmitRequest]:
    """Prompts of which some begin alike."""
    draws = torch.Generator().manual_seed(7)

    def some(num_tokens: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (num_tokens,), generator=draws).tolist()

    stem = some(STEM_LEN)
    prompts = [[*stem, *some(number)] for number in (3, 9, 1, 30, 6)] + [some(5), some(23)]
    return [
        request(f"r{number}", prompt, max_tokens=NUM_TOKENS)
        for number, prompt in enumerate(prompts)
    ]


def num_read(served: Served) -> int:
    states = [batch.states for batch in served.batches if batch.states is not None]
    return sum(len(array_i32(each.read_rows)) for each in states)


def executor_of(folder: Path, store: Path, **options: Any) -> ParallelExecutor:
    return joined(resolved_of(**{**SETTINGS, **options}), store / "store", folder)


def own_of(executor: ParallelExecutor) -> TorchExecutor:
    own = executor._own
    assert isinstance(own, TorchExecutor)
    return own


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, TP_2) for kind in KINDS + SPACES),
        *((kind, PP_2) for kind in KINDS + SPACES),
        ("qwen3-next", {**TP_2, "enable_expert_parallel": True}),
        ("qwen3-next", BOTH),
        ("qwen3.5", PP_4),
        ("lfm2-indexed", PP_4),
    ],
)
def test_tokens_are_those_of_one_rank(
    kind: str,
    options: dict[str, Any],
    folder_of: FolderOf,
    expected_of: Callable[[str], Served],
    tmp_path: Path,
) -> None:
    executor = executor_of(folder_of(kind), tmp_path, **options)
    served = serve(executor, asks(), chaos=3, retract_rate=0.2)
    assert served.outputs == expected_of(kind).outputs
    assert served.num_retracted > 0
    assert num_read(served) > 0
    assert served.num_cached > 0


@pytest.mark.parametrize("options", [TP_2, PP_2, BOTH], ids=["tp 2", "pp 2", "tp 2 x pp 2"])
@pytest.mark.parametrize("drafts", [DRAFTED, LOOKED_UP], ids=["NEXTN", "NGRAM"])
def test_rejected_drafts_leave_no_trace_in_the_states_of_any_rank(
    options: dict[str, Any],
    drafts: dict[str, Any],
    folder_of: FolderOf,
    expected_of: Callable[[str], Served],
    tmp_path: Path,
) -> None:
    executor = executor_of(folder_of("qwen3.5"), tmp_path, **options, **drafts)
    served = serve(executor, asks(), chaos=3)
    assert served.outputs == expected_of("qwen3.5").outputs
    windows = [batch.verify for batch in served.batches if batch.verify is not None]
    assert any(any(array_i32(window.num_drafts)) for window in windows)


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
def test_a_failed_step_of_the_last_stage_leaves_no_trace(
    kind: str, folder_of: FolderOf, expected_of: Callable[[str], Served], tmp_path: Path
) -> None:
    """The states of the other stage have advanced."""
    executor = executor_of(folder_of(kind), tmp_path, **PP_2)
    fail_forwards(own_of(executor), {4, 9, 10, 17})
    served = serve(executor, asks(), chaos=3)
    assert served.num_resyncs >= 3
    assert served.outputs == expected_of(kind).outputs


@pytest.mark.parametrize(
    ("kind", "matrices", "num_channels"),
    [
        ("qwen3.5", (2, 8, 32), 2 * 8 + 2 * 32),
        ("qwen3-next", (2, 8, 12), 2 * 8 + 2 * 12),
        ("lfm2-indexed", (0, 0, 0), 24),
    ],
)
async def test_a_rank_has_the_states_of_its_heads_and_channels(
    kind: str,
    matrices: tuple[int, int, int],
    num_channels: int,
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    states = states_of(executor_of(folder_of(kind), tmp_path, **TP_2)).values()
    assert {each.matrices.shape[2:] for each in states} == {matrices}
    assert {each.inputs.shape[2] for each in states} == {num_channels}


@pytest.mark.parametrize(("options", "layers"), [(PP_2, [2, 3]), (PP_4, [3])])
async def test_a_stage_has_the_states_of_its_own_layers(
    options: dict[str, Any], layers: list[int], folder_of: FolderOf, tmp_path: Path
) -> None:
    """A stage without such layers has room for any number of checkpoints."""
    folder = folder_of("qwen3.5")
    executor = executor_of(folder, tmp_path, **options, num_state_checkpoints=5)
    assert executor.spec.num_checkpoints == 1 + 5
    assert [*states_of(executor)] == layers


def states_of(executor: ParallelExecutor) -> Mapping[int, DeltaStates]:
    """Closes the executor, and returns what rank 0 had, which is in the last stage."""
    executor.start(asyncio.get_running_loop())
    executor.close()
    return own_of(executor)._runner.state.recurrent


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
def test_ranks_run_steps_of_recurrent_layers_in_one_call(
    kind: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is a process, because threads cannot compile kernels at the same time."""
    options = {"dtype": "float32", "debug_checks": "false"}
    one = serve(loaded(folder_of(kind), **SETTINGS, **options), asks())
    forward = Mock(side_effect=decoder_forward)
    monkeypatch.setattr(fused_decoder, "decoder_forward", forward)
    two = serve(loaded(folder_of(kind), **SETTINGS, **TP_2, **options), asks(), chaos=3)
    assert two.outputs == one.outputs
    assert forward.call_count == len(two.batches)


@pytest.mark.parametrize("options", [TP_2, PP_2], ids=["tp 2", "pp 2"])
@pytest.mark.parametrize("kind", ADAPTED)
async def test_ranks_take_adapters_and_new_weights_of_recurrent_layers(
    kind: str, options: dict[str, Any], folder_of: FolderOf, tmp_path: Path
) -> None:
    folder, adapted = folder_of(kind), {"enable_lora": True, "max_loras": 1}
    recipe = Recipe(1, targets=ADAPTED[kind])
    adapter = write_adapter(tmp_path / "adapter", recipe, model_dir=folder)
    jobs: list[EngineJob] = [
        LoadLora(1, 1, str(adapter)),
        LoadWeights(1, "", (str(changed(folder, tmp_path)),)),
    ]
    one = await outputs_after(loaded(folder, **SETTINGS, **adapted), jobs)
    executor = executor_of(folder, tmp_path, **options, **adapted)
    assert await outputs_after(executor, jobs) == one
    plain, with_adapter, with_weights = one
    assert plain != with_adapter
    assert plain != with_weights


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
async def test_new_weights_reach_steps_in_one_call(
    kind: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    folder, options = folder_of(kind), {"dtype": "float32", "debug_checks": "false"}
    update, other = changed(folder, tmp_path), tmp_path / "other"
    shutil.copytree(folder, other)
    file = other / "model.safetensors"
    save_file({**load_file(file), **load_file(update)}, file)
    [expected] = await outputs_after(loaded(other, **SETTINGS, **options), [])
    jobs: list[EngineJob] = [LoadWeights(1, "", (str(update),))]
    before, after = await outputs_after(loaded(folder, **SETTINGS, **options), jobs)
    assert after == expected != before


def changed(folder: Path, into: Path) -> Path:
    """Writes the tensors of recurrent layers, or of attention where there are none, each element
    with a scale of its own."""
    torch.manual_seed(2)
    stored = load_file(folder / "model.safetensors")
    names = [
        name
        for name in stored
        if any(part in name for part in (".linear_attn.", ".conv.", ".mamba."))
    ] or [name for name in stored if ".self_attn." in name]
    tensors = {name: stored[name] * (1 + 0.3 * torch.rand_like(stored[name])) for name in names}
    save_file(tensors, into / "changed.safetensors")
    return into / "changed.safetensors"


async def outputs_after(executor: LocalExecutor, jobs: list[EngineJob]) -> list[object]:
    """The answers at first, and after each job: with its adapter, or with its weights."""
    executor.start(asyncio.get_running_loop())
    try:
        await executor.warm_up()
        found: list[object] = [await outputs_of(executor, 1, slot=0)]
        for number, job in enumerate(jobs, 2):
            assert await executor.run_job(job) is None
            found.append(await outputs_of(executor, number, slot=int(isinstance(job, LoadLora))))
    finally:
        executor.close()
    return found


async def outputs_of(executor: LocalExecutor, number: int, *, slot: int) -> object:
    asked = [msgspec.structs.replace(each, lora_slot=slot) for each in asks()[-3:]]
    served = await serve_between(executor, asked, first_iteration=number * FAR)
    return served.outputs
