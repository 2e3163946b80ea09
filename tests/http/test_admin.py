"""The administrator's endpoints: a flushed prefix cache, and a server that pauses."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aserve.config import Facts, Raw, resolve, shown_settings
from aserve.errors import ConfigError, EngineDead, ErrorInfo
from aserve.http.control.weights import ELSEWHERE
from aserve.http.errors import refused
from aserve.messages.changes import EngineJob, LoadWeights
from aserve.receipts.facts import FactFinder
from aserve.receipts.facts import Facts as ReceiptFacts
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import SPEC
from tests.http.asking import Answer, ask, bearer

PROMPT = {"prompt": "abc", "max_tokens": 50}
ROOT = bearer("root")


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(admin_api_key="root", keep_alive_s=0.05) as engine:
        yield engine


async def administered(echo: EchoEngine, path: str, body: Any = b"{}") -> dict[str, Any]:
    answer = await ask(echo, path, body, headers=ROOT)
    assert answer.status == 200, answer.text
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize("keys", [{}, {"api_key": "ann"}])
async def test_a_flush_separates_earlier_from_later_prompts_also_those_with_a_salt(
    keys: dict[str, Any],
) -> None:
    async with EchoEngine(admin_api_key="root", **keys) as echo:
        bodies: list[dict[str, Any]] = [PROMPT, PROMPT | {"cache_salt": "x"}]
        for _ in range(2):
            for body in bodies:
                await ask(echo, "/v1/completions", body, headers=bearer("ann"))
            await administered(echo, "/flush_cache")
        namespaces = [request.namespace for request in echo.scheduler.admitted]
        assert len(set(namespaces)) == 4
        # A salt cannot name a later epoch, because nobody knows its name before.
        assert not {namespaces[2], namespaces[3]} & {"", "x"}


@pytest.mark.parametrize("folder", ["/proc/traces", "/dev/null"])
async def test_a_folder_in_which_no_trace_can_be_written_ends_the_start(folder: str) -> None:
    """The first profile would be lost when it is written."""
    with pytest.raises(ConfigError, match=f"--profile-dir {folder}: traces cannot be written"):
        async with EchoEngine(profile_dir=folder):
            pass


class WaitingFinder(FactFinder):
    """Finds facts when it may."""

    def __init__(self) -> None:
        chosen = resolve(Raw(), Facts(default_model=str(MODEL_DIR)))
        super().__init__(lambda: MODEL_DIR, shown_settings(chosen))
        self.num_asked = 0
        self.is_asked, self.may_find = asyncio.Event(), asyncio.Event()

    async def find(self, name: str, adapter_dir: Path | None, *, dtype: str) -> ReceiptFacts:
        self.num_asked += 1
        self.is_asked.set()
        await self.may_find.wait()
        return await super().find(name, adapter_dir, dtype=dtype)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_whose_receipt_took_long_finds_no_page_from_before_an_update(
    path: str,
) -> None:
    finder = WaitingFinder()
    async with EchoEngine(admin_api_key="root", receipts=finder) as echo:
        echo.state.settings.spec = SPEC
        prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else PROMPT
        asking = asyncio.create_task(ask(echo, path, prompt | {"max_tokens": 2, "receipt": True}))
        await asyncio.wait_for(finder.is_asked.wait(), 30)
        echo.state.weights = LoadWeights(1, str(MODEL_DIR))
        echo.state.flush_cache()
        finder.may_find.set()
        answer = await asking
        assert (answer.status, answer.json["receipt"]["version"]) == (200, 1)
        assert finder.num_asked == 2, "the first facts are about weights that are gone"
        (admitted,) = echo.scheduler.admitted
        assert admitted.namespace == echo.state.cache_epoch != ""


async def started(echo: EchoEngine) -> asyncio.Task[Answer]:
    echo.scheduler.is_paused = True
    task = asyncio.ensure_future(ask(echo, "/v1/completions", PROMPT))
    await echo.until(lambda: bool(echo.scheduler.live))
    return task


async def test_a_paused_server_ends_what_runs_and_refuses_until_it_continues(
    echo: EchoEngine,
) -> None:
    running = await started(echo)
    paused = await administered(echo, "/pause_generation", {"mode": "abort"})
    assert paused == {"is_paused": True, "num_running": 0}
    for path in ("/pause_generation", "/pause?until_updated=true"):
        answer = await ask(echo, path, {"until_updated": True}, headers=ROOT)
        assert answer.status == 400, "only an update may ask for that"
    assert (await running).error["code"] == "request_aborted"
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/generate", {"text": "a"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        refused = await ask(echo, path, body)
        assert (refused.status, refused.error["code"]) == (503, "server_paused"), path
        assert refused.headers["Retry-After"] == "5"
    echo.scheduler.is_paused = False
    resumed = await administered(echo, "/continue_generation")
    assert resumed == {"is_paused": False, "num_running": 0}
    assert (await ask(echo, "/v1/completions", PROMPT)).status == 200


async def test_a_pause_may_wait_for_what_runs_but_not_longer_than_its_timeout(
    echo: EchoEngine,
) -> None:
    running = await started(echo)
    waiting = {"mode": "wait", "timeout": 0.01}
    assert (await administered(echo, "/pause_generation", waiting))["num_running"] == 1
    pause = asyncio.ensure_future(administered(echo, "/pause_generation", {"mode": "wait"}))
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    assert (await running).status == 200
    assert (await pause)["num_running"] == 0


@pytest.mark.parametrize("body", [{"mode": "retract"}, {"timeout": -1}, {"timeout": 1e300}])
async def test_a_pause_that_is_not_known_is_refused(echo: EchoEngine, body: dict[str, Any]) -> None:
    assert (await ask(echo, "/pause_generation", body, headers=ROOT)).status == 400
    assert not (await ask(echo, "/is_paused", headers=ROOT)).json["is_paused"]


async def test_vllms_names_pause_and_resume_as_well(echo: EchoEngine) -> None:
    running = await started(echo)
    refused = await ask(echo, "/pause?mode=keep", {}, headers=ROOT)
    assert (refused.status, refused.error["param"]) == (400, "mode")
    assert (await administered(echo, "/pause?mode=wait&timeout=0.01"))["num_running"] == 1
    assert (await administered(echo, "/pause"))["num_running"] == 0
    assert (await running).error["code"] == "request_aborted"
    assert not (await administered(echo, "/resume"))["is_paused"]


async def test_a_frozen_collector_skips_what_lives(echo: EchoEngine) -> None:
    try:
        frozen = await administered(echo, "/freeze_gc")
        assert frozen["num_frozen"] > 0 < gc.get_freeze_count()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_what_is_done_otherwise_here_says_how(echo: EchoEngine, path: str) -> None:
    answer = await ask(echo, path, {}, headers=ROOT)
    assert answer.status == 400
    assert ELSEWHERE[path] in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sleep?level=3", None),
        ("/sleep?mode=abort", None),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/wake_up?tags=kv_cache", None),
    ],
)
async def test_a_sleep_that_is_not_possible_is_refused(
    echo: EchoEngine, path: str, body: Any
) -> None:
    answer = await ask(echo, path, body, method="POST", headers=ROOT)
    assert answer.status == 400
    assert (await ask(echo, "/v1/completions", PROMPT)).status == 200, "it is awake"


@pytest.mark.parametrize(
    ("path", "param"),
    [("/update_weights_from_disk", "model_path"), ("/update_weights_from_tensor", "path")],
)
async def test_an_update_from_a_path_that_is_none_is_refused_while_requests_run(
    echo: EchoEngine, path: str, param: str
) -> None:
    """It waited for their ends, and refused new ones meanwhile."""
    echo.scheduler.is_paused = True
    running = asyncio.ensure_future(ask(echo, "/v1/completions", PROMPT))
    await echo.until(lambda: bool(echo.scheduler.admitted))
    async with asyncio.timeout(5):
        for given in ("/no/such\0path", "/no/such/path", ""):
            answer = await ask(echo, path, {param: given}, headers=ROOT)
            assert (answer.status, answer.error["param"]) == (400, param)
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    assert (await running).status == 200


@pytest.mark.parametrize("error", [refused(400, "it does not fit"), RuntimeError("a bug")])
async def test_the_failure_of_a_change_whose_client_has_gone_is_one_line_of_the_log(
    echo: EchoEngine, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """asyncio logged it as an exception that nobody has retrieved."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        begun.set()
        await goes_on.wait()
        raise error

    asked = asyncio.ensure_future(echo.state.carry_out(fail()))
    await begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    goes_on.set()
    await asyncio.wait(echo.state.changes, timeout=5)
    gc.collect()
    (logged,) = caplog.records
    assert logged.getMessage() == f"change failed, its client has gone error={error}"
    assert (logged.exc_info is not None) == isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sleep", b""),
        ("/wake_up", b""),
        ("/update_weights_from_disk", {"model_path": "/"}),
        ("/weights_checker", {}),
    ],
)
async def test_what_must_wait_for_an_update_of_the_weights_may_be_tried_again(
    echo: EchoEngine, path: str, body: Any
) -> None:
    """OpenAI's clients give up at a 400."""
    echo.state.is_updating = True
    answer = await ask(echo, path, body, headers=ROOT)
    assert (answer.status, answer.error["code"]) == (409, "update_running")
    assert answer.headers["Retry-After"] == "5"


async def test_two_sleeps_of_an_engine_that_dies_leave_no_server_that_says_it_sleeps(
    echo: EchoEngine,
) -> None:
    """The second one took the beginning of the first one for a sleep."""
    dies = asyncio.Event()

    async def die(_: EngineJob) -> ErrorInfo:
        await dies.wait()
        return EngineDead("the engine is restarting; try again later").info()

    await echo.loras.open(die)
    sleeps = [asyncio.ensure_future(ask(echo, "/sleep", b"", headers=ROOT)) for _ in range(2)]
    await asyncio.wait(sleeps, timeout=0.1)
    dies.set()
    assert [answer.status for answer in await asyncio.gather(*sleeps)] == [503, 503]
    assert not echo.state.is_asleep
