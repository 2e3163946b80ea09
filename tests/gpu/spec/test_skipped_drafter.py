"""Where drafts do not pay, steps skip the drafter. They are the steps of plain decoding, and the
tokens stay the same when rows draft again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.cpu.fused_decoder import CompiledForward
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import StepTimes
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.fakes.drafters import Stumbling, StumblingTree, speculative
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.drive import Served, captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=50),
    request("warm", PROMPT, max_tokens=45, **WARM),
    request("picky", PROMPT[:2], max_tokens=50, presence_penalty=2.0, logprobs=2, **WARM),
    request("held", PROMPT[:3], max_tokens=30, grammar=TOY, **WARM),
]


def step_times(num_drafts: int, *costs: float, firsts: tuple[float, ...] = ()) -> StepTimes:
    """costs: those of windows of 1, 2, ... rows over a plain step; firsts: if one row drafts."""
    num_rows = tuple(range(1, len(costs) + 1))
    plain = (1.0,) * len(costs)
    windows = {0: (1.3,) * len(costs), num_drafts: costs}
    return StepTimes(num_rows, plain, windows, {num_drafts: firsts} if firsts else {})


def num_skipped(served: Served) -> int:
    return sum(batch.skips_drafter for batch in served.batches)


def num_drafted(served: Served) -> int:
    plans = [array_i32(batch.verify.num_drafts) for batch in served.batches if batch.verify]
    return int(sum(plan.sum() for plan in plans))


def assert_followed(served: Served) -> None:
    """No row has drafts whose last step skipped the drafter."""
    skipped: set[int] = set()
    for batch in served.batches:
        rows = array_i32(batch.rows)
        if batch.verify is not None:
            drafting = rows[array_i32(batch.verify.num_drafts) > 0]
            assert skipped.isdisjoint(drafting.tolist())
        skipped.difference_update(rows.tolist())
        skipped.update(rows.tolist() if batch.skips_drafter else [])


DRAFTERS: list[Callable[[], Stumbling]] = [
    lambda: Stumbling(4, every=3),
    StumblingTree,
]


@pytest.mark.parametrize("pace", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_b16_tokens_are_those_of_plain_decoding_while_rows_stop_and_begin_to_draft(
    drafter: Callable[[], Stumbling], pace: tuple[int, int]
) -> None:
    extend = Mock()
    made = drafter()
    made._before_extend = extend
    depth, lead = pace
    executor = make_executor(
        HashModel(), mode=speculative(made), attention="torch-ref", depth=depth, lead=lead
    )
    times = step_times(4, 1.1, 1.3, 9.0, firsts=(1.1, 1.2, 2.0))
    served = serve(executor, [times, *ASKED], chaos=2)
    assert served.outputs == plain_tokens(ASKED, HashModel())
    assert_followed(served)
    assert num_skipped(served) > 10
    has_drafts = np.flatnonzero([batch.verify is not None for batch in served.batches])
    skips = np.flatnonzero([batch.skips_drafter for batch in served.batches])
    assert skips[0] < has_drafts[-1]
    assert has_drafts[0] < skips[-1] or pace == (1, 1)
    assert 0 < extend.call_count < num_skipped(served)


def test_a_graph_of_steps_that_skip_the_drafter_has_nothing_of_it() -> None:
    extend, device = Mock(), GraphDevice()
    drafter = Stumbling(4, before_extend=extend)
    mode = speculative(drafter)
    executor = make_executor(HashModel(), mode=mode, attention="torch-ref", device=device)
    num_shapes = 4 * 3  # of rows and samplings
    captured(executor)
    assert (device.num_captures, extend.call_count) == (3 * num_shapes, 2 * num_shapes)
    asked = [request("r", PROMPT[:9], max_tokens=50)]
    served = serve(executor, [step_times(4, 9.0, 9.0, 9.0), *asked])
    assert served.outputs == plain_tokens(asked, HashModel())
    assert num_skipped(served) > 40
    assert device.num_replays > 40


PROMPTS = [[1, *((37 * i * i + 11 * i) % 2000 + 20 for i in range(n))] for n in (9, 40, 20)]
BUNDLED = [
    request("greedy", PROMPTS[0], max_tokens=90),
    request("hot", PROMPTS[1], max_tokens=80, temperature=1.0, seed=1 << 63),
    request("picky", PROMPTS[2], max_tokens=6, presence_penalty=0.5, logprobs=2),
]


def run_bundled(
    algorithm: str | None, asked: Sequence[AdmitRequest | StepTimes], **changes: Any
) -> Served:
    given = None if algorithm is None else SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR)
    options = BuildOptions(MODEL_DIR, num_pages=80, max_rows=3, speculative=given, **changes)
    return serve(build_executor(options), asked)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM"])
@torch.inference_mode()
def test_steps_that_skip_the_drafter_are_one_compiled_call(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_bundled(None, BUNDLED)
    most = 7 if algorithm == "NGRAM" else 4
    asked: list[AdmitRequest | StepTimes] = [step_times(most, 0.85 * (1 + most)), *BUNDLED]
    calls: list[bool] = []
    verify = CompiledForward.verify

    def watched(self: CompiledForward, plan: Any, capture: Any = None, **options: Any) -> Any:
        calls.append(plan.batch.skips_drafter)
        assert not plan.batch.skips_drafter or capture is None
        return verify(self, plan, capture, **options)

    monkeypatch.setattr(CompiledForward, "verify", watched)
    served = run_bundled(algorithm, asked)
    assert served.outputs == plain.outputs
    assert num_skipped(served) > len(served.batches) // 2
    assert sum(calls) > num_skipped(served) - 10  # the others have a row with penalties
    assert (num_drafted(served) > 0) == (algorithm != "NGRAM")  # the scheduler sees no repetition
