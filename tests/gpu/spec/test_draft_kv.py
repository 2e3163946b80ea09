"""The KV of every bundled drafter that has its own: after every extend of a run, at whatever place
windows ended, it is that of a prefill of the same text from scratch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import Verified
from aserve.gpu.spec.prediction import Predicting
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.fakes.hidden_draft import Kv, text_of
from tests.gpu.drive import Served, request, serve
from tests.gpu.spec.test_every_drafter import DRAFTERS, PROMPTS

ASKED = [
    request("greedy", PROMPTS[0], max_tokens=24),
    request("warm", [*PROMPTS[0], *PROMPTS[1]], max_tokens=16, temperature=0.8, seed=5),
    request("hot", PROMPTS[20], max_tokens=18, temperature=1.5, seed=6),
    request("penalised", PROMPTS[2], max_tokens=12, repetition_penalty=1.3),
]
WITH_KV = [name for name in DRAFTERS if name not in ("FROZEN_KV_MTP", "NGRAM")]


class Extended(NamedTuple):
    """A row right after an extend: its text, whose last token has no KV yet, and its draft KV."""

    text: list[int]
    kv: Kv


def watch_extends(patch: pytest.MonkeyPatch) -> list[Extended]:
    found: list[Extended] = []
    extend = Predicting.extend

    def watched(self: Predicting, runner: StepRunner, step: DeviceStep, verified: Verified) -> Any:
        fields = extend(self, runner, step, verified)
        starts = step.batch.cache_positions.index_select(0, verified.starts)
        lens = (starts + verified.counts).tolist()
        for row, length, last in zip(
            verified.rows.tolist(), lens, verified.last.tolist(), strict=True
        ):
            found.append(extended(runner, row, length, last))
        return fields

    patch.setattr(Predicting, "extend", watched)
    return found


def extended(runner: StepRunner, row: int, length: int, last: int) -> Extended:
    state, positions = runner.state, torch.arange(length)
    assert state.draft_pools is not None

    def slots(group: int) -> Tensor:
        return state.pools.slots(group, torch.full_like(positions, row), positions)

    layers = state.draft_pools.layers
    return Extended(
        [*state.pools.token_pool[slots(0)].tolist(), last],
        {n: (kv.keys[slots(kv.group)], kv.values[slots(kv.group)]) for n, kv in layers.items()},
    )


def run(
    algorithm: str, asked: list[AdmitRequest], *, retract_rate: float = 0.0, **options: Any
) -> Served:
    speculative = SpecOptions(
        algorithm.split()[0], bundled_drafters=DRAFTERS_DIR, **DRAFTERS[algorithm]
    )
    build = BuildOptions(MODEL_DIR, dtype="float64", speculative=speculative, **options)
    return serve(build_executor(build), asked, chaos=2, retract_rate=retract_rate)


@pytest.mark.parametrize("algorithm", WITH_KV)
def test_b01_b03_draft_kv_after_every_extend_is_that_of_a_prefill_from_scratch(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cached, retracted and chunked; with (1, 1) the drafters with an even place."""
    lead = 1 + WITH_KV.index(algorithm) % 2
    found = watch_extends(monkeypatch)
    options = {"page_size": 4, "num_pages": 60, "max_rows": 3, "max_batched_tokens": 12}
    served = run(algorithm, ASKED, depth=lead, lead=lead, retract_rate=0.4, **options)
    assert served.num_retracted > 0
    made, texts = [*found], [text_of(asked, served) for asked in ASKED]
    found.clear()
    whole = [request(f"{n}", text, max_tokens=1) for n, text in enumerate(texts)]
    run(algorithm, whole, page_size=16, num_pages=40, prefix_cache=False, max_rows=1)
    scratch = [*found]
    assert [each.text[:-1] for each in scratch] == texts
    for each in made:
        [expected, *_] = [kv for text, kv in scratch if text[: len(each.text)] == each.text]
        for layer, parts in each.kv.items():
            # A module of multi-token prediction needs as many tokens behind a position as its
            # number, and so many are known only up to there.
            num = len(each.text) - 1 - (layer if algorithm == "NEXTN" else 0)
            own = tuple(part[:num] for part in parts)
            wanted = tuple(part[:num] for part in expected[layer])
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-9)
    assert len({len(each.text) for each in made}) > 12
