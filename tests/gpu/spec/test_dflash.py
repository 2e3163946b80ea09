"""The block drafter of the bundled model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.rope import apply_rope
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.spec import dflash
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import request, serve
from tests.parity.dense_attend import DenseAttend

EXPECTED = json.loads((DRAFTERS_DIR / "expected_acceptance.json").read_bytes())
PROMPT: list[int] = EXPECTED["prompts"][0]


def make(*, num_drafts: int | None = 7, path: Path | None = None, **options: Any) -> TorchExecutor:
    spec = SpecOptions(
        "DFLASH", draft_model_dir=path, bundled_drafters=DRAFTERS_DIR, num_steps=num_drafts
    )
    settings: dict[str, Any] = {
        "dtype": "float64",
        "num_pages": 300,
        "max_rows": 4,
        "debug_checks": True,
        "speculative": spec if num_drafts else None,
        **options,
    }
    return build_executor(BuildOptions(Path(MODEL_DIR), **settings))


def test_its_attention_is_not_that_of_the_reference() -> None:
    assert "the drafter's paged-sdpa," in make().about


def test_b21_it_accepts_exactly_what_plain_pytorch_accepted() -> None:
    """The number of windows is as sharp as that: one more would come of a causal block."""
    [measured] = [each for each in EXPECTED["drafters"]["dflash"] if each["num_drafts"] == 7]
    asked = [
        request(str(number), prompt, max_tokens=EXPECTED["max_tokens"] + 1, end_ids=(2, 7))
        for number, prompt in enumerate(EXPECTED["prompts"][:3])
    ]
    served = serve(make(depth=1, lead=1), asked)
    windows = [array_i32(batch.verify.num_drafts) for batch in served.batches if batch.verify]
    assert sum(int((each > 0).sum()) for each in windows) == sum(measured["verifies_by_prompt"][:3])


def test_its_kv_is_the_projection_of_the_targets_hidden_states() -> None:
    """Accepted, rejected and chunked tokens leave what one forward over the whole text gives."""
    executor = make(page_size=4, prefix_cache=False, max_batched_tokens=7)
    runner = executor._runner
    asked = request("text", PROMPT, max_tokens=40, temperature=1.0, seed=5)
    [output] = serve(executor, [asked]).outputs.values()
    text = torch.tensor([*array_i32(asked.prompt_ids).tolist(), *output])[:-1]
    model, target = runner.drafter, runner.model
    assert isinstance(model, dflash.BlockModel)
    assert runner.state.draft_pools is not None
    capture = HiddenCapture((0, 2, 4))
    positions = torch.arange(len(text))
    with torch.inference_mode():
        target.forward(text, positions, DenseAttend(), capture=capture)
        expected: dict[int, Tensor] = {}

        def keep(layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
            assert inputs.rope is not None
            heads = inputs.heads.split(
                (layer.num_heads + layer.num_kv_heads, layer.num_kv_heads), 1
            )
            keys = apply_rope(heads[0], inputs.rope)[:, layer.num_heads :]
            expected[layer.index] = torch.cat((keys, heads[1]), dim=1)
            return keys

        model.write_context(model.context(tuple(capture.layers)), positions, keep)
        for layer, wanted in expected.items():
            kv = runner.state.draft_pools.layers[layer]
            slots = runner.state.pools.slots(kv.group, torch.ones_like(positions), positions)
            stored = torch.cat((kv.keys[slots], kv.values[slots]), dim=1)
            torch.testing.assert_close(stored, wanted, rtol=0, atol=1e-10)


def test_drafting_leaves_the_targets_pools_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()
    pools = executor._runner.state.pools
    draft = dflash.BlockDrafter.draft
    num_compared = 0

    def watched(self: dflash.BlockDrafter, runner: Any, rows: DraftRows) -> Drafts:
        nonlocal num_compared
        tensors = [
            pools.token_pool,
            *(kv for each in pools.layers.values() for kv in (each.keys, each.values)),
        ]
        before = [tensor.clone() for tensor in tensors]
        found = draft(self, runner, rows)
        assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
        num_compared += 1
        return found

    monkeypatch.setattr(dflash.BlockDrafter, "draft", watched)
    serve(executor, [request("text", PROMPT, max_tokens=20)])
    assert num_compared


def test_a_row_with_fewer_drafts_than_others_has_a_block_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The places behind a shorter block hold anything, and tokens see what is behind them."""
    executor, draft = make(), dflash.BlockDrafter.draft
    model = executor._runner.drafter
    assert model is not None
    logits = model.logits
    read: list[Tensor] = []
    lacking: list[int] = []

    def reading(hidden: Tensor) -> Tensor:
        read.append(hidden)
        return logits(hidden)

    def watched(self: dflash.BlockDrafter, runner: Any, rows: DraftRows) -> Drafts:
        found = draft(self, runner, rows)
        together = read[-1].view(len(rows.rows), rows.num_drafts, -1)
        for place, count in enumerate(rows.counts.tolist()):
            names = ("rows", "lens", "roots", "counts")
            own = {name: getattr(rows, name)[place : place + 1] for name in names}
            draft(self, runner, dataclasses.replace(rows, num_drafts=count, **own))
            torch.testing.assert_close(together[place, :count], read[-1])
            lacking.append(rows.num_drafts - count)
        return found

    monkeypatch.setattr(model, "logits", reading)
    monkeypatch.setattr(dflash.BlockDrafter, "draft", watched)
    lens = (40, 33, 26, 18)
    serve(executor, [request(f"r{num}", PROMPT[: 4 + num], max_tokens=num) for num in lens])
    assert max(lacking) >= 3


def as_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The config as the `speculators` library writes it: streams are named by the layer that they
    enter."""
    own = config.pop("dflash_config")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": config.pop("block_size"),
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [index + 1 for index in own["target_layer_ids"]],
        "transformer_layer_config": config,
    }


def test_both_forms_of_a_checkpoint_draft_the_same(tmp_path: Path) -> None:
    published = DRAFTERS_DIR / "dflash"
    tensors = load_file(published / "model.safetensors")
    assert not any(name.startswith("model.") for name in tensors)
    save_file(
        {
            name if name.startswith("fc") else f"model.{name}": each
            for name, each in tensors.items()
        },
        tmp_path / "model.safetensors",
    )
    config = as_speculators(json.loads((published / "config.json").read_bytes()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = [request("text", PROMPT, max_tokens=20)]
    first, second = (serve(make(path=path), asked) for path in (None, tmp_path))
    assert first.outputs == second.outputs
    assert len(first.batches) == len(second.batches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 4}, "at most 3 drafts"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 6]}}, "0 to 5"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 0, 4]}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "mask_token_id is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((DRAFTERS_DIR / "dflash" / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        make(path=tmp_path)
