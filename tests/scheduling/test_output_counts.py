"""Steps that give a row any number of tokens: none, as a denoising pass or a prefill whose first
token is not sampled yet, a block that begins without a known token, or a path through a tree.
"""

from __future__ import annotations

import msgspec
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import DecodeCaps, EngineSpec
from aserve.messages.output import Retired, StepOutput
from aserve.messages.step import DraftTree, ScheduleBatch, VerifyPlan
from tests.scheduling.stage import Stage, ids, query_lens, request, result, spec

BLOCKS = DecodeCaps(min_tokens_per_step=0, max_tokens_per_step=4, root_len=0)


def engine(caps: DecodeCaps, *, lead: int = 1) -> EngineSpec:
    return msgspec.structs.replace(spec(depth=lead, lead=lead), decode=caps)


def kv_lens(batch: ScheduleBatch) -> list[int]:
    return array_i32(batch.kv_lens).tolist()


def test_a_block_without_a_known_token_is_computed_until_its_tokens_come() -> None:
    stage = Stage(engine(BLOCKS))
    stage.play(request("a", [5, 6, 7], max_tokens=6))
    [prefill] = stage.batches
    assert (ids(prefill), prefill.sample_rows) == ([5, 6, 7], b"")
    stage.play(result(1, {}))
    for iteration in (2, 3):  # two denoising passes over the same positions
        [block] = stage.batches
        assert (kv_lens(block), query_lens(block), ids(block)) == ([3], [4], [-1] * 4)
        assert block.verify is not None
        assert array_i32(block.verify.num_drafts).tolist() == [4]
        assert array_i32(block.expects).tolist() == [iteration - 1 if iteration > 2 else 0]
        stage.play(result(iteration, {1: []}))
        assert stage.of(StepOutput) == []
    stage.play(result(4, {1: [10, 11, 12, 13]}))
    [output] = stage.outputs
    assert array_i32(output.token_ids).tolist() == [10, 11, 12, 13]
    [block] = stage.batches
    assert (kv_lens(block), query_lens(block)) == ([7], [2])  # what max_tokens leaves
    stage.play(result(5, {1: [14, 15]}))
    [end] = stage.of(Retired)
    assert (end.reason, end.num_outputs) == ("length", 6)


def test_blocks_launched_ahead_are_told_bounds_of_their_lengths() -> None:
    stage = Stage(engine(BLOCKS, lead=2))
    stage.play(request("a", [5, 6, 7], max_tokens=20))
    stage.play(result(1, {}))
    [block] = stage.batches
    assert (kv_lens(block), block.bounds) == ([7], b"\x01")
    stage.play(result(2, {1: []}))
    [block] = stage.batches
    assert (kv_lens(block), block.bounds) == ([7], b"\x01")
    stage.play(result(3, {1: [10, 11, 12]}))
    [block] = stage.batches
    assert (kv_lens(block), block.bounds) == ([10], b"\x01")


def test_each_pass_ahead_has_room_for_a_whole_block() -> None:
    """The first block has the end of the prompt, and the host does not know which pass ends it."""
    stage = Stage(engine(msgspec.structs.replace(BLOCKS, whole_windows=True, block_len=4), lead=2))
    stage.play(request("a", [5, 6, 7], max_tokens=20))
    found = [(kv_lens(batch), query_lens(batch)) for batch in stage.batches]
    assert found == [([0], [3]), ([3], [1])]
    for number, (tokens, expected) in enumerate(
        [(None, ([4], [4])), ([], ([7], [4])), ([10], ([8], [4])), ([], ([8], [4]))], start=1
    ):
        stage.play(result(number, {} if tokens is None else {1: tokens}))
        [block] = stage.batches
        assert (kv_lens(block), query_lens(block)) == expected


@pytest.mark.parametrize("lead", [1, 2])
def test_a_prefill_that_gives_no_token_computes_its_last_position_again(lead: int) -> None:
    stage = Stage(engine(DecodeCaps(min_tokens_per_step=0), lead=lead))
    stage.play(request("a", [5, 6, 7], max_tokens=5))
    if lead == 2:
        assert (kv_lens(stage.batches[1]), stage.batches[1].bounds) == ([3], b"\x01")
        stage.play(result(1, {1: []}))
        assert kv_lens(stage.batches[0]) == [3]
        stage.play(result(2, {1: [8]}))
        assert kv_lens(stage.batches[0]) == [4]
    else:
        stage.play(result(1, {1: []}))
        [again] = stage.batches
        assert (kv_lens(again), ids(again), again.bounds) == ([2], [7], b"\x00")
        stage.play(result(2, {1: [8]}))
        assert (kv_lens(stage.batches[0]), ids(stage.batches[0])) == ([3], [8])


def test_a_tree_of_drafts_bounds_the_length_by_its_longest_path() -> None:
    tree = DraftTree(max_depth=2)
    stage = Stage(engine(DecodeCaps(max_tokens_per_step=5, tree=tree), lead=2))
    stage.play(request("a", [5, 6, 7], max_tokens=30))
    _, window = stage.batches
    assert window.verify == VerifyPlan(pack_i32([4]), tree)
    assert (kv_lens(window), query_lens(window), window.bounds) == ([3], [5], b"\x00")
    stage.play(result(1, {1: [8]}))
    [window] = stage.batches
    assert (kv_lens(window), window.bounds) == ([6], b"\x01")  # the root and two drafts
    stage.play(result(2, {1: [9, 10]}))  # one draft was accepted
    [window] = stage.batches
    assert (kv_lens(window), window.bounds) == ([8], b"\x01")


def test_the_depth_of_a_tree_is_bounded_and_that_of_a_chain_is_not() -> None:
    tree = DraftTree(max_depth=3, max_nodes=4)
    depths = [tree.depth(num_drafts) for num_drafts in range(7)]
    assert depths == [0, 1, 2, 3, 3, 5, 6]  # the last two are chains
