"""The bundled model's drafters in the engine: as many drafts are accepted as in plain PyTorch, and
the tokens are those of plain decoding.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.engine_device import engine_device
from tests.gpu.drive import Served, request, serve

EXPECTED = json.loads((DRAFTERS_DIR / "expected_acceptance.json").read_bytes())
PROMPTS = EXPECTED["prompts"][:3]
BUNDLED = {"NEXTN": "mtp", "FROZEN_KV_MTP": "frozen_kv", "STANDALONE": "small_lm"}
STOPS = tuple(EXPECTED["stop_ids"])


def run(asked: list[AdmitRequest], *, algorithm: str | None, **options: Any) -> Served:
    settings: dict[str, Any] = {"dtype": "float32", "num_pages": 80, "depth": 1, "lead": 1}
    if algorithm is not None:
        settings["speculative"] = SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR)
    build = BuildOptions(
        MODEL_DIR, debug_checks=True, device=engine_device(), **{**settings, **options}
    )
    return serve(build_executor(build), asked)


@pytest.mark.parametrize("algorithm", BUNDLED)
def test_acceptance_is_that_of_plain_pytorch(algorithm: str) -> None:
    expected = EXPECTED["drafters"][BUNDLED[algorithm]][0]
    asked = [
        request(str(number), prompt, max_tokens=EXPECTED["max_tokens"] + 1, end_ids=STOPS)
        for number, prompt in enumerate(PROMPTS)
    ]
    served = run(asked, algorithm=algorithm)
    num_steps = sum(len(batch.rows) // 4 for batch in served.batches)
    num_verifies = num_steps - len(asked)  # without the prefills
    assert num_verifies == pytest.approx(sum(expected["verifies_by_prompt"][:3]), rel=0.02)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_rows_at_the_end_of_the_context_draft_beside_rows_with_room(algorithm: str) -> None:
    """The first rows have room for fewer drafts than the others, so forwards of one shape would
    reach behind the context, its page tables and its rotary table."""
    stem = PROMPTS[0]
    asked = [
        *(request(f"end{n}", (stem * 8)[: 96 - n], max_tokens=n) for n in range(5, 12)),
        request("long", stem[:4], max_tokens=40),
        request("warm", stem, max_tokens=40, temperature=0.8, seed=4),
    ]
    options = {"page_size": 1, "num_pages": 900, "max_model_len": 96, "depth": 2, "lead": 2}
    served = run(asked, algorithm=algorithm, **options)
    assert served.outputs == run(asked, algorithm=None, **options).outputs
    assert served.num_resyncs == 0
