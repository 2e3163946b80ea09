"""A small model's compiled step adds adapters as its single operators do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.fused_decoder import CompiledForward
from aserve.gpu.device.cpu.kernel_linear import prepare_tiled
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve.gpu.weights.source import Target
from aserve.messages.requests import AdmitRequest
from aserve.tiny import MODEL_DIR
from tests.fakes.lora_adapters import RECIPES, write_adapter, write_merged
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs
from tests.load_model import load_model

NUM_SLOTS = 4
PROMPT = [11, 40, 300, 7, 9, 512, 77, 1033, 61]


def requests() -> list[AdmitRequest]:
    made = [request(f"r{i}", [*PROMPT, 20 + i], max_tokens=12) for i in range(2 * NUM_SLOTS)]
    return [
        msgspec.structs.replace(each, lora_slot=i % NUM_SLOTS, namespace=f"lora-{i % NUM_SLOTS}")
        for i, each in enumerate(made)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "torch-ref"])
def test_a_compiled_step_gives_the_tokens_of_merged_models(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a named attention backend the operators run one by one."""
    num_steps = 0
    step = CompiledForward.step

    def counted(self: CompiledForward, plan: StepPlan) -> Packed:
        nonlocal num_steps
        num_steps += 1
        return step(self, plan)

    monkeypatch.setattr(CompiledForward, "step", counted)
    ops = CpuDevice().ops(torch.float32, is_deterministic=False)
    tables = LoraTables(max_loras=NUM_SLOTS - 1, max_rank=16, ops=ops.lora_ops())
    target = Target(prepare=prepare_tiled, elementwise=ops.elementwise, wrap=tables.wrap)
    model = load_model(MODEL_DIR, dtype="float32", target=target)
    merged = [load_model(MODEL_DIR, dtype="float64")]
    for slot, recipe in enumerate(RECIPES[: NUM_SLOTS - 1], 1):
        adapter = write_adapter(tmp_path / str(slot), recipe)
        tables.write(slot, tables.read(adapter))
        directory = write_merged(tmp_path / f"{slot}-merged", adapter, recipe)
        merged.append(load_model(directory, dtype="float64"))
    options: dict[str, Any] = {
        "max_rows": 8,
        "num_pages": 100,
        "debug_checks": False,
        "attention": attention,
    }
    served = serve(make_executor(model, loras=tables, **options), requests())
    for each in requests():
        expected = plain_outputs(merged[each.lora_slot], each)
        assert served.outputs[each.request_id, 0] == expected
    assert (num_steps > 0) is (attention == "auto")
