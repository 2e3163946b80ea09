"""Every bundled drafter, as a chain and as trees, against the plain engine in float64: tokens,
ends and logprobs are those of decoding one request at a time, whatever the requests ask for and
however steps, pages and rows are made.

The plain engine has depth and lead 1, one row, no prefix cache and no chunks. Each drafter runs a
part of the product of all settings here, and `make test-all` the whole of it.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from typing import Any

import pytest

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.engine_device import engine_device
from tests.fakes.toy_device import TOY
from tests.gpu.drive import Served, request, serve

PROMPTS = json.loads((DRAFTERS_DIR / "expected_acceptance.json").read_bytes())["prompts"]
STEM = [*PROMPTS[0], *PROMPTS[1]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "DFLASH": {},
    "EAGLE": {},
    "EAGLE with a dynamic tree": {"topk": 3, "num_steps": 3, "num_draft_tokens": 10},
    "EAGLE with a static tree": {"token_tree": "static"},
    "EAGLE3": {},
    "EAGLE3 with a dynamic tree": {"topk": 2, "num_steps": 4, "num_draft_tokens": 8},
    "FROZEN_KV_MTP": {},
    "NEXTN": {},
    "NGRAM": {},
    "STANDALONE": {},
}
PACES = ((1, 1), (2, 2), (3, 3))
PAGES = (1, 16)
# Paces, sizes of pages, and whether prompts have chunks, prefixes are cached, and rows retracted
# again and again, in a small pool.
SETTINGS = [*itertools.product(PACES, PAGES, *([(False, True)] * 3))]
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
}


def asked_at(temperature: float) -> list[AdmitRequest]:
    """Of each kind one; the prompts of two begin alike."""
    warm: dict[str, Any] = {"temperature": temperature, "seed": 4}
    return [
        request(f"scored {temperature}", PROMPTS[0], max_tokens=16, logprobs=2, **warm),
        request(f"picky {temperature}", STEM, max_tokens=12, logprobs=0, **PENALTIES, **warm),
        request(f"masked {temperature}", PROMPTS[2], max_tokens=9, grammar=TOY, **warm),
        request(f"both {temperature}", [*STEM, 5], max_tokens=9, grammar=TOY, **PENALTIES, **warm),
    ]


def run(
    asked: list[AdmitRequest],
    algorithm: str | None = None,
    *,
    retract_rate: float = 0.0,
    **options: Any,
) -> Served:
    speculative = None
    if algorithm is not None:
        speculative = SpecOptions(
            algorithm.split()[0], bundled_drafters=DRAFTERS_DIR, **DRAFTERS[algorithm]
        )
    build = BuildOptions(
        MODEL_DIR,
        dtype="float64",
        debug_checks=True,
        device=engine_device(),
        speculative=speculative,
        **{"max_rows": 4, **options},
    )
    return serve(build_executor(build), asked, chaos=1, retract_rate=retract_rate)


def alone(asked: list[AdmitRequest]) -> Served:
    options: dict[str, Any] = {
        "depth": 1,
        "lead": 1,
        "max_rows": 1,
        "prefix_cache": False,
        "num_pages": 60,
    }
    return run(asked, **options)


@cache
def asked_all() -> list[AdmitRequest]:
    """At each temperature, and for each of them one that stops at an id within its answer."""
    asked = [each for temperature in (0.0, 0.8, 1.5) for each in asked_at(temperature)]
    free = alone(asked).outputs
    for temperature in (0.0, 0.8, 1.5):
        stop = free[f"scored {temperature}", 0][9]
        warm: dict[str, Any] = {"temperature": temperature, "seed": 4}
        name = f"stopped {temperature}"
        asked.append(request(name, PROMPTS[0], max_tokens=16, end_ids=(stop,), **warm))
    return asked


@cache
def plain() -> Served:
    served = alone(asked_all())
    stopped = [key for key in served.outputs if key[0].startswith("stopped")]
    assert all(1 < len(served.outputs[key]) <= 10 for key in stopped)
    return served


def settings_of(number: int) -> list[tuple[Any, ...]]:
    """All settings, or of each drafter four, in which any two values of different settings meet
    with some drafter."""
    if IS_LARGE:
        return SETTINGS
    rows = itertools.product((0, 1), (0, 1))
    return [
        (
            PACES[(place + number) % 3],
            PAGES[page],
            chunks == 1,
            (page + chunks + number) % 2 == 1,
            (chunks + number // 2) % 2 == 1,
        )
        for place, (page, chunks) in enumerate(rows)
    ]


CASES = [
    (algorithm, *setting)
    for number, algorithm in enumerate(DRAFTERS)
    for setting in settings_of(number)
]


@pytest.mark.parametrize(
    ("algorithm", "pace", "page_size", "has_chunks", "has_cache", "retracts"), CASES
)
def test_b08_b14_b22_tokens_and_logprobs_are_those_of_plain_decoding(
    *,
    algorithm: str,
    pace: tuple[int, int],
    page_size: int,
    has_chunks: bool,
    has_cache: bool,
    retracts: bool,
) -> None:
    depth, lead = pace
    num_tokens = 144 if retracts else 640
    options = {
        "depth": depth,
        "lead": lead,
        "page_size": page_size,
        "prefix_cache": has_cache,
        "num_pages": 1 + num_tokens // page_size,
        **({"max_batched_tokens": 9} if has_chunks else {}),
    }
    rate = 0.25 if retracts else 0.0
    served = run(asked_all(), algorithm, retract_rate=rate, **options)
    assert served.outputs == plain().outputs
    assert served.reasons == plain().reasons
    for key, logprobs in plain().logprobs.items():
        assert served.logprobs[key] == pytest.approx(logprobs, abs=1e-9)
    assert any(b.verify and any(array_i32(b.verify.num_drafts)) for b in served.batches)
    assert served.num_retracted > 2 or not retracts
    assert served.num_cached > 0 or not has_cache
    assert served.num_resyncs == 0
