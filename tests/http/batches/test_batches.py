"""Batches by OpenAI's client: their life, restarts in the middle of it, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Batch

from aserve.batches import runner
from aserve.batches.records import FileObject
from aserve.batches.store import Store
from aserve.errors import AserveError, QueueFull
from aserve.http import state
from aserve.http.batches import handlers, lines
from aserve.http.openai.completions import completion_call
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import SPEC
from tests.http.asking import ask, bearer

COMPLETIONS: Any = "/v1/completions"


def line(custom_id: str, body: Any, url: str = COMPLETIONS, method: str = "POST") -> bytes:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode()


def prompts(number: int) -> bytes:
    return b"\n".join(line(f"c{i}", {"prompt": f"p{i}", "max_tokens": 9}) for i in range(number))


async def create(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = COMPLETIONS, **more: Any
) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(60):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    content = b"\n\n".join(
        [
            line("b", {"prompt": "xy", "max_tokens": 2}),
            line("a", {"prompt": "z", "temperature": 9}),
            line("s", {"prompt": "z", "stream": True}),
            line("n", {"prompt": "zz", "model": "none"}),
            line("l", {"prompt": "q", "priority": -5, "n": 2}),
            line("u", {"prompt": "q", "watermark": True}),
        ]
    )
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await create(echo.client, content, metadata={"for": "us"})
        assert (batch.status, batch.metadata) == ("validating", {"for": "us"})
        batch = await ended(echo.client, batch)
        counts = batch.request_counts
        assert batch.status == "completed"
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (6, 2, 4)
        assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0)
        good = await results(echo.client, batch.output_file_id)
        assert [each["custom_id"] for each in good] == ["b", "l"]
        assert good[0]["response"]["body"]["choices"][0]["text"] == "xy"
        assert len(good[1]["response"]["body"]["choices"]) == 2
        bad = await results(echo.client, batch.error_file_id)
        statuses = {each["custom_id"]: each["response"]["status_code"] for each in bad}
        assert statuses == {"a": 400, "s": 400, "n": 404, "u": 400}
        assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
        assert {each.priority for each in echo.scheduler.admitted} == {lines.LOWEST_PRIORITY}
        listed = [each.id async for each in echo.client.batches.list(limit=1)]
        assert listed == [batch.id]
        names = [file.purpose async for file in echo.client.files.list(order="asc", limit=2)]
        assert names == ["batch", "batch_output", "batch_output"]


@pytest.mark.parametrize(
    ("endpoint", "body", "member"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "choices"),
        ("/v1/embeddings", {"input": "hi"}, "data"),
    ],
)
async def test_other_endpoints(tmp_path: Path, endpoint: Any, body: Any, member: str) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await ended(
            echo.client, await create(echo.client, line("x", body, endpoint), endpoint)
        )
        (only,) = await results(echo.client, batch.output_file_id)
        assert only["response"]["body"][member]


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await create(echo.client, prompts(6))
        await echo.until(lambda: len(echo.scheduler.admitted) >= 3)
        echo.scheduler.is_paused = True
    answered = len(echo.scheduler.admitted)
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await ended(echo.client, batch)
        assert batch.status == "completed"
        again = len(echo.scheduler.admitted)
        assert 6 <= answered + again <= 7, "only the line that was under way is answered anew"
        good = await results(echo.client, batch.output_file_id)
        assert [each["custom_id"] for each in good] == [f"c{i}" for i in range(6)]


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await create(echo.client, prompts(400))
        await echo.until(lambda: len(echo.scheduler.admitted) >= 3)
        echo.scheduler.is_paused = True
        with pytest.raises(openai.BadRequestError, match="is open"):
            await echo.client.files.delete(batch.input_file_id)
        assert (await echo.client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(echo.client, batch)
        assert batch.status == "cancelled"
        kept = await results(echo.client, batch.output_file_id)
        assert 2 <= len(kept) < 400
        assert (await echo.client.batches.cancel(batch.id)).status == "cancelled"
        assert (await echo.client.files.delete(batch.input_file_id)).deleted
        assert not echo.scheduler.live, "the line under way was cancelled in the engine"


async def test_a_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(handlers.WINDOWS, "24h", 1)
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        echo.scheduler.is_paused = True
        batch = await ended(echo.client, await create(echo.client, prompts(2)))
        assert (batch.status, batch.output_file_id) == ("expired", None)


async def test_a_line_waits_for_an_engine_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        echo.scheduler.refusal = QueueFull("full").info()
        batch = await create(echo.client, prompts(1))
        await echo.until(lambda: len(echo.scheduler.admitted) >= 3)
        echo.scheduler.refusal = None
        assert (await ended(echo.client, batch)).output_file_id


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused for now is tried again soon."""
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    monkeypatch.setattr(state, "RETRY_AFTER_S", 0.01)


@pytest.mark.usefixtures("soon")
async def test_a_line_waits_until_the_server_knows_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        look = state.ServerState.refusal

        def refusal(own: state.ServerState) -> AserveError | None:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 3:
                own.phase = "ready"
            return look(own)

        def made(*args: Any) -> Any:
            assert echo.state.phase == "ready", "until then an adapter of the line is unknown"
            return completion_call(*args)

        monkeypatch.setattr(lines, "completion_call", made)
        echo.state.phase = "starting"
        monkeypatch.setattr(state.ServerState, "refusal", refusal)
        batch = await ended(echo.client, await create(echo.client, prompts(1)))
        assert (batch.status, num_looks >= 3) == ("completed", True)
        assert batch.output_file_id


@pytest.mark.usefixtures("soon")
async def test_a_line_that_a_pause_has_ended_is_tried_again(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path), admin_api_key="root") as echo:
        echo.scheduler.is_paused = True
        batch = await create(echo.client, prompts(1))
        await echo.until(lambda: bool(echo.scheduler.live))
        for path in ("/pause_generation", "/continue_generation"):
            answer = await ask(echo, path, {}, headers=bearer("root"))
            assert answer.status == 200
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        counts = (await ended(echo.client, batch)).request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (1, 0)


@pytest.mark.usefixtures("soon")
async def test_lines_of_a_batch_find_no_page_from_before_a_flush(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path), admin_api_key="root") as echo:
        echo.scheduler.is_paused = True
        batch = await create(echo.client, prompts(2))
        await echo.until(lambda: bool(echo.scheduler.live))
        for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
            assert (await ask(echo, path, {}, headers=bearer("root"))).status == 200
        num_before = len(echo.scheduler.admitted)
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        await ended(echo.client, batch)
        later = echo.scheduler.admitted[num_before:]
        assert {request.namespace for request in later} == {echo.state.cache_epoch}


async def test_a_failure_of_ours_fails_the_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        with monkeypatch.context() as patch:
            patch.setattr(lines, "completion_call", broken)
            batch = await ended(echo.client, await create(echo.client, prompts(2)))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert "broken" not in str(batch.errors)
        assert (await ended(echo.client, await create(echo.client, prompts(2)))).output_file_id


@pytest.mark.parametrize("is_failed", [False, True])
async def test_a_batch_ends_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_failed: bool
) -> None:
    """What a failed try has written does not stay, and nobody sees an end without its files."""
    tries = [asyncio.Event() for _ in range(3)]
    add_file, loop, num_tries = Store.add_file, asyncio.get_running_loop(), itertools.count()

    def full(store: Store, record: FileObject, owner: str) -> FileObject:
        if record.purpose == "batch":
            return add_file(store, record, owner)
        loop.call_soon_threadsafe(tries[min(next(num_tries), 2)].set)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "END_AGAIN_S", 0.01)
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "add_file", full)
            if is_failed:
                patch.setattr(Store, "add_result", fail_after_first(Store.add_result))
            batch = await create(echo.client, prompts(2))
            async with asyncio.timeout(10):
                await tries[2].wait()
            shown = await echo.client.batches.retrieve(batch.id)
            assert (shown.status, shown.output_file_id) == ("finalizing", None)
        batch = await ended(echo.client, batch)
        assert batch.status == ("failed" if is_failed else "completed")
        assert len(await results(echo.client, batch.output_file_id)) == 2 - is_failed
        contents = {path.name for path in (tmp_path / "contents").iterdir()}
        assert contents == {batch.input_file_id, batch.output_file_id}


def sqlite_full() -> sqlite3.OperationalError:
    """Returns the error of a database that may not grow."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as refused:
            base.execute("CREATE TABLE numbers (number INTEGER)")
    return refused.value


def fail_after_first(add: Callable[..., None]) -> Callable[..., None]:
    def add_or_fail(store: Store, batch_id: str, line: int, *result: Any) -> None:
        if line:
            raise sqlite_full()
        add(store, batch_id, line, *result)

    return add_or_fail


async def test_a_dead_runner_takes_no_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Store, "open_batches", broken)
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        with pytest.raises(openai.InternalServerError, match="batches have failed"):
            await create(echo.client, prompts(1))
    assert any(each.levelname == "CRITICAL" for each in caplog.records)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (line("a", {}) + b"\n{", "invalid_line", 2),
        (b"\xff", "invalid_line", 1),
        (b"[" * 500, "invalid_line", 1),
        (b'{"custom_id": "a"}', "invalid_line", 1),
        (line("a", {}, "/v1/embeddings"), "invalid_url", 1),
        (line("a", {}, method="GET"), "invalid_url", 1),
        (line("a", {}) + b"\n\n" + line("a", {}), "duplicate_custom_id", 3),
        (line("a", {"prompt": "x" * 5000}) + b"\n" + line("b", {}), "line_too_long", 1),
    ],
)
async def test_a_wrong_file_fails_the_batch(
    tmp_path: Path, content: bytes, code: str, number: int | None
) -> None:
    async with EchoEngine(files_dir=str(tmp_path), max_body_size=4096) as echo:
        batch = await ended(echo.client, await create(echo.client, content))
        assert batch.status == "failed"
        assert batch.errors is not None
        (error,) = batch.errors.data or []
        assert (error.code, error.line) == (code, number)
        assert not echo.scheduler.admitted


async def test_files_are_their_owners(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path), api_key="one,two") as echo:
        one, two = (echo.client.with_options(api_key=key) for key in ("one", "two"))
        batch = await ended(one, await create(one, prompts(1)))
        assert [each.id async for each in two.batches.list()] == []
        assert [each.id async for each in two.files.list()] == []
        for refused in (
            two.batches.retrieve(batch.id),
            two.batches.cancel(batch.id),
            two.files.content(batch.input_file_id),
            two.files.delete(batch.input_file_id),
            two.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        assert (await one.files.content(batch.input_file_id)).content == prompts(1)


async def test_uploads_are_bounded_and_leave_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "files_dir": str(tmp_path),
        "max_file_size": 4000,
        "files_size": 9000,
    }
    async with EchoEngine(**options, max_body_size=1024) as echo:
        client = echo.client.with_options(max_retries=0)
        big = ("a.jsonl", b"x" * 3900)
        kept = await client.files.create(file=big, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="--max-file-size"):
            await client.files.create(file=("b", b"x" * 4001), purpose="batch")
        other = await client.files.create(file=big, purpose="batch")
        with pytest.raises(openai.RateLimitError, match="--files-size"):
            await client.files.create(file=big, purpose="batch")
        await client.files.delete(other.id)
        for form in ({"purpose": "batch"}, {"file": b"x"}, {"purpose": "x" * 99, "file": b"x"}):
            async with echo.web.post("/v1/files", data=form) as response:
                assert response.status in (400, 413, 415), form
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        for body in (b"--b\r\n", b"junk", b"--b\r\nContent-Disposition: x\r\n\r\ny\r\n--b--"):
            async with echo.web.post("/v1/files", data=body, headers=headers) as response:
                assert response.status == 400, body
        assert [path.name for path in (tmp_path / "contents").iterdir()] == [kept.id]
        (tmp_path / "contents" / "left-by-a-crash").touch()
    async with EchoEngine(**options) as echo:
        assert [path.name for path in (tmp_path / "contents").iterdir()] == [kept.id]


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\nx\r\n'
FIELD = b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n'
CHARSET = b'--b\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n%b\r\n' % (40 * b"x")
END = b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (PURPOSE + FILE % b"a" + FILE % b"a" + END, "two parts with the name 'file'"),
        (b"\n" * 300_000 + PURPOSE + FILE % b"a" + END, "lines outside"),
        (PURPOSE + FILE % b"a" + b"".join(FIELD % i for i in range(5000)) + END, "lines outside"),
        (PURPOSE + FILE % (b"a" * 9000) + END, "Got more than"),
        (b"--b\r\n" + b"X: y\r\n" * 200 + b"\r\n\r\n" + END, "Too many headers"),
        (CHARSET + PURPOSE + FILE % b"a" + END, "The form is not valid: Invalid default charset."),
        (b"--b\r\nno colon\r\n" + END, "The form is not valid: Invalid HTTP header:"),
    ],
    ids=[
        *("two files", "preamble", "many fields", "long header", "many headers"),
        *("long charset", "no header"),
    ],
)
async def test_a_form_that_would_hold_up_the_loop_or_fill_the_disk_is_refused(
    tmp_path: Path, body: bytes, words: str
) -> None:
    """aiohttp reads the lines of a preamble and the parts of a form without a turn of the loop, and
    two files were one, of up to twice the size.
    """
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        async with echo.web.post("/v1/files", data=body, headers=FORM) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]
        assert not list((tmp_path / "contents").iterdir())


async def test_a_file_whose_name_is_not_utf8_is_kept(tmp_path: Path) -> None:
    body = PURPOSE + FILE % b"a\xff" + END
    async with (
        EchoEngine(files_dir=str(tmp_path)) as echo,
        echo.web.post("/v1/files", data=body, headers=FORM) as response,
    ):
        assert (await response.json())["filename"] == "a\\udcff"


async def test_a_wrong_field_of_a_line_is_named_with_its_whole_path(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        batch = await create(echo.client, line("a", {"prompt": 5}))
        batch = await ended(echo.client, batch)
        (result,) = await results(echo.client, batch.error_file_id)
        assert result["response"]["body"]["error"]["param"] == "body.prompt"


async def test_an_upload_to_a_folder_that_is_away_is_refused_and_not_called_full(
    tmp_path: Path,
) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        contents = tmp_path / "contents"
        contents.rename(tmp_path / "away")
        client = echo.client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match="cannot use its files") as refused:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (503, "files_unusable")
        (tmp_path / "away").rename(contents)
        await client.files.create(file=("a", b"x"), purpose="batch")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_an_upload_without_room_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        monkeypatch.setattr(Store, "append", full)
        client = echo.client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match="cannot use its files") as refused:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (503, "files_full")


async def test_an_error_of_the_database_without_a_code_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own, such as of a damaged text, have none."""

    def damaged(*_: object) -> None:
        raise sqlite3.OperationalError("Could not decode to UTF-8 column 'owner'")

    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        monkeypatch.setattr(Store, "page", damaged)
        with pytest.raises(openai.InternalServerError, match="Could not decode") as refused:
            await echo.client.with_options(max_retries=0).files.list()
        assert (refused.value.status_code, refused.value.code) == (503, "files_unusable")


@pytest.mark.parametrize("method", ["add_file", "add_batch", "save_batch", "delete_file"])
async def test_what_sqlite_cannot_write_on_a_full_disk_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*_: object) -> None:
        raise sqlite_full()

    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        client = echo.client.with_options(max_retries=0)
        echo.scheduler.is_paused = True
        unused = await client.files.create(file=("a", b"x"), purpose="batch")
        batch = await create(client, prompts(1))
        await echo.until(lambda: len(echo.scheduler.live) == 1)
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "add_file": lambda: client.files.create(file=("a", b"x"), purpose="batch"),
            "add_batch": lambda: client.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            ),
            "save_batch": lambda: client.batches.cancel(batch.id),
            "delete_file": lambda: client.files.delete(unused.id),
        }
        with monkeypatch.context() as patch:
            patch.setattr(Store, method, full)
            with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
                await asked[method]()
        assert (refused.value.status_code, refused.value.code) == (503, "files_full")


async def test_without_a_folder_there_are_no_files() -> None:
    async with EchoEngine() as echo:
        with pytest.raises(openai.NotFoundError, match="--files-dir"):
            await echo.client.files.list()


async def test_lines_under_way_leave_rows_free(tmp_path: Path) -> None:
    async with EchoEngine(files_dir=str(tmp_path)) as echo:
        echo.state.settings.spec = msgspec.structs.replace(SPEC, max_rows=8)
        echo.scheduler.is_paused = True
        batch = await create(echo.client, prompts(20))
        await echo.until(lambda: len(echo.scheduler.live) == 6)
        other = asyncio.ensure_future(echo.client.completions.create(model="echo", prompt="z"))
        await echo.until(lambda: len(echo.scheduler.live) == 7)
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        await other
        assert (await ended(echo.client, batch)).status == "completed"
