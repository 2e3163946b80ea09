"""Every way out: end, cancel, refusal, retraction; one last message, and nothing left behind."""

import msgspec
import numpy as np

from aserve.messages.base import array_f32, array_i32, pack_i32
from aserve.messages.output import Refused, Retired
from aserve.messages.results import RowLogprobs
from tests.scheduling.stage import Stage, cancel, request, result, rows, spec


def outputs(stage: Stage) -> list[list[int]]:
    return [array_i32(output.token_ids).tolist() for output in stage.outputs]


def test_trap_5_a_stop_inside_an_accepted_run_trims_the_rest() -> None:
    stage = Stage(spec(depth=1, lead=1, window=3))
    stage.play(request("a", [5, 6, 7], end_ids=(9,)))
    stage.play(result(1, {1: [20]}))
    stage.play(result(2, {1: [21, 9, 22]}))
    assert outputs(stage) == [[21, 9]]
    (retired,) = stage.of(Retired)
    assert (retired.reason, retired.stop_id, retired.num_outputs) == ("stop", 9, 3)


def test_trap_5_logprobs_are_cut_where_the_tokens_are() -> None:
    stage = Stage(spec(depth=1, lead=1, window=3))
    stage.play(request("a", [5, 6, 7], end_ids=(9,)))
    stage.play(result(1, {1: [20]}))
    values = np.arange(3, dtype=np.float32)
    scored = RowLogprobs(
        row=1,
        chosen=values.tobytes(),
        top_ids=pack_i32([21, 3, 9, 4, 22, 5]),
        top_logprobs=np.repeat(values, 2).tobytes(),
    )
    whole = result(2, {1: [21, 9, 22]})
    stage.play(msgspec.structs.replace(whole, logprobs=(scored,)))
    (output,) = stage.outputs
    (cut,) = output.logprobs
    assert array_f32(cut.chosen).tolist() == [0, 1]
    assert array_i32(cut.top_ids).tolist() == [21, 3, 9, 4]
    assert array_f32(cut.top_logprobs).tolist() == [0, 0, 1, 1]


def test_one_row_has_logprobs_and_its_neighbour_the_token_alone() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7]), request("b", [5, 6, 8]))
    score = np.array([-1], np.float32).tobytes()
    scored = RowLogprobs(row=2, chosen=score, top_ids=pack_i32([21]), top_logprobs=score)
    stage.play(msgspec.structs.replace(result(1, {1: [20], 2: [21]}), logprobs=(scored,)))
    given = [(output.request_id, output.token_ids, output.logprobs) for output in stage.outputs]
    assert given == [("a", pack_i32([20]), ()), ("b", pack_i32([21]), (scored,))]


def test_trap_14_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    stage = Stage(spec(num_pages=5, page_size=4))
    stage.play(request("big", [1] * 10, max_tokens=20))
    (refused,) = stage.of(Refused)
    assert refused.error.status == 400
    assert "8 KV pages" in refused.error.message
    assert "has 4" in refused.error.message
    assert stage.scheduler.is_idle


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    stage = Stage(spec(max_rows=1))
    stage.play(*[request(f"r{i}", [i]) for i in range(4)])
    stage.play(request("late", [1], n=2))
    (refused,) = stage.of(Refused)
    assert (refused.error.status, refused.error.code) == (429, "queue_full")
    assert refused.error.retry_after_s
    again = msgspec.structs.replace(request("late", [1], n=2), is_resumed=True)
    stage.play(again)
    assert stage.of(Refused) == [], "an earlier engine let it in"


def test_a_cancel_frees_row_and_pages_in_the_same_step_and_answers_once() -> None:
    stage = Stage(spec(max_rows=1))
    stage.play(request("a", [5, 6, 7]), request("b", [1, 2]))
    stage.play(cancel("a"), cancel("a"))
    assert [effect.request_id for effect in stage.of(Retired)] == ["a"]
    stage.play(result(1, {1: [4]}))
    assert rows(stage.batches[0]) == [1]  # the next tenant


def test_trap_13_a_cancel_matches_whole_ids_only() -> None:
    stage = Stage(spec())
    stage.play(request("abc", [5, 6, 7]))
    stage.play(cancel("a"), cancel("ab"), cancel(""))
    assert stage.of(Retired) == []
    assert not stage.scheduler.is_idle


def test_children_of_a_group_share_the_prompts_whole_pages() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(request("a", [1, 2, 3, 4, 5, 6], n=3))
    (batch,) = stage.batches
    assert rows(batch) == [1]  # the siblings wait for the page that this one computes
    stage.play(result(1, {1: [9]}))
    (batch,) = stage.batches
    assert array_i32(batch.query_lens).tolist() == [1, 2, 2]
    assert batch.stats.num_cached_tokens == 8


def test_an_end_id_outside_of_the_vocabulary_ends_nothing_and_harms_nobody() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(request("a", [1], max_tokens=3, end_ids=(-1, 100, 2**31, 7)))
    stage.play(result(1, {1: [99]}))
    assert stage.of(Retired) == []
    stage.play(result(2, {1: [7]}))
    [retired] = stage.of(Retired)
    assert (retired.reason, retired.stop_id, retired.num_outputs) == ("stop", 7, 2)
