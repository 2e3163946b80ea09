"""Running ahead: step N+1 is launched before the tokens of step N are known; what must hold."""

from aserve.messages.base import array_i32
from aserve.messages.output import Retired, StepOutput
from aserve.messages.results import BuildMask, MaskReady
from aserve.messages.step import Launch, Sample
from tests.fakes.toy_device import TOY
from tests.scheduling.stage import Stage, cancel, ids, query_lens, request, result, rows, spec


def test_the_next_step_is_launched_with_a_placeholder_before_the_token_is_known() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7]))
    prefill, decode = stage.batches
    assert (prefill.iteration, ids(prefill), query_lens(prefill)) == (1, [5, 6, 7], [3])
    assert (decode.iteration, ids(decode), array_i32(decode.kv_lens).tolist()) == (2, [-1], [3])
    assert array_i32(decode.expects).tolist() == [1]


def test_trap_1_a_late_result_of_a_finished_request_falls_away_and_frees_nothing_twice() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7], end_ids=(9,)))
    stage.play(result(1, {1: [9]}))
    assert [effect.reason for effect in stage.of(Retired)] == ["stop"]
    stage.play(request("b", [8, 8]))  # takes the row at once: launched later on the same stream
    assert rows(stage.batches[0]) == [1]
    stage.play(result(2, {1: [50]}))  # the wasted step of the first tenant
    assert stage.of(StepOutput) == []
    stage.play(result(3, {1: [51]}))
    (output,) = stage.outputs
    assert output.request_id == "b"
    assert array_i32(output.token_ids).tolist() == [51]


def test_trap_2_middle_chunks_sample_nothing_and_several_are_in_flight() -> None:
    stage = Stage(spec(depth=3, lead=3, max_batched_tokens=2))
    stage.play(request("a", [1, 2, 3, 4, 5], max_tokens=4))
    assert [ids(batch) for batch in stage.batches] == [[1, 2], [3, 4], [5]]
    assert [array_i32(batch.sample_rows).tolist() for batch in stage.batches] == [[], [], [1]]
    assert [array_i32(batch.next_ids).tolist() for batch in stage.batches] == [[3], [5], [-1]]


def test_trap_6_statistics_are_those_of_the_launch() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7]))
    first = stage.batches[0].stats
    stage.play(request("b", [1]), request("c", [2]), cancel("a"))
    assert (first.num_prefill_rows, first.num_prefill_tokens, first.num_running) == (1, 3, 1)


def test_a_held_row_is_launched_first_and_sampled_when_its_mask_is_there() -> None:
    stage = Stage(spec())
    stage.play(request("g", [5, 6], grammar=TOY), request("p", [7, 8, 9]))
    kinds = [type(effect) for effect in stage.effects]
    assert kinds == [
        BuildMask,
        Launch,
    ]  # no second launch: it waits for the mask
    (batch,) = stage.batches
    assert array_i32(batch.held_rows).tolist() == [1]
    assert array_i32(batch.sample_rows).tolist() == [2]
    stage.play(MaskReady("g", 0, 0, b"\xff" * 16))
    assert [type(effect) for effect in stage.effects] == [Sample, Launch]
    assert rows(stage.batches[0]) == [1, 2]


def test_a_launch_waits_for_masks_only_while_another_step_keeps_the_device_busy() -> None:
    stage = Stage(spec())
    stage.play(request("g", [5, 6], grammar=TOY), request("p", [7, 8, 9]))
    stage.play(result(1, {2: [30]}))
    (batch,) = stage.batches
    assert rows(batch) == [2]  # the held row is not named


def test_lead_smaller_than_depth_spreads_rows_over_the_steps_in_flight() -> None:
    stage = Stage(spec(depth=3, lead=1, max_batched_tokens=64))
    stage.play(*[request(name, [1, 2]) for name in "abc"])
    stage.play(result(1, {1: [4], 2: [4], 3: [4]}))
    assert [rows(batch) for batch in stage.batches] == [[1], [2], [3]]
