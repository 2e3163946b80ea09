"""Bugs of speculative decoding that other servers had, and that no other test of this folder would
see: a prefix hit without draft KV, a rejection that comes too late, an end within an accepted run,
embeddings of other rows, a tree whose result depends on the order of siblings, and a relay field
that was not written. The names of these tests, and of some in other files, have the numbers of the
bugs in the project's catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import Attend
from aserve.gpu.spec.base import AFTER_NORM, DraftRows, Drafts
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.gpu.spec.recurrent import RecurrentChain
from aserve.gpu.spec.recurrent_tree import RecurrentTree
from aserve.gpu.spec.tree_growth import TreeSize
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, FutureMap
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from tests.fakes.drafters import Stumbling, StumblingTree, speculative
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.hidden_draft import (
    HiddenDraft,
    HiddenModules,
    pool_kv,
    scratch_kv,
    target_hidden,
    text_of,
)
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens
from tests.gpu.spec.test_mode import ASKED, PROMPT

PAGE = 4


def chain(model: HiddenDraft) -> Speculative:
    return Speculative(RecurrentChain(model, 3, hidden_size=32, inputs=AFTER_NORM))


def run(drafter: Stumbling, asked: list[AdmitRequest], **options: Any) -> Served:
    settings: dict[str, Any] = {"depth": 1, "lead": 1, "attention": "torch-ref", **options}
    return serve(make_executor(HashModel(), mode=speculative(drafter), **settings), asked)


@pytest.mark.parametrize("num_shared", [7, 8, 9, 12])
def test_b05_b33_a_prefix_hit_has_the_draft_kv_of_its_tokens(num_shared: int) -> None:
    """The draft KV at a position depends on the token after it, so a page is shared only where
    that token is the same."""
    model, target = HiddenDraft(), HashModel()
    executor = make_executor(
        target, mode=chain(model), drafter=model, page_size=PAGE, max_rows=1, depth=1, lead=1
    )
    first = request("first", PROMPT[:13])
    second = request("second", [*PROMPT[:num_shared], 36, 35], max_tokens=14)
    served = serve(executor, [first, second])
    assert served.num_cached == (num_shared - 1) // PAGE * PAGE
    assert served.outputs == plain_tokens([first, second])
    text = text_of(second, served)
    found = pool_kv(executor, text)
    assert found is not None
    expected = scratch_kv(model, torch.tensor(text[1:]), target_hidden(target, text)[:-1])
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafter", [lambda: Stumbling(4), StumblingTree])
def test_a_turn_that_goes_on_finds_no_kv_of_rejected_drafts(
    drafter: Callable[[], Stumbling], page_size: int
) -> None:
    """The prompt of each turn is all that was said before, so its prefix was written by windows."""
    asked, text = [], PROMPT[:5]
    for turn in range(3):
        asked.append(request(f"turn {turn}", text, max_tokens=14, temperature=0.8, seed=turn))
        text = [*text, *plain_outputs(HashModel(), asked[-1]), turn]
    options: dict[str, Any] = {"page_size": page_size, "max_rows": 1, "num_pages": 80}
    served = run(drafter(), asked, **options)
    assert served.outputs == plain_tokens(asked)
    # All that has KV: the last token of a turn was never an input.
    known = [len(PROMPT[:5]) + 15 * turn - 2 for turn in (1, 2)]
    assert served.num_cached == sum(num // page_size * page_size for num in known)


@pytest.mark.parametrize("num_drafts", [1, 2, 8])
@pytest.mark.parametrize("every", [1, 1000], ids=["all-rejected", "all-accepted"])
def test_b07_b20_tokens_are_right_whatever_is_rejected(num_drafts: int, every: int) -> None:
    served = run(Stumbling(num_drafts, every=every), ASKED, depth=2, lead=2)
    assert served.outputs == plain_tokens(ASKED)


@pytest.mark.parametrize("is_tree", [False, True])
def test_b09_an_answer_ends_at_every_place_of_an_accepted_run(is_tree: bool) -> None:
    """By an id and by the number of tokens; nothing of the run comes after the end."""
    asked, whole = [], plain_outputs(HashModel(), request("", PROMPT[:6], max_tokens=14))
    for place, token in enumerate(whole):
        asked.append(request(f"id {place}", PROMPT[:6], max_tokens=14, end_ids=(token,)))
        asked.append(request(f"cap {place}", PROMPT[:6], max_tokens=1 + place))
    drafter = StumblingTree(every=1000) if is_tree else Stumbling(5, every=1000)
    served = run(drafter, asked, depth=2, lead=2)
    assert served.outputs == plain_tokens(asked)
    ends = {len(whole[: whole.index(token) + 1]) for token in whole}
    assert {len(served.outputs[f"id {n}", 0]) for n in range(len(whole))} == ends
    assert len(ends) > 8
    assert all(len(reasons) == 1 for reasons in served.reasons.values())


@pytest.mark.parametrize("is_tree", [False, True])
def test_b17_embeddings_beside_windows_are_those_of_their_own_prompt(is_tree: bool) -> None:
    """Rows with windows and rows of prompts have places in one step, whose lengths differ."""
    embedded = [
        request(f"embed {num}", PROMPT[:num], max_tokens=1, embeds=True) for num in (3, 11, 1, 6)
    ]
    asked = [ASKED[0], *embedded[:2], *ASKED[1:3], *embedded[2:]]
    drafter = StumblingTree() if is_tree else Stumbling(4)
    served = run(drafter, asked, depth=2, lead=2, max_batched_tokens=7)
    alone = serve(make_executor(HashModel(), attention="torch-ref"), embedded)
    assert served.outputs == plain_tokens(asked)
    assert any(b.verify and any(array_i32(b.verify.num_drafts) == 0) for b in served.batches)
    for each in embedded:
        [own], [expected] = (which.embeddings[each.request_id, 0] for which in (served, alone))
        np.testing.assert_allclose(own, expected, atol=1e-6)


class Permuted(StumblingTree):
    """The same trees, with siblings in the other order."""

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        drafts = super().draft(runner, rows)
        assert drafts.parents is not None
        order, numbers = torch.tensor([1, 0, 3, 2]), torch.tensor([0, 2, 1, 4, 3])
        return Drafts(drafts.tokens[:, order], numbers[drafts.parents[:, order]])


def test_the_order_of_siblings_changes_nothing() -> None:
    warm: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    asked = [
        request("greedy", PROMPT[:5], max_tokens=41, logprobs=2),
        request("warm", PROMPT[:6], max_tokens=41, logprobs=2, **warm),
    ]
    one, other = (run(kind(), asked) for kind in (StumblingTree, Permuted))
    assert other.outputs == one.outputs == plain_tokens(asked)
    assert other.logprobs == one.logprobs
    lens = [[batch.kv_lens for batch in served.batches] for served in (one, other)]
    assert lens[0][:10] == lens[1][:10]  # at their ends, rows have parts of trees
    assert len(lens[0]) < 30


@pytest.mark.parametrize("page_size", [1, 16])
def test_b35_wide_trees_of_several_rows_have_room(page_size: int) -> None:
    """Each row writes the nodes of three levels with eight branches each, and verifies 31."""
    model = HiddenDraft()
    link = RecurrentChain(model, 32, hidden_size=32, inputs=AFTER_NORM)
    mode = Speculative(RecurrentTree(link, TreeSize(4, 8, 31)))
    num_pages = 1 + 5 * -(-70 // page_size)
    settings: dict[str, Any] = {"page_size": page_size, "num_pages": num_pages, "depth": 2}
    executor = make_executor(
        HashModel(), mode=mode, drafter=model, attention="torch-ref", lead=2, **settings
    )
    asked = [
        request(f"{row}", PROMPT[row : row + 5], max_tokens=55, temperature=0.5 * row, seed=row)
        for row in range(5)
    ]
    served = serve(executor, asked)
    assert served.outputs == plain_tokens(asked)
    windows = [array_i32(b.verify.num_drafts).tolist() for b in served.batches if b.verify]
    assert max(window.count(31) for window in windows) > 1
    assert not served.num_resyncs


class Careful(HiddenDraft):
    """Fails where it reads what was never written."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        assert hidden is not None
        assert hidden.isfinite().all(), "the drafter reads a relay field that was not written"
        assert ((input_ids >= 0) & (input_ids < VOCAB)).all()
        return super().forward(input_ids, positions, attend, hidden=hidden)


def poison(relay: FutureMap, rows: Tensor, without: Container[str] = ()) -> None:
    for name, table in relay._fields.items():
        if name not in (LAST_TOKEN, SEQ_LEN) and name not in without:
            table[rows] = float("nan") if table.is_floating_point() else -99


def poison_between_steps(mode: Speculative, patch: pytest.MonkeyPatch) -> None:
    """What a step has read of the drafter's fields is poisoned at once, and the others, which are
    for one step, when the next step begins."""
    own = {field.name for field in mode._drafter.fields}
    read, draft = FutureMap.read, Speculative.draft

    def read_once(self: FutureMap, name: str, rows: Tensor) -> Tensor:
        values = read(self, name, rows)
        if name in own:
            poison(self, rows, without=self._fields.keys() - {name})
        return values

    def draft_anew(
        self: Speculative, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays
    ) -> None:
        poison(runner.relay, torch.arange(len(runner.relay.written_iter)), without=own)
        draft(self, runner, plan, arrays)

    patch.setattr(FutureMap, "read", read_once)
    patch.setattr(Speculative, "draft", draft_anew)


@pytest.mark.parametrize("kind", ["chain", "modules", "tree"])
def test_b18_no_step_reads_a_relay_field_that_its_row_has_not_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields are poisoned between steps, and those of a row when it begins. Rows begin again
    and again: there are more requests than rows, and the pool is too small for all. What was read
    shows as a failed step, or as a NaN in the draft KV."""
    forget, num_poisoned = FutureMap.forget, 0

    def forget_and_poison(self: FutureMap, rows: Tensor) -> None:
        nonlocal num_poisoned
        num_poisoned += len(rows)
        forget(self, rows)
        poison(self, rows)

    monkeypatch.setattr(FutureMap, "forget", forget_and_poison)
    model: Any = None
    if kind == "chain":
        model = Careful()
        mode = chain(model)
    elif kind == "modules":
        model = HiddenModules(3)  # which compute rows that nobody keeps from anything
        mode = Speculative(MultiLayer(model.modules, hidden_size=32, inputs=AFTER_NORM))
    else:
        mode = speculative(StumblingTree())
    options: dict[str, Any] = {"depth": 2, "lead": 2, "max_rows": 3, "num_pages": 17}
    # A capture reads whatever padding rows hold.
    executor = make_executor(
        HashModel(), mode=mode, drafter=model, attention="torch-ref", graph_rows=0, **options
    )
    poison(executor._runner.relay, torch.arange(4))
    poison_between_steps(mode, monkeypatch)
    served = serve(executor, ASKED, chaos=3)
    assert served.outputs == plain_tokens(ASKED)
    assert served.num_retracted
    assert num_poisoned > len(ASKED)
    assert not served.num_resyncs
    texts = [text_of(asked, served) for asked in ASKED if model is not None]
    kept = [(text, kv) for text in texts if (kv := pool_kv(executor, text)) is not None]
    assert kept or model is None
    for text, layers in kept:
        for index, parts in layers.items():
            assert all(part[: len(text) - 1 - index].isfinite().all() for part in parts)
