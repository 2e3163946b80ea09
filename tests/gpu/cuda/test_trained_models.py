"""The small trained models of tests/models on CUDA: experts, latent and sparse attention, n-gram
embeddings, and the NextN layer that drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aserve.engine import Engine
from tests.gpu.cuda.test_layers import GAPS, GREEDY, PROMPTS, assert_best_by_the_cpu
from tools.train_models.folder import MODELS_DIR, complete_folder

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, Any]] = {
    "moe": {},
    "mla": {"speculative_algorithm": "NEXTN"},
    "dsa": {},
    "ngram_emb": {"speculative_algorithm": "NGRAM"},
}
LONG = "One day Sam and Mia found a red boat near the lake. " * 4
CASES: list[Any] = [
    ("mla", "cpu", "auto", "float32"),
    *(
        pytest.param(name, "cuda", backend, dtype, marks=pytest.mark.gpu)
        for name in OPTIONS
        for backend in ("auto", "triton")
        for dtype in ("float32", "bfloat16")
    ),
]


@pytest.mark.parametrize(("name", "device", "backend", "dtype"), CASES)
def test_greedy_tokens_are_those_of_float32_on_the_cpu(
    name: str, device: str, backend: str, dtype: str, tmp_path: Path
) -> None:
    """A long prompt has more keys than a query of sparse attention sees."""
    folder = complete_folder(MODELS_DIR / name, tmp_path / name)
    machine: dict[str, Any] = {"device": device, "attention_backend": backend, "dtype": dtype}
    with Engine(
        model=str(folder), max_num_seqs=4, num_pages=200, **machine, **OPTIONS[name]
    ) as engine:
        found = engine.generate_sync([*PROMPTS, LONG], **GREEDY)
    assert_best_by_the_cpu(found, gap=GAPS[dtype], model_dir=folder)
