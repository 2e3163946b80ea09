"""LoRA adapters of layers that the bundled model does not have, as recurrent ones and projections
whose rows are loaded in another order: rows of one batch get the tokens of models with the adapters
merged in.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aserve.gpu.build import BuildOptions, build_executor
from aserve.messages.requests import AdmitRequest
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged
from tests.gpu.drive import Served, request, serve
from tests.parity.references import make_reference

pytestmark = pytest.mark.slow

PROMPTS = ([5, 9, 2], list(range(40)), [7])
TARGETS = {
    "glm4": ("k_proj", "v_proj", "gate_up_proj", "down_proj"),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "granite-hybrid-dense": ("in_proj", "out_proj", "input_linear", "output_linear"),
    "lfm2": ("in_proj", "out_proj", "w1", "w2", "w3"),
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
}


def asks(slot: int) -> list[AdmitRequest]:
    plain = [
        request(f"{slot}-{n}", prompt, max_tokens=12, logprobs=1)
        for n, prompt in enumerate(PROMPTS)
    ]
    own = {"lora_slot": slot, "namespace": f"lora-{slot}" if slot else ""}
    return [msgspec.structs.replace(each, **own) for each in plain]


def run(folder: Path, asked: list[AdmitRequest], *adapters: Path) -> Served:
    build = BuildOptions(folder, dtype="float64", num_pages=60, max_rows=4, max_loras=len(adapters))
    executor = build_executor(build)
    tables = executor._live_loader.loras
    for slot, adapter in enumerate(adapters, 1):
        assert tables is not None
        tables.write(slot, tables.read(adapter))
    return serve(executor, asked, chaos=3)


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_with_different_adapters_get_the_tokens_of_merged_models(
    kind: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    make_reference(kind, base)
    recipes = [
        Recipe(1, targets=TARGETS[kind]),
        Recipe(2, rank=3, targets=("q_proj", "o_proj", *TARGETS[kind][:1])),
    ]
    adapters = [
        write_adapter(tmp_path / f"adapter{recipe.seed}", recipe, model_dir=base)
        for recipe in recipes
    ]
    served = run(base, [ask for slot in range(3) for ask in asks(slot)], *adapters)
    alone = run(base, asks(0))
    for slot, recipe in enumerate(recipes, 1):
        merged = tmp_path / f"merged{slot}"
        write_merged(merged, adapters[slot - 1], recipe, model_dir=base)
        plain = [msgspec.structs.replace(ask, lora_slot=0) for ask in asks(slot)]
        expected = run(merged, plain)
        for ask in plain:
            key = (ask.request_id, 0)
            assert served.outputs[key] == expected.outputs[key]
            assert served.logprobs[key] == pytest.approx(expected.logprobs[key], abs=1e-6)
        assert expected.outputs[f"{slot}-1", 0] != alone.outputs["0-1", 0]
