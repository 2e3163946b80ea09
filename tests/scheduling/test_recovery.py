"""A step that fails: what is outstanding is dropped, halves are tried, the guilty request ends."""

from aserve.errors import StepError
from aserve.messages.base import array_i32
from aserve.messages.output import Retired
from aserve.messages.results import StepFailed
from aserve.messages.step import Resync
from tests.scheduling.stage import Stage, ids, request, result, rows, spec


def failed(iteration: int) -> StepFailed:
    return StepFailed(iteration, StepError("injected").info())


def test_a_failed_step_is_resynchronised_and_its_rows_are_told_to_the_device_anew() -> None:
    stage = Stage(spec())
    stage.play(request("a", [5, 6, 7]))
    stage.play(failed(1))
    assert stage.of(Resync) == [Resync(3)]
    (batch,) = stage.batches
    assert (batch.iteration, ids(batch)) == (3, [5, 6, 7])
    assert [init.row for init in batch.row_inits] == [1]
    assert array_i32(batch.page_writes[0].columns).tolist() == [0]


def test_halves_run_alone_until_the_guilty_row_is_found() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(
        *[request(name, [1, 2, 3]) for name in ("a",)], *[request(n, [9, int(n)]) for n in "234"]
    )
    assert rows(stage.batches[0]) == [1, 2, 3, 4]
    stage.play(failed(1))
    assert rows(stage.batches[0]) == [1, 2]
    stage.play(result(2, {1: [50], 2: [50]}))
    assert rows(stage.batches[0]) == [3, 4]
    stage.play(failed(3))
    assert rows(stage.batches[0]) == [3]
    stage.play(failed(4))
    assert rows(stage.batches[0]) == [3]
    stage.play(failed(5))
    assert [(e.request_id, e.reason) for e in stage.of(Retired)] == [("3", "error")]
    assert rows(stage.batches[0]) == [4]


def test_nobody_is_admitted_while_halves_are_tried() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(request("a", [1, 2]), request("b", [3, 4]))
    stage.play(failed(1), request("c", [5]))
    assert rows(stage.batches[0]) == [1]
    stage.play(result(2, {1: [9]}))
    assert rows(stage.batches[0]) == [2]
    stage.play(result(3, {2: [9]}))
    assert 3 in rows(stage.batches[0])
