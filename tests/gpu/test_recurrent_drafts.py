"""Speculation on models with recurrent layers: whatever is drafted, and however much of it is
rejected, each row's states are those of its accepted tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor, build_on
from aserve.gpu.device.cpu import fused_decoder
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.spec.nextn import load
from aserve.gpu.spec.nextn_model import Modules
from aserve.gpu.spec.request import DraftRequest, SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve_kernels.cpu.decoder_forward import decoder_step
from tests.fakes.drafters import Stumbling, speculative
from tests.fakes.graph_device import GraphDevice
from tests.gpu.drive import captured, request, serve
from tests.gpu.test_recurrent_model import MAMBAS, fail_forwards
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend
from tests.parity.references import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.slow

PROMPT_LENS = (1, 3, 30, 70, 30, 9)
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
SETTINGS: dict[str, Any] = {"dtype": "float64", "num_pages": 60, "max_rows": 4}
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"depth": 1, "lead": 1},
    "overlap": {"depth": 2, "lead": 2},
    "chunks, mixed steps": {"page_size": 1, "num_pages": 600, "max_batched_tokens": 23},
    "retraction": {"page_size": 4, "num_pages": 29},
}
NUM_DRAFTS = 3
PLAN = LoadPlan(torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a module of multi-token prediction in its checkpoint."""
    directory = tmp_path_factory.mktemp("drafted")
    make_reference("qwen3.5", directory)
    add_module(directory)
    return directory


def add_module(directory: Path) -> Mapping[str, Tensor]:
    """Its layer is a copy of the model's last layer with attention."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.{last_attention(directory)}."
    size = len(tensors[f"{prefix}input_layernorm.weight"])
    torch.manual_seed(3)
    module = {
        "mtp.fc.weight": 0.2 * torch.randn(size, 2 * size),
        **{f"mtp.{name}.weight": 0.3 * torch.randn(size) for name in NORMS},
        **{
            f"mtp.layers.0.{name.removeprefix(prefix)}": tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        },
    }
    save_file({**tensors, **module}, file)
    return module


def last_attention(directory: Path) -> int:
    kinds = json.loads((directory / "config.json").read_text())["layer_types"]
    return max(i for i, kind in enumerate(kinds) if kind == "full_attention")


NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def asks() -> list[AdmitRequest]:
    draws = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=draws).tolist() for n in PROMPT_LENS]
    return [
        request(f"r{number}", prompt, max_tokens=18, **(WARM if number % 2 else {}))
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, int], list[int]]:
    plain = build_executor(BuildOptions(folder, depth=1, lead=1, **SETTINGS | {"max_rows": 1}))
    return serve(plain, asks()).outputs


def drafting(folder: Path, drafter: Stumbling, **options: Any) -> TorchExecutor:
    build = BuildOptions(folder, debug_checks=True, **SETTINGS | options)
    return build_executor(build, mode=speculative(drafter))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [2, 3, 100])
def test_rejected_drafts_leave_no_trace_in_the_states(
    folder: Path, expected: dict[tuple[str, int], list[int]], way: str, every: int
) -> None:
    served = serve(drafting(folder, Stumbling(NUM_DRAFTS, every=every), **WAYS[way]), asks())
    assert served.outputs == expected
    assert (served.num_retracted > 0) is (way == "retraction")


@pytest.fixture(scope="module", params=MAMBAS)
def mamba(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mamba")
    make_reference(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def expected_of_mamba(mamba: Path) -> dict[tuple[str, int], list[int]]:
    plain = build_executor(BuildOptions(mamba, depth=1, lead=1, **SETTINGS | {"max_rows": 1}))
    return serve(plain, asks()).outputs


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_rejected_drafts_leave_no_trace_in_the_states_of_mamba(
    mamba: Path, expected_of_mamba: dict[tuple[str, int], list[int]], way: str, dtype: str
) -> None:
    """In float32 by the CPU's kernel."""
    drafter = Stumbling(NUM_DRAFTS, every=3)
    served = serve(drafting(mamba, drafter, **{"dtype": dtype, **WAYS[way]}), asks(), chaos=2)
    assert served.outputs == expected_of_mamba
    assert (served.num_retracted > 0) is (way == "retraction")


def test_drafts_are_accepted(folder: Path, expected: dict[tuple[str, int], list[int]]) -> None:
    served = serve(drafting(folder, Stumbling(NUM_DRAFTS, every=100)), asks(), chaos=2)
    assert served.outputs == expected
    plain = serve(drafting(folder, Stumbling(NUM_DRAFTS, every=1)), asks(), chaos=2)
    assert plain.outputs == expected
    assert 2 * len(served.batches) < len(plain.batches)


def test_a_failed_window_leaves_no_trace_in_the_states(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    executor = drafting(folder, Stumbling(NUM_DRAFTS), depth=2, lead=2)
    fail_forwards(executor, {9, 10, 17, 40})
    served = serve(executor, asks(), chaos=3)
    assert served.num_resyncs >= 2
    assert served.outputs == expected


@pytest.mark.parametrize("algorithm", ["NEXTN", "NGRAM"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_plain_decoding(
    folder: Path, expected: dict[tuple[str, int], list[int]], algorithm: str, way: str
) -> None:
    drafts = SpecOptions(algorithm, num_steps=NUM_DRAFTS)
    build = BuildOptions(folder, debug_checks=True, speculative=drafts, **SETTINGS | WAYS[way])
    served = serve(build_executor(build), asks(), chaos=3)
    assert served.outputs == expected
    windows = [batch.verify for batch in served.batches if batch.verify is not None]
    assert any(any(array_i32(window.num_drafts)) for window in windows)


@pytest.mark.parametrize("algorithm", ["NEXTN", "NGRAM"])
def test_windows_in_one_call_leave_no_trace_of_rejected_drafts(
    folder: Path,
    expected: dict[tuple[str, int], list[int]],
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Mock(side_effect=decoder_step)
    monkeypatch.setattr(fused_decoder, "decoder_step", step)
    drafts = SpecOptions(algorithm, num_steps=NUM_DRAFTS)
    settings = SETTINGS | {"dtype": "float32"}
    executor = build_executor(BuildOptions(folder, speculative=drafts, **settings))
    served = serve(executor, asks(), chaos=3)
    assert served.outputs == expected
    assert step.call_count == len(served.batches)


def test_captured_windows_advance_the_states_as_eager_ones_do(
    folder: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    device = GraphDevice()
    drafts = SpecOptions("NEXTN", num_steps=NUM_DRAFTS)
    build = BuildOptions(folder, attention="torch-ref", speculative=drafts, **SETTINGS)
    served = serve(captured(build_on(device, build)), asks(), chaos=3)
    assert served.outputs == expected
    assert device.num_replays > 10


@torch.inference_mode()
def test_a_module_computes_what_the_layers_of_transformers_do(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inner, tensors = reference.model, load_file(folder / "model.safetensors")
    ids, positions = torch.randint(VOCAB_SIZE, (9,)), torch.arange(9)
    hidden = torch.randn(9, reference.config.hidden_size)

    def normed(name: str, x: Tensor) -> Tensor:
        norm = copy.deepcopy(inner.norm)
        norm.weight.copy_(tensors[f"mtp.{name}.weight"])
        return norm(x)

    embedded = normed("pre_fc_norm_embedding", inner.embed_tokens(ids))
    joined = torch.cat((embedded, normed("pre_fc_norm_hidden", hidden)), dim=1)
    x = (joined @ tensors["mtp.fc.weight"].T)[None]
    made = inner.layers[last_attention(folder)](
        x,
        position_embeddings=inner.rotary_emb(x, positions[None]),
        attention_mask=torch.full((9, 9), -torch.inf).triu(1)[None, None],
    )
    request_ = DraftRequest(SpecOptions("NEXTN"), load_model(folder), PLAN, target_dir=folder)
    found = load(request_).model
    assert isinstance(found, Modules)
    got = found.forward(ids, positions, DenseAttend(), hidden=hidden)
    torch.testing.assert_close(got, normed("norm", made[0]), atol=1e-5, rtol=1e-4)


def test_draft_trees_are_refused_at_the_start(folder: Path) -> None:
    drafts = SpecOptions("NEXTN", num_steps=2, topk=2, num_draft_tokens=4)
    with pytest.raises(ConfigError, match=r"--speculative-topk.*recurrent layers"):
        build_executor(BuildOptions(folder, speculative=drafts, **SETTINGS))
