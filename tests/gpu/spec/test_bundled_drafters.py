"""The bundled model's drafters in the engine: as many drafts are accepted as in plain PyTorch, and
the tokens are those of plain decoding.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.engine_device import engine_device
from tests.fakes.toy_device import TOY
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


STEM = [*PROMPTS[0], *PROMPTS[1]]
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 4}
PICKY: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
}
ASKED = [
    request("greedy", PROMPTS[0], max_tokens=24, logprobs=2),
    request("hot", PROMPTS[1], max_tokens=16, temperature=1.5, seed=4),
    request("grammar", PROMPTS[2], max_tokens=12, grammar=TOY, **WARM),
    request("picky", STEM, max_tokens=24, logprobs=0, **PICKY, **WARM),
    request("cached", [*STEM, 5], max_tokens=12, **WARM),
    *(request(f"stop{n}", PROMPTS[n], max_tokens=24, end_ids=STOPS) for n in (0, 1)),
]
SETUPS: dict[str, dict[str, Any]] = {
    "awaited, few pages": {"depth": 1, "lead": 1, "page_size": 1, "num_pages": 110},
    "overlapped, chunks": {"depth": 2, "lead": 2, "page_size": 32, "max_batched_tokens": 9},
    "far ahead, large pages": {"depth": 3, "lead": 3, "page_size": 64, "max_rows": 3},
}


@cache
def plain() -> Served:
    return run(ASKED, algorithm=None, dtype="float64")


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_b14_tokens_and_logprobs_are_those_of_plain_decoding(algorithm: str, setup: str) -> None:
    """Of every drafter, whatever the requests ask for, and however steps and pages are made."""
    served = run(ASKED, algorithm=algorithm, dtype="float64", **SETUPS[setup])
    assert served.outputs == plain().outputs
    assert served.reasons == plain().reasons
    for key, logprobs in plain().logprobs.items():
        assert served.logprobs[key] == pytest.approx(logprobs, abs=1e-9)
    assert any(b.verify and any(array_i32(b.verify.num_drafts)) for b in served.batches)
    assert (served.num_retracted > 0) == ("few pages" in setup)
    assert served.num_cached > 0 or "few pages" not in setup
    assert served.num_resyncs == 0


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
