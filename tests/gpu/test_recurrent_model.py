"""Models with recurrent layers in the whole engine: however steps are cut, mixed, overlapped, lost
and begun anew, each row's state is that of its own tokens alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.attention.recurrent import RecurrentBackend
from aserve.gpu.build import BuildOptions, build_executor, build_on
from aserve.gpu.device.cpu import fused_decoder
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import CausalModel
from aserve.gpu.replace_weights import copies
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest, ReasoningIds
from aserve.tiny import MODEL_DIR
from aserve_kernels.cpu.decoder_forward import decoder_step
from aserve_kernels.cpu.state_space import advance_spaces
from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens
from aserve_kernels.delta_step import advance_rows
from tests.fakes.graph_device import GraphDevice
from tests.gpu.drive import captured, request, serve
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend, logits_of
from tests.parity.references import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.slow

NUM_TOKENS = 14
PROMPT_LENS = (1, 3, 30, 70, 30, 9)
OVERLAP: dict[str, Any] = {"depth": 2, "lead": 2}
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"depth": 1, "lead": 1, "max_rows": 1},
    "overlap": OVERLAP,
    "three steps ahead": {"depth": 3, "lead": 3},
    "chunks, mixed steps": {**OVERLAP, "page_size": 1, "num_pages": 500, "max_batched_tokens": 11},
    "retraction": {**OVERLAP, "page_size": 4, "num_pages": 30},
}


MAMBA = "granite-hybrid-dense"
# The others have layers with one sublayer each, and with attention beside Mamba.
MAMBAS = [MAMBA, "nemotron-h-dense", "falcon-h1-norm"]
KINDS = ["qwen3.5", "lfm2", *MAMBAS]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states of LFM2 have no matrices."""
    directory = tmp_path_factory.mktemp("recurrent")
    make_reference(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_model(folder, dtype="float64")


def asks(**options: Any) -> list[AdmitRequest]:
    draws = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=draws).tolist() for n in PROMPT_LENS]
    return [
        request(f"r{number}", prompt, max_tokens=NUM_TOKENS, **options)
        for number, prompt in enumerate(prompts)
    ]


def executor_of(folder: Path, **options: Any) -> TorchExecutor:
    settings = {"dtype": "float64", "num_pages": 60, "max_rows": 4, "debug_checks": True}
    return build_executor(BuildOptions(folder, **{**settings, **options}))


@torch.inference_mode()
def greedy(model: CausalModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """By the whole history of one sequence, token after token."""
    attend, tokens = DenseAttend(), list[int]()

    def next_of(ids: Sequence[int], first: int) -> int:
        positions = torch.arange(first, first + len(ids))
        hidden = model.forward(torch.tensor(ids), positions, attend)
        return int(model.logits(hidden[-1:]).argmax())

    given: Sequence[int] = prompt
    while len(tokens) < num_tokens:
        tokens.append(next_of(given, len(prompt) + len(tokens) - len(given)))
        given = tokens[-1:]
    return tokens


@pytest.fixture(scope="module")
def expected(model: CausalModel) -> dict[tuple[str, int], list[int]]:
    return {
        (each.request_id, 0): greedy(model, array_i32(each.prompt_ids).tolist(), NUM_TOKENS)
        for each in asks()
    }


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_each_sequence_alone(
    folder: Path, expected: dict[tuple[str, int], list[int]], way: str
) -> None:
    served = serve(executor_of(folder, **WAYS[way]), asks(), chaos=3)
    assert served.outputs == expected
    assert (served.num_retracted > 0) is (way == "retraction")
    assert served.num_cached == 0
    assert len({token for tokens in expected.values() for token in tokens}) > 20


def test_rows_that_are_retracted_at_any_time_begin_with_an_empty_state(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    served = serve(executor_of(folder, **OVERLAP), asks(), chaos=7, retract_rate=0.1)
    assert served.outputs == expected
    assert served.num_retracted > 1


def test_a_failed_step_leaves_no_trace_in_the_states(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    """The states of its rows have advanced, in some layers or in all."""
    executor = executor_of(folder, **OVERLAP)
    fail_forwards(executor, {4, 9, 10, 17})
    served = serve(executor, asks(), chaos=3)
    assert served.num_resyncs >= 3
    assert served.outputs == expected


def fail_forwards(executor: TorchExecutor, failing: set[int]) -> None:
    """These forwards, counted from 1 on, raise behind their last layer."""
    runner = executor._runner
    forward, count = runner.model.forward, 0

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            nonlocal count
            count += 1
            hidden = forward(*arguments, **options)
            if count in failing:
                raise RuntimeError("as the test wants it")
            return hidden

    model = runner.model
    runner.model = Failing()


def test_the_state_goes_back_where_the_end_of_reasoning_is_forced(
    folder: Path, model: CausalModel
) -> None:
    """The forced ids replace a token that the device has sampled, and mostly computed."""
    end_ids, limit = (7, 8), 4
    tags = ReasoningIds(opens=(), closes=(end_ids,), is_open=True, max_tokens=limit)
    asked = asks(reasoning=tags)
    served = serve(executor_of(folder, **OVERLAP), asked, chaos=3)
    for each in asked:
        prompt = array_i32(each.prompt_ids).tolist()
        before = [*greedy(model, prompt, limit), *end_ids]
        rest = greedy(model, [*prompt, *before], NUM_TOKENS - len(before))
        assert served.outputs[each.request_id, 0] == [*before, *rest]


def test_what_the_last_owner_of_a_row_left_behind_reaches_nobody(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    executor = executor_of(folder, **OVERLAP)
    backend = executor._runner._parts.attention
    assert isinstance(backend, RecurrentBackend)
    for states in backend.states.values():
        states.matrices.fill_(torch.nan)
        states.inputs.fill_(torch.nan)
    assert serve(executor, asks(), chaos=3).outputs == expected


@pytest.mark.parametrize(
    ("folder", "is_one_call"),
    [*((kind, True) for kind in KINDS), *((kind, False) for kind in MAMBAS)],
    indirect=["folder"],
)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_steps_give_the_same_tokens(
    folder: Path,
    expected: dict[tuple[str, int], list[int]],
    way: str,
    is_one_call: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that a compiled call does not run are run operator by operator, in kernels."""
    if not is_one_call:
        monkeypatch.setattr(
            "aserve.gpu.device.cpu.model_records.are_covered", lambda _blocks: False
        )
    step = Mock(side_effect=decoder_step)
    spaces = Mock(side_effect=advance_spaces)
    monkeypatch.setattr(fused_decoder, "decoder_step", step)
    monkeypatch.setattr("aserve.gpu.device.cpu.ops.advance_spaces", spaces)
    options = {"dtype": "float32", "debug_checks": False, **WAYS[way]}
    executor = executor_of(folder, **options)
    for states in executor._runner.state.recurrent.values():
        states.matrices.fill_(torch.nan)
        states.inputs.fill_(torch.nan)
    served = serve(executor, asks(), chaos=3)
    assert served.outputs == expected
    assert step.call_count == (len(served.batches) if is_one_call else 0)
    num_layers = len(executor._runner.state.recurrent)
    assert spaces.call_count == (0 if is_one_call else num_layers * len(served.batches))


def test_captured_steps_advance_the_states_as_eager_ones_do(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    device = GraphDevice()
    settings: dict[str, Any] = {**OVERLAP, "num_pages": 60, "max_rows": 4}
    build = BuildOptions(folder, dtype="float64", attention="torch-ref", **settings)
    served = serve(captured(build_on(device, build)), asks(), chaos=3)
    assert served.outputs == expected
    assert device.num_replays > 10


@pytest.mark.parametrize("folder", ["qwen3.5", MAMBA], indirect=True)
def test_kernels_of_other_devices_give_the_same_tokens(
    folder: Path, expected: dict[tuple[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of CUDA, in Triton's interpreter: decodes in kernels, and prompts in torch."""
    make_ops, calls = CpuDevice.ops, list[int]()

    def counted(tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates, /) -> Tensor:
        calls.append(len(rows.rows))
        return advance_rows(tokens, rows, states)

    def interpreted(self: CpuDevice, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        made = make_ops(self, dtype, is_deterministic=is_deterministic)
        return dataclasses.replace(made, make_advance_rows=lambda: counted)

    monkeypatch.setattr(CpuDevice, "ops", interpreted)
    executor = executor_of(folder, dtype="float32", attention="torch-ref", **OVERLAP)
    served = serve(executor, asks(), chaos=3)
    assert served.outputs == expected
    assert len(calls) > NUM_TOKENS


@pytest.mark.parametrize(
    "kind",
    [*("qwen3.5", "qwen3-next", "lfm2-moe", "granite-hybrid", "nemotron-h", "falcon-h1", "bamba")],
)
def test_new_weights_replace_those_of_recurrent_layers(kind: str, tmp_path: Path) -> None:
    reference = make_reference(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    old = load_model(tmp_path)
    before = logits_of(old, reference.prompt)
    parts = (".linear_attn.", ".conv.", ".mamba.", ".mixer.")
    weights = {
        name: 0.9 * weight if any(part in name for part in parts) else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file)
    new = load_model(tmp_path)
    for copy in list(copies(old, new)):
        copy()
    after = logits_of(old, reference.prompt)
    assert torch.equal(after, logits_of(new, reference.prompt))
    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"two_batches": True}, "--enable-two-batch-overlap"),
        ({"deterministic": True, "dtype": "float32"}, "--deterministic"),
    ],
)
def test_what_recurrent_layers_cannot_do_is_refused_at_the_start(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*recurrent layers"):
        executor_of(folder, **options)


def test_a_model_with_recurrent_layers_cannot_draft(folder: Path) -> None:
    drafts = SpecOptions("STANDALONE", draft_model_dir=folder)
    with pytest.raises(ConfigError, match="a model with recurrent layers cannot draft"):
        build_executor(BuildOptions(MODEL_DIR, speculative=drafts, num_pages=60))


def test_the_start_says_how_much_memory_the_states_take(folder: Path) -> None:
    executor = executor_of(folder)
    assert "MiB of states of recurrent layers" in executor.about
