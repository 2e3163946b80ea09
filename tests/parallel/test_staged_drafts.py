"""Drafters and adapters of a pipeline: the last stage drafts, and the first one embeds its drafts.
Tokens are those of one device. The stages are threads here, which run the loop of a rank's process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.models.stages import StageLayers
from aserve.gpu.parallel.early_drafts import EarlyDrafts
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.parallel.staged_drafts import DraftSender, ReceivedDrafts, TurnDevice
from aserve.gpu.parallel.stages import StagedDecoder, refuse_kv_elsewhere
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.measure_steps import warm_up
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import LoadLora
from aserve.messages.step import DraftTree, PageWrites, VerifyPlan
from tests.fakes.lora_adapters import write_adapter
from tests.gpu.drive import Served, request, serve, serve_between
from tests.parallel.test_rank_traces import joined
from tests.parallel.test_ranks import (
    CROWDED,
    RECIPE,
    asks,
    loaded,
    outputs_after,
    resolved_of,
)

MANY = 2000  # more steps than any of these tests takes
TWO: dict[str, Any] = {"pipeline_parallel_size": 2, "overlap_depth": 2}


def staged(store: Path, **options: Any) -> Served:
    executor = joined(resolved_of(**{**TWO, **CROWDED, **options}), store)
    return serve(executor, asks(), chaos=3, retract_rate=0.2)


@cache
def plain() -> Served:
    """On one device."""
    return serve(loaded(), asks())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", sorted(ALGORITHMS.keys() - {"NGRAM"}))
def test_a_drafter_of_the_last_stage_changes_no_token(drafter: str, tmp_path: Path) -> None:
    """The first stage has to embed the drafts that the last one verifies: other ones would leave
    other KV."""
    two = staged(tmp_path / "store", speculative_algorithm=drafter)
    assert two.outputs == plain().outputs
    assert sum(batch.verify is not None for batch in two.batches) > 5
    assert two.num_retracted > 0
    assert two.num_resyncs == 0


@pytest.mark.slow
@pytest.mark.parametrize("tree", [{}, {"speculative_topk": 3, "speculative_num_steps": 3}])
def test_drafts_are_accepted_as_on_one_device(tree: dict[str, Any], tmp_path: Path) -> None:
    """So the hidden states of the first stage's layers reach the drafter unchanged."""
    settings: dict[str, Any] = {**CROWDED, "speculative_algorithm": "EAGLE3", "num_pages": 60}
    settings |= tree
    alike: dict[str, Any] = {"overlap_depth": 1, "overlap_lead": 1}
    one = serve(loaded(**settings, **alike), asks())
    two = serve(joined(resolved_of(**settings, **{**TWO, **alike}), tmp_path / "store"), asks())
    assert two.outputs == one.outputs
    assert len(two.batches) == len(one.batches)


def test_the_first_stage_begins_a_step_while_the_last_one_verifies_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage waits with its layers until the first one has begun a step for which it has
    drafted."""
    begun = {number: threading.Event() for number in range(MANY)}
    overlapping: list[int] = []
    make, forward = EarlyDrafts.make, StagedDecoder.forward

    def forward_after_note(model: StagedDecoder, *arguments: Any, **named: Any) -> torch.Tensor:
        if model.is_first:
            begun[model.iteration].set()
        return forward(model, *arguments, **named)

    def make_and_wait(early: EarlyDrafts, *arguments: Any) -> None:
        make(early, *arguments)
        for number in early.made:
            if number not in overlapping and begun[number].wait(5.0):
                overlapping.append(number)

    monkeypatch.setattr(EarlyDrafts, "make", make_and_wait)
    monkeypatch.setattr(StagedDecoder, "forward", forward_after_note)
    two = staged(tmp_path / "store", speculative_algorithm="STANDALONE")
    assert two.outputs == plain().outputs
    assert len(overlapping) > 5


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["EAGLE3", "STANDALONE"])
def test_early_drafts_are_those_of_the_turn_of_their_step(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DraftSender.draft
    found: list[dict[int, list[list[int]]]] = []
    num_early = 0

    def noted(sender: DraftSender, runner: StepRunner, rows: DraftRows) -> Drafts:
        drafts = draft(sender, runner, rows)
        is_real = torch.arange(drafts.tokens.shape[1]) < rows.counts[:, None]
        found[-1][rows.iteration] = torch.where(is_real, drafts.tokens, -1).tolist()
        return drafts

    def make(early: EarlyDrafts, *arguments: Any) -> None:
        nonlocal num_early
        before = len(early.made)
        make_early(early, *arguments)
        num_early += len(early.made) - before

    make_early = EarlyDrafts.make
    monkeypatch.setattr(DraftSender, "draft", noted)
    for number, each in enumerate((make, lambda *_: None)):
        found.append({})
        monkeypatch.setattr(EarlyDrafts, "make", each)
        options = {**TWO, **CROWDED, "speculative_algorithm": drafter}
        options |= {"num_pages": 240, "page_size": 1}  # each step brings new pages
        executor = joined(resolved_of(**options), tmp_path / f"store{number}")
        served = serve(executor, asks(), launches_ahead=True)
        assert served.outputs == plain().outputs
    early, in_turn = found
    assert early == in_turn
    assert num_early > 5


@pytest.mark.slow
def test_a_step_that_fails_in_the_last_stage_leaves_no_stage_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails before its drafts are sent. The first stage gives up these drafts, and those of the
    steps behind it, which were refused."""
    draft, failures = DraftSender.draft, iter([False, False, True] + [False] * 4 + [True])

    def fails_at_times(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("the device has a bad moment")
        return draft(*arguments)

    monkeypatch.setattr(DraftSender, "draft", fails_at_times)
    two = staged(tmp_path / "store", speculative_algorithm="STANDALONE")
    assert two.num_resyncs == 2
    assert two.outputs == plain().outputs


def test_drafts_of_a_step_that_made_none_are_given_up() -> None:
    after, before = socket.socketpair()
    last, first = Pipe(None, after), Pipe(before, None)
    sender = DraftSender(ReceivedDrafts(3, None, None, None), last)
    sender.pass_step(7)
    for iteration in (8, 9, 12):  # 10 failed, and 11 was refused
        sender.pass_step(iteration)
    before.settimeout(1.0)
    drafts = torch.zeros((1, 2), dtype=torch.int64)
    assert not first.receive(10, drafts)
    assert not first.receive(11, drafts)
    assert drafts.tolist() == [[0, 0]]
    last.send(13, torch.tensor([[7, 8]]))
    assert first.receive(13, drafts)
    assert drafts.tolist() == [[7, 8]]


TREES: list[dict[str, Any]] = [
    {"speculative_algorithm": "EAGLE", "speculative_token_tree": "static"},
    {"speculative_algorithm": "EAGLE3", "speculative_topk": 3, "speculative_num_steps": 3},
]


@pytest.mark.slow
async def test_a_tree_changes_no_logprob_behind_steps_that_an_engine_measures(
    tmp_path: Path,
) -> None:
    """Numbers of steps and pages come again. A move that is left out leaves other KV."""
    asked = [
        request(ask.request_id, array_i32(ask.prompt_ids).tolist(), max_tokens=40, logprobs=1)
        for ask in asks()
    ]
    executor = joined(resolved_of(**TWO, **TREES[1], num_pages=240), tmp_path / "store")
    executor.start(asyncio.get_running_loop())
    try:
        assert await warm_up(executor)
        many = await serve_between(executor, asked, first_iteration=1)
    finally:
        executor.close()
    one = await asyncio.to_thread(serve, loaded(num_pages=240), asked)
    assert many.outputs == one.outputs
    for key, logprobs in one.logprobs.items():
        assert many.logprobs[key] == pytest.approx(logprobs, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["speculative_algorithm"])
def test_a_draft_tree_on_stages_changes_no_token(
    tree: dict[str, Any], num_stages: int, tmp_path: Path
) -> None:
    sizes = {"pipeline_parallel_size": num_stages, "overlap_depth": num_stages}
    many = staged(tmp_path / "store", **tree, **sizes)
    assert many.outputs == plain().outputs
    assert many.num_retracted > 0
    assert any(batch.verify is not None and batch.verify.tree for batch in many.batches)


def staged_on_host(arrays: HostArrays) -> DeviceArrays:
    words = np.empty(arrays.num_words, np.int32)
    return DeviceArrays(torch.from_numpy(words), arrays.write(words))


ON_HOST = TurnDevice(staged_on_host, Mock())


class MovedPools:
    """Pools of one layer group that note what is moved."""

    page_tables = (None,)
    page_size = 4

    def __init__(self) -> None:
        self.moves: list[tuple[list[int], list[int]]] = []

    def move(self, sources: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> None:
        [source], [target] = sources, targets
        self.moves.append((source.tolist(), target.tolist()))


def test_all_stages_get_trees_and_moves_but_none_to_pages_that_were_given_away() -> None:
    """Slots 8 to 11 are page 2, which step 6 gives to another row before the move of step 5. Before
    that, steps with the same and with later numbers had these pages."""
    ends = [socket.socketpair() for _ in range(2)]
    last, first = Pipe(None, ends[0][0]), Pipe(ends[0][1], ends[1][0])
    middle = Pipe(ends[1][1], None)
    stages = [(ReceivedDrafts(4, first, first, DraftTree(2)), MovedPools())]
    stages.append((ReceivedDrafts(4, middle, None, DraftTree(2)), MovedPools()))
    tree = torch.tensor([[[7, 8, 9]], [[0, 0, 1]]])
    nothing = torch.empty(0, dtype=torch.int64)
    for iteration, values in ((5, nothing), (9, nothing), (5, tree), (6, nothing)):
        last.send(iteration, values)
    last.send(5, torch.tensor([[[6, 7, 11]], [[6, 9, 7]]]), is_move=True)
    last.send(7, tree)
    window = VerifyPlan(pack_i32([3]), DraftTree(2))
    for iteration, page, verify in (
        *((5, 1, None), (9, 1, None)),
        *((5, 1, window), (6, 2, None), (7, 3, window)),
    ):
        writes = (PageWrites(pack_i32([1]), pack_i32([0]), pack_i32([page])),)
        batch = msgspec.structs.replace(
            padding_batch(4, num_groups=1), iteration=iteration, page_writes=writes, verify=verify
        )
        for received, pools in stages:
            runner: Any = SimpleNamespace(state=SimpleNamespace(pools=pools))
            received.begin(runner, batch, ON_HOST)
            if verify is not None:
                rows: Any = SimpleNamespace(rows=[1], num_drafts=3)
                drafts = received.draft(runner, rows)
                assert drafts.parents is not None
                assert torch.stack((drafts.tokens, drafts.parents)).tolist() == tree.tolist()
            received.pass_step(iteration)
    assert [pools.moves for _, pools in stages] == [[([6, 0, 11], [6, 0, 7])]] * 2


def test_a_drafter_that_reads_kv_of_other_stages_is_refused() -> None:
    def layer(index: int, kv_layer: int | None) -> LayerSpec:
        return LayerSpec(index, 1, 1, 8, 1.0, kv_layer=kv_layer)

    own = StageLayers(4, 8, 8, embeds_last=True)
    refuse_kv_elsewhere((layer(0, 7), layer(1, None), layer(2, 1)), own)
    with pytest.raises(ConfigError, match=r"KV of the layers \[0, 3\].*has the layers 4 to 7"):
        refuse_kv_elsewhere((layer(5, 0), layer(1, 3), layer(2, 7)), own)


@pytest.mark.slow
async def test_stages_take_adapters_of_their_layers_and_all_refuse_one_that_does_not_fit(
    tmp_path: Path,
) -> None:
    adapter = write_adapter(tmp_path / "adapter", RECIPE)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16}
    one = loaded(**options)
    expected = await outputs_after(one, [LoadLora(1, 1, str(adapter))])
    one.close()
    assert expected[0] != expected[1]
    resolved = resolved_of(**options, **TWO, tensor_parallel_size=2)
    many = await asyncio.to_thread(joined, resolved, tmp_path / "store")
    try:
        assert await outputs_after(many, [LoadLora(1, 1, str(adapter))]) == expected
        other = write_adapter(tmp_path / "other", RECIPE)
        weights = (other / "adapter_model.safetensors").read_bytes()
        renamed = weights.replace(b"model.layers.0.", b"model.layers.9.")
        (other / "adapter_model.safetensors").write_bytes(renamed)
        refused = await many.run_job(LoadLora(2, 1, str(other)))
        assert refused is not None
        assert "this model takes no adapters for model.layers.9" in refused.message
        assert not many.died.done()
    finally:
        await asyncio.to_thread(many.close)
