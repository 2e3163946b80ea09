"""Rows with a prediction verify windows, and all tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torch import Tensor

from aserve.gpu.spec.base import Drafter
from aserve.gpu.spec.ngram import NgramDrafter
from aserve.gpu.spec.prediction import NUM_PREDICTED, Predicted
from aserve.gpu.step.ticket import StepTicket
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.requests import AdmitRequest, Grammar
from aserve.messages.step import ScheduleBatch
from aserve_kernels.histories import Histories
from aserve_kernels.suffix_match import (
    TORCH_SUFFIX_MATCH,
    MatchWindow,
    SuffixMatch,
    Texts,
)
from tests.fakes.drafters import Stumbling, StumblingTree
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens
from tests.gpu.spec.test_mode import ASKED, PROMPT, WARM


def predicted(asked: AdmitRequest, edit: Callable[[list[int]], list[int]]) -> AdmitRequest:
    """The request, with its own output as the prediction after an edit."""
    text = edit(plain_outputs(HashModel(), asked))
    return msgspec.structs.replace(asked, prediction_ids=pack_i32(text))


def one_changed(text: list[int]) -> list[int]:
    return [*text[:9], (text[9] + 1) % VOCAB, *text[10:]]


def three_more(text: list[int]) -> list[int]:
    return [*text[:12], 1, 2, 3, *text[12:]]


MASKED = request(
    "masked", PROMPT[:4], max_tokens=20, temperature=0.8, seed=3, grammar=Grammar("json_object")
)
LONG = request("long", PROMPT[:5], max_tokens=40, temperature=0.8, seed=4)
ASKED_ALL = [
    *ASKED,
    predicted(LONG, list),
    predicted(MASKED, one_changed),
    predicted(request("edited", PROMPT[:7], max_tokens=33), one_changed),
    predicted(request("longer", PROMPT[:4], max_tokens=33, **WARM), three_more),
    predicted(request("wrong", PROMPT[:3], max_tokens=20), lambda text: text[::-1]),
    predicted(request("scored", PROMPT[:2], max_tokens=25, end_ids=(5, 6), logprobs=1), list),
]


def run(asked: list[AdmitRequest], drafter: Drafter | None = None, **options: Any) -> Served:
    settings = {"depth": 2, "lead": 2, "attention": "torch-ref", **options}
    mode = Predicted(drafter, TORCH_SUFFIX_MATCH)
    return serve(make_executor(HashModel(), mode=mode, **settings), asked, chaos=2)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "lookup": lambda: NgramDrafter(3, MatchWindow(1, 4), TORCH_SUFFIX_MATCH),
    "target": lambda: Stumbling(4, every=3),
    "tree": StumblingTree,
}


@pytest.mark.parametrize(
    ("drafter", "pace", "page_size"),
    [
        ("none", (1, 1), 1),
        ("none", (2, 2), 16),
        ("none", (3, 3), 4),
        ("lookup", (2, 2), 4),
        ("target", (3, 3), 1),
        ("tree", (1, 1), 4),
        ("tree", (3, 3), 1),
    ],
)
def test_tokens_are_those_of_plain_decoding(
    drafter: str, pace: tuple[int, int], page_size: int
) -> None:
    settings = {"page_size": page_size, "num_pages": 200 // page_size + 8}
    served = run(ASKED_ALL, DRAFTERS[drafter](), depth=pace[0], lead=pace[1], **settings)
    assert served.outputs == plain_tokens(ASKED_ALL, HashModel())
    assert not served.num_resyncs


def test_predictions_survive_a_small_pool_and_chunks() -> None:
    served = run(ASKED_ALL, num_pages=17, max_batched_tokens=20)
    assert served.outputs == plain_tokens(ASKED_ALL, HashModel())
    assert served.num_retracted


@pytest.mark.parametrize(("edit", "most_windows"), [(list, 2), (one_changed, 4), (three_more, 5)])
def test_a_text_goes_on_behind_what_is_changed_in_it(
    edit: Callable[[list[int]], list[int]], most_windows: int
) -> None:
    for drafter, num_trees in ((None, 0), (StumblingTree(), 2)):
        served = run([predicted(LONG, edit)], drafter, depth=1, lead=1)
        # For 40 tokens; at the end there is room for a tree only.
        assert len(served.batches) <= 1 + most_windows + num_trees
    assert NUM_PREDICTED == 24


def test_wide_windows_are_replayed_once_a_step_has_had_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but every fifth token is right, so several windows have the full width."""
    device = GraphDevice()
    asked = [predicted(LONG, lambda text: [token + (not n % 5) for n, token in enumerate(text)])]
    mode = Predicted(None, TORCH_SUFFIX_MATCH)
    options: dict[str, Any] = {"depth": 1, "lead": 1, "attention": "torch-ref", "graph_rows": 1}
    executor = make_executor(HashModel(), mode=mode, device=device, **options)
    widest: list[ScheduleBatch] = []
    launch = executor.launch

    def launch_after_capture(*batches: ScheduleBatch) -> StepTicket:
        # Graphs are captured while the executor has no step, so the second wide one waits for it.
        if widest:
            assert device.has_captured.wait(60)
        widest.extend(batch for batch in batches if len(array_i32(batch.input_ids)) == 25)
        return launch(*batches)

    monkeypatch.setattr(executor, "launch", launch_after_capture)
    served = serve(executor, asked)
    assert served.outputs == plain_tokens(asked, HashModel())
    assert device.num_captures == 1
    assert 1 <= device.num_replays == len(widest) - 1


def test_only_rows_with_a_prediction_have_windows_in_a_plain_engine() -> None:
    served = run([*ASKED, predicted(LONG, list)], max_rows=6)
    num_drafts = {
        (row, int(count))
        for batch in served.batches
        if batch.verify is not None
        for row, count in zip(
            array_i32(batch.rows).tolist(), array_i32(batch.verify.num_drafts), strict=True
        )
        if count
    }
    assert len({row for row, _ in num_drafts}) == 1
    assert max(count for _, count in num_drafts) == NUM_PREDICTED
    assert run(ASKED).batches[-1].verify is None


def test_a_rows_next_request_does_not_see_the_prediction_of_the_last_one() -> None:
    served = run([predicted(LONG, list), *ASKED], max_rows=1, depth=1, lead=1)
    assert served.outputs == plain_tokens([LONG, *ASKED], HashModel())
    assert all(batch.verify is None for batch in served.batches[-10:])


def test_a_row_with_little_room_has_a_tree_beside_a_row_with_a_chain() -> None:
    """It may not accept more than the depth of a tree, which the scheduler counts with."""
    brief = request("brief", PROMPT[7:13], max_tokens=6)
    asked = [predicted(LONG, list), predicted(brief, lambda text: [*text[:4], text[4] + 1])]
    mode = Predicted(StumblingTree(), TORCH_SUFFIX_MATCH)
    served = serve(make_executor(HashModel(), mode=mode, attention="torch-ref"), asked)
    assert served.outputs == plain_tokens([LONG, brief], HashModel())
    second, third = (batch.kv_lens for batch in served.batches[1:3])
    assert array_i32(second).tolist() == [5, 6]  # both run at once
    assert array_i32(third)[1] <= 6 + 1 + 2  # the root, and the depth of a tree


def test_the_text_is_matched_from_the_first_output_on() -> None:
    num_outputs: list[int] = []

    def watched(histories: Histories, texts: Texts, window: MatchWindow, num: int) -> Tensor:
        num_outputs.extend(texts.num_outputs.tolist())
        return TORCH_SUFFIX_MATCH.text(histories, texts, window, num)

    mode = Predicted(None, SuffixMatch(text=watched))
    # A capture, which an idle device makes, would match a text, too.
    options: dict[str, Any] = {"depth": 1, "lead": 1, "attention": "torch-ref", "graph_rows": 0}
    serve(make_executor(HashModel(), mode=mode, **options), [predicted(LONG, list)])
    assert num_outputs == [1, 1 + 25]
