"""POST /abort_request(s): exact ids, each client its own requests, the administrator all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aserve.http.abort import MAX_ABORTED_IDS
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, bearer

KEYS: dict[str, Any] = {"api_key": "ann,ben", "admin_api_key": "root"}
BODY = {"text": "abc", "rid": "job-1"}


@pytest.fixture
async def paused() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(**KEYS) as echo:
        echo.scheduler.is_paused = True
        yield echo


async def started(
    echo: EchoEngine, body: dict[str, Any], *, path: str = "/generate", key: str = "ann"
) -> asyncio.Task[Answer]:
    num_live = len(echo.scheduler.live)
    task = asyncio.ensure_future(ask(echo, path, body, headers=bearer(key)))
    await echo.until(lambda: len(echo.scheduler.live) > num_live)
    return task


async def aborted(echo: EchoEngine, body: dict[str, Any], *, key: str = "ann") -> int:
    answer = await ask(echo, "/abort_request", body, headers=bearer(key))
    assert answer.status == 200, answer.text
    number: int = answer.json["num_aborted"]
    return number


async def test_an_id_is_matched_exactly_and_within_one_client(paused: EchoEngine) -> None:
    """A prefix match would let a client end the requests of others (CVE-2026-112266)."""
    own = await started(paused, BODY)
    other = await started(paused, BODY, key="ben")
    for rid in ("job", "job-", "job-10", "", "JOB-1"):
        if rid:
            assert await aborted(paused, {"rid": rid}) == 0
    assert await aborted(paused, {"rid": "job-1", "abort_message": "enough"}) == 1
    answer = await own
    reason = {"type": "abort", "message": "enough"}
    assert answer.json["meta_info"]["finish_reason"] == reason
    assert not other.done()
    await paused.until(lambda: len(paused.scheduler.live) == 1)
    assert await aborted(paused, {"rid": "job-1"}) == 0
    assert await aborted(paused, {"rid": "job-1"}, key="root") == 1
    assert (await other).status == 200


async def test_a_batch_and_its_children_end_together(paused: EchoEngine) -> None:
    batch = {"text": ["abc", "def"], "rid": ["x", "y"], "sampling_params": {"n": 2}}
    task = await started(paused, batch)
    assert await aborted(paused, {"rid": "x"}) == 1
    assert await aborted(paused, {"rid": "y"}) == 1
    reasons = [each["meta_info"]["finish_reason"]["type"] for each in (await task).json]
    assert reasons == ["abort"] * 4


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_sequence_that_has_ended_is_not_aborted(
    paused: EchoEngine, *, is_streamed: bool
) -> None:
    body = {"text": "one", "rid": "x", "sampling_params": {"n": 2, "stop": ["n"]}}
    task = await started(paused, body | {"stream": is_streamed})
    paused.scheduler.step()
    await paused.until(lambda: len(paused.scheduler.live) == 1)
    assert await aborted(paused, {"rid": "x"}) == 1
    parts = (await task).chunks if is_streamed else (await task).json
    ends = [(part.get("index"), part["meta_info"]["finish_reason"]) for part in parts]
    reasons = [reason["type"] for _, reason in ends if reason is not None]
    assert reasons == (["stop", "abort"] if is_streamed else ["abort", "stop"]), ends


async def test_any_endpoints_request_ends_by_its_own_request_id(paused: EchoEngine) -> None:
    task = await started(paused, {"prompt": "abc"}, path="/v1/completions")
    call_id = next(iter(paused.scheduler.live))[0].rpartition("-")[0]
    assert await aborted(paused, {"rid": call_id}, key="ben") == 0
    assert await aborted(paused, {"rid": call_id}) == 1
    answer = await task
    assert (answer.status, answer.error["code"]) == (499, "request_aborted")


@pytest.mark.parametrize("field", ["rid", "request_id"])
async def test_a_body_of_any_endpoint_may_have_the_clients_own_id(
    paused: EchoEngine, field: str
) -> None:
    messages = [{"role": "user", "content": "abc"}]
    for path, body in (
        ("/v1/completions", {"prompt": ["abc", "def"]}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "abc"}),
    ):
        task = await started(paused, body | {field: "job-1"}, path=path)
        for rid, key in (("job", "ann"), ("job-1", "ben")):
            assert await aborted(paused, {"rid": rid}, key=key) == 0
        assert (await ask(paused, "/v1/requests/job-1", headers=bearer("ann"))).status == 200
        assert await aborted(paused, {"rid": "job-1"}) == len(body.get("prompt", "x"))
        assert (await task).status in (200, 499)
        assert await aborted(paused, {"rid": "job-1"}) == 0


async def test_several_requests_end_by_a_list_of_ids(paused: EchoEngine) -> None:
    async def asked(body: dict[str, Any], key: str = "ann") -> Answer:
        return await ask(paused, "/abort_requests", body, headers=bearer(key))

    tasks = [await started(paused, BODY | {"rid": rid}) for rid in ("x", "y", "z")]
    assert (await asked({"request_ids": ["x", "y", "w"]}, "ben")).json == {"num_aborted": 0}
    assert (await asked({"request_ids": ["x", "y", "w"]})).json == {"num_aborted": 2}
    assert not tasks[2].done()
    nobody = await asked({"request_ids": []})
    assert (nobody.status, nobody.error["param"]) == (400, "request_ids"), "it does not mean all"
    many = await asked({"request_ids": ["x"] * (MAX_ABORTED_IDS + 1)})
    assert (many.status, many.error["code"]) == (400, "array_above_max_length")
    assert (await asked({"abort_all": True})).status == 403
    assert (await asked({"rid": "z"})).json == {"num_aborted": 1}
    await asyncio.gather(*tasks)


async def test_only_the_administrator_ends_everything(paused: EchoEngine) -> None:
    tasks = [await started(paused, BODY | {"rid": key}, key=key) for key in ("ann", "ben")]
    refused = await ask(paused, "/abort_request", {"abort_all": True}, headers=bearer("ann"))
    assert (refused.status, refused.error["code"]) == (403, "forbidden")
    assert await aborted(paused, {"abort_all": True}, key="root") == 2
    for task in tasks:
        assert (await task).status == 200
    await paused.until(lambda: not paused.scheduler.live)
