"""The table of docs/speculation.md: every kind of model with every drafter, run to its end. Where
both go together, tokens are those of the plain engine; where they do not, the refusal says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.hisparse.config import HiSparseConfig
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.spec.standalone import PlainDraftModel
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.text.load import load_tokenizer
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.architecture.source import ROOT
from tests.engine_device import engine_device
from tests.gpu.drive import Served, request, serve
from tests.gpu.test_trained_blocks_and_pictures import PLAIN, captioned
from tests.parity.references import new_model
from tools.train_models.folder import MODELS_DIR

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "speculation.md"
TREES = "trees"
YES = "yes"
# Written by the fixture, with random weights: no trained model of this kind lies in the tree.
RECURRENT = Path("recurrent")
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
# The models of the table's rows, and what they are run with.
SYSTEMS: dict[str, tuple[Path, dict[str, Any]]] = {
    "mixtures of experts": (MODELS_DIR / "moe", {}),
    "the same in two batches": (MODELS_DIR / "moe", {"two_batches": True}),
    "latent attention (MLA)": (MODELS_DIR / "mla", {}),
    "sparse attention (DSA)": (MODELS_DIR / "dsa", {}),
    "the same with HiSparse": (
        MODELS_DIR / "dsa",
        {"hisparse": HiSparseConfig(device_buffer_size=36)},
    ),
    "n-gram embeddings": (MODELS_DIR / "ngram_emb", {}),
    "pictures": (MODELS_DIR / "vl", {}),
    "recurrent layers": (RECURRENT, {}),
    "diffusion": (MODELS_DIR / "dllm", {}),
}
REASONS = {
    "no: latents": "reads the keys and values of the model, whose KV are latents",
    "no: chosen keys": "tree masks with sparse attention",
    "no: three axes": "a model that reads pictures, whose tokens have positions of three axes",
    "no: one path": "whose states follow a single sequence of tokens",
    "no: blocks": "does not go with a diffusion language model, which fills blocks",
}
# Chunks beside decodes, with a prefix that requests share.
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "num_pages": 60,
    "max_rows": 4,
    "max_batched_tokens": 24,
    "depth": 2,
    "lead": 2,
    "debug_checks": True,
}
STORY = "One day Sam and Mia found a red boat near the lake. "


def table() -> dict[tuple[str, str], str]:
    """The cells, by row and column."""
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text().split("## Which models", 1)[1], re.M)
    head, _, *rows = ([cell.strip(" `") for cell in line.split("|")] for line in lines)
    return {
        (row[0], column): cell
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


TABLE = table()


def asks(system: str) -> list[AdmitRequest]:
    if system == "pictures":
        return [asked for asked, _ in captioned()[:3]]
    encode = load_tokenizer(MODEL_DIR).encode
    texts = (STORY * 3, STORY * 3 + "They")
    first, other = ([1, *encode(text, with_special=False)] for text in texts)
    warm = request("warm", other, max_tokens=8, temperature=0.8, seed=4)
    return [request("first", first, max_tokens=10), request("other", other, max_tokens=8), warm]


def run(system: str, drafts: SpecOptions | None, **settings: Any) -> Served:
    folder, options = SYSTEMS[system]
    build = BuildOptions(
        folder, device=engine_device(), speculative=drafts, **SETTINGS | options | settings
    )
    return serve(build_executor(build), asks(system), chaos=3)


@cache
def plain(system: str) -> Served:
    return run(system, None, **PLAIN)


@pytest.fixture(scope="module", autouse=True)
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the model of the row "recurrent layers", with the sizes of the bundled model."""
    folder = tmp_path_factory.mktemp("recurrent")
    sizes = json.loads((MODEL_DIR / "config.json").read_text())
    kept = {name: sizes[name] for name in SIZES}
    new_model(
        "qwen3.5", **kept, layer_types=["linear_attention", "full_attention"] * 3
    ).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SYSTEMS, "recurrent layers", (folder, {}))
        yield


def drafts_of(system: str, column: str) -> SpecOptions:
    """The drafters of the bundled model fit all its relatives. They are trained for it alone, so
    much of what they draft is rejected."""
    if column == TREES:
        return SpecOptions(
            "EAGLE", bundled_drafters=DRAFTERS_DIR, topk=2, num_steps=2, num_draft_tokens=4
        )
    has_own = (system, column) == ("latent attention (MLA)", "NEXTN")
    return SpecOptions(column, bundled_drafters=None if has_own else DRAFTERS_DIR)


def test_the_table_has_every_system_and_every_drafter() -> None:
    assert sorted({row for row, _ in TABLE}) == sorted(SYSTEMS)
    assert sorted({column for _, column in TABLE}) == sorted([*ALGORITHMS, TREES])
    assert {*TABLE.values()} == {YES, *REASONS}


@pytest.mark.parametrize(("system", "column"), TABLE)
def test_a_cell_of_the_table_is_true(system: str, column: str) -> None:
    drafts, cell = drafts_of(system, column), TABLE[system, column]
    if cell != YES:
        with pytest.raises(ConfigError, match=re.escape(REASONS[cell])):
            run(system, drafts)
        return
    served = run(system, drafts)
    assert served.outputs == plain(system).outputs
    windows = [batch.verify for batch in served.batches if batch.verify is not None]
    assert any(any(array_i32(window.num_drafts)) for window in windows)
    assert any(window.tree is not None for window in windows) is (column == TREES)
    assert served.num_resyncs == 0


def test_a_small_language_model_counts_the_tokens_of_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its positions have one axis, in the forwards that draft and in those that catch up."""
    seen: list[Tensor] = []
    forward = PlainDraftModel.forward

    def noted(
        model: PlainDraftModel, ids: Tensor, positions: Tensor, *at: Any, **by: Any
    ) -> Tensor:
        seen.append(positions)
        return forward(model, ids, positions, *at, **by)

    monkeypatch.setattr(PlainDraftModel, "forward", noted)
    served = run("pictures", drafts_of("pictures", "STANDALONE"), **PLAIN)
    assert served.num_resyncs == 0
    assert all(positions.dim() == 1 for positions in seen)
    prompt_len = len(array_i32(asks("pictures")[0].prompt_ids))
    assert max(int(positions.max()) for positions in seen) >= prompt_len
