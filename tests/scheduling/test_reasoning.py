"""The limit of reasoning: the closing tag is forced, whatever is in flight, and at the same place
for every cut of the outputs into steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.output import Retired, StepOutput
from aserve.messages.requests import AdmitRequest, ReasoningIds
from aserve.scheduling.reasoning import MAX_BEFORE, Reasoning
from tests.fakes.toy_device import forced_ids
from tests.scheduling.stage import Stage, ids, query_lens, request, result, rows, spec

IDS = ReasoningIds(opens=((8,), (6, 7)), closes=((1, 1, 2), (3,)), max_tokens=4)


def limited(name: str = "a", **fields: Any) -> AdmitRequest:
    return msgspec.structs.replace(request(name, [5, 6, 7], max_tokens=20), reasoning=IDS, **fields)


def test_the_limit_drops_what_is_in_flight_and_the_tag_is_computed_as_a_chunk() -> None:
    stage = Stage(spec(depth=3, lead=3))
    stage.play(limited(outputs=(b"".join(n.to_bytes(4, "little") for n in (8, 50, 51, 52)),)))
    stage.play(result(1, {1: [53]}))
    said, forced = stage.outputs
    assert array_i32(said.token_ids).tolist() == [53]
    assert (forced.position, array_i32(forced.token_ids).tolist()) == (5, [1, 1, 2])
    (batch,) = stage.batches
    assert (ids(batch), query_lens(batch)) == ([53, 1, 1, 2], [4])
    assert rows(batch) == [batch.row_inits[0].row], "the device learns the row anew"
    stage.play(result(2, {1: [60]}))
    assert not stage.of(StepOutput), "a dropped result counts"
    stage.play(result(3, {1: [61]}))
    stage.play(result(4, {1: [70]}))
    (output,) = stage.outputs
    assert (output.position, array_i32(output.token_ids).tolist()) == (8, [70])


def test_an_answer_that_ended_at_the_limit_before_its_engine_died_is_not_continued() -> None:
    stage = Stage(spec())
    outputs = pack_i32([8, 50, 51, 52, 53])  # as many reasoning tokens as the limit allows
    stage.play(limited(outputs=(outputs,), end_ids=(53,)))
    assert not stage.outputs
    (retired,) = stage.of(Retired)
    assert (retired.reason, retired.stop_id, retired.num_outputs) == ("stop", 53, 5)


@pytest.mark.parametrize("is_open", [False, True])
def test_every_cut_of_the_outputs_reaches_the_limit_at_the_same_place(is_open: bool) -> None:
    """All outputs of six tokens out of those that the tags have, cut at every place."""
    tags = msgspec.structs.replace(IDS, is_open=is_open, max_tokens=2)
    asked = AdmitRequest("a", b"", request("a", [1]).sampling, reasoning=tags)
    for outputs in itertools.product((1, 2, 3, 6, 7, 8), repeat=5):
        lens = [n for n in range(6) if forced_ids(asked, list(outputs[:n]))]
        for cut in range(6):
            reasoning = Reasoning(tags)
            num_read = reasoning.read_to_limit(list(outputs[:cut]))
            if num_read == cut:
                num_read += reasoning.read_to_limit(list(outputs[cut:]))
            expected = lens[0] if lens else 5
            assert num_read == expected, outputs
            if lens:
                assert list(reasoning.missing_ids()) == forced_ids(asked, list(outputs[:expected]))


def test_a_tag_far_behind_the_start_of_the_answer_opens_no_reasoning() -> None:
    reasoning = Reasoning(IDS)
    reasoning.read_rest([50] * (MAX_BEFORE - 1))
    assert reasoning.is_limited
    reasoning.read_rest([50, 8, 51, 52, 53, 54])
    assert not reasoning.is_limited
