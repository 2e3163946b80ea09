"""Rows with different adapters in one batch get the tokens of models with the adapters merged in.

The models are float64, in which a batch's shape does not change which token is the largest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.fused_decoder import CompiledForward
from aserve.gpu.device.cpu.kernel_linear import prepare_tiled
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel
from aserve.gpu.weights.source import Target
from aserve.messages.requests import AdmitRequest
from aserve.tiny import MODEL_DIR
from tests.fakes.graph_device import GraphDevice
from tests.fakes.lora_adapters import RECIPES, write_adapter, write_merged
from tests.gpu.drive import Served, captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_run
from tests.load_model import load_model

PREFIX = [11, 40, 300, 7, 9, 512, 77, 1033, 61]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(recipe.seed), recipe) for recipe in RECIPES]


@pytest.fixture(scope="module")
def merged(adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[CausalModel]:
    """By slot: the plain model, then one for each adapter."""
    folder = tmp_path_factory.mktemp("merged")
    directories = [
        write_merged(folder / str(recipe.seed), adapter, recipe)
        for adapter, recipe in zip(adapters, RECIPES, strict=True)
    ]
    return [load_model(directory, dtype="float64") for directory in (MODEL_DIR, *directories)]


@pytest.fixture(scope="module")
def adapted(adapters: list[Path]) -> tuple[CausalModel, LoraTables]:
    tables = LoraTables(max_loras=len(RECIPES), max_rank=16)
    model = load_model(MODEL_DIR, dtype="float64", target=Target(wrap=tables.wrap))
    for slot, adapter in enumerate(adapters, 1):
        tables.write(slot, tables.read(adapter))
    return model, tables


def of_slot(slot: int, base: AdmitRequest) -> AdmitRequest:
    return msgspec.structs.replace(base, lora_slot=slot, namespace=f"lora-{slot}" if slot else "")


def mixed_requests() -> list[AdmitRequest]:
    """Two rounds over all adapters and none: greedy with logprobs, then sampled. The prompts of all
    have a common prefix, and the second round finds the first one's pages."""
    rounds: tuple[dict[str, Any], ...] = (
        {"logprobs": 2},
        {"temperature": 0.8, "n": 2, "logprobs": 2},
    )
    return [
        of_slot(slot, request(f"{number}-{slot}", PREFIX * 2 + [20 + slot], max_tokens=9, **fields))
        for number, fields in enumerate(rounds)
        for slot in range(len(RECIPES) + 1)
    ]


def assert_as_merged(
    served: Served, requests: list[AdmitRequest], merged: list[CausalModel]
) -> None:
    for each in requests:
        for child in range(each.sampling.n):
            expected = plain_run(merged[each.lora_slot], each, child)
            key = (each.request_id, child)
            assert served.outputs[key] == expected.tokens
            assert served.logprobs[key] == pytest.approx(expected.logprobs, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batched_tokens": 7, "depth": 1, "lead": 1}, {"num_pages": 20, "max_rows": 9}],
    ids=["overlap", "chunks", "retraction"],
)
def test_a_mixed_batch_gives_the_tokens_of_merged_models(
    options: dict[str, Any],
    adapted: tuple[CausalModel, LoraTables],
    merged: list[CausalModel],
) -> None:
    model, tables = adapted
    requests = mixed_requests()
    executor = make_executor(model, loras=tables, **{"max_rows": 16, "num_pages": 200, **options})
    served = serve(executor, requests, chaos=3)
    assert_as_merged(served, requests, merged)
    assert len({tuple(served.outputs[f"0-{slot}", 0]) for slot in range(9)}) == 9
    assert served.num_cached >= 9 * 16 or "num_pages" in options
    assert served.num_retracted or "num_pages" not in options


def test_a_captured_step_adds_the_adapters_of_each_replay(
    adapted: tuple[CausalModel, LoraTables], merged: list[CausalModel]
) -> None:
    """A graph is captured with rows that have none."""
    model, tables = adapted
    device = GraphDevice()
    plain = [
        of_slot(slot, request(f"r{slot}", [*PREFIX, 20 + slot], max_tokens=9)) for slot in range(9)
    ]
    options: dict[str, Any] = {"max_rows": 16, "num_pages": 200, "debug_checks": False}
    executor = captured(make_executor(model, loras=tables, device=device, **options))
    served = serve(executor, plain)
    for each in plain:
        expected = plain_run(merged[each.lora_slot], each)
        assert served.outputs[each.request_id, 0] == expected.tokens
    assert device.num_replays > 5


def test_tables_without_room_are_refused_before_any_is_made() -> None:
    """They took all memory of a machine, one layer after the other."""
    tables = LoraTables(max_loras=2, max_rank=8)
    check = Mock(side_effect=tables.check_room)
    load_model(MODEL_DIR, target=Target(wrap=tables.wrap, check_added=check))
    (shapes, dtype, left_bytes), _ = check.call_args
    stacks = [stack for _, stack in tables._layers]
    size_bytes = sum(stack.a.nbytes + stack.b.nbytes for stack in stacks)
    assert left_bytes > size_bytes
    tables.check_room(shapes, dtype, size_bytes)
    with pytest.raises(ConfigError, match="--max-loras 2 adapters of --max-lora-rank 8 take"):
        tables.check_room(shapes, dtype, size_bytes - 1)


def test_an_engine_whose_adapters_take_too_much_memory_is_refused() -> None:
    options = BuildOptions(MODEL_DIR, num_pages=8, max_loras=1 << 20, max_lora_rank=1024)
    with pytest.raises(ConfigError, match="GiB are available beside the weights"):
        build_executor(options)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "torch-ref"])
def test_a_compiled_step_gives_the_tokens_of_merged_models(
    attention: str,
    adapters: list[Path],
    merged: list[CausalModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a named attention backend the operators run one by one."""
    step = Mock(side_effect=CompiledForward.step)
    monkeypatch.setattr(CompiledForward, "step", lambda *given: step(*given))
    device = CpuDevice()
    ops = device.ops(torch.float32, is_deterministic=False)
    tables = LoraTables(max_loras=3, max_rank=16, ops=ops.lora_ops())
    target = Target(prepare=prepare_tiled, elementwise=ops.elementwise, wrap=tables.wrap)
    model = load_model(MODEL_DIR, dtype="float32", target=target)
    for slot, adapter in enumerate(adapters[:3], 1):
        tables.write(slot, tables.read(adapter))
    requests = [
        of_slot(i % 4, request(f"r{i}", [*PREFIX, 20 + i], max_tokens=12)) for i in range(8)
    ]
    options: dict[str, Any] = {"max_rows": 8, "num_pages": 100, "debug_checks": False}
    executor = make_executor(model, device=device, loras=tables, attention=attention, **options)
    served = serve(executor, requests)
    for each in requests:
        expected = plain_run(merged[each.lora_slot], each)
        assert served.outputs[each.request_id, 0] == expected.tokens
    assert step.called is (attention == "auto")
