"""/v1/files and /v1/batches, which exist on a server with --files-dir."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import BodyPartReader, MultipartReader, StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from aserve.batches.records import (
    BatchBody,
    BatchObject,
    Deleted,
    FileObject,
    ListQuery,
    Page,
)
from aserve.batches.runner import BatchRunner, now
from aserve.batches.store import Owned, Store, new_id
from aserve.errors import InvalidRequest, NotFound
from aserve.http.batches.lines import ENDPOINTS, HttpLineWork
from aserve.http.body import parse_query
from aserve.http.delivery import json_response
from aserve.http.errors import refused
from aserve.http.intake import MIN_BYTES_PER_S
from aserve.http.openai.limits import Range, check_within
from aserve.http.responses.call import check_metadata
from aserve.http.route import Route, get, post
from aserve.http.state import HttpContext, caller_for

MAX_OPEN = 32  # batches of one owner
MAX_PAGE = 10_000
MAX_NAME = 255
MAX_LINES = 256  # of a form, but for those of contents
MAX_FIELD = 64  # bytes of a field beside the file
CHUNK_BYTES = 1 << 18
WINDOWS = {"24h": 24 * 3600}
STORE = web.AppKey("batch_store", Store)
RUNNER = web.AppKey("batch_runner", BatchRunner)


def set_up(app: web.Application, context: HttpContext) -> None:
    """Opens the store, and runs the batches for as long as the server runs."""
    folder = context.options.files_dir
    if folder is None:
        return
    store = Store(Path(folder), max_bytes=context.options.files_size)
    runner = BatchRunner(HttpLineWork(context), store)
    app[STORE], app[RUNNER] = store, runner

    async def start(_: web.Application) -> None:
        runner.start(runner.report_death)

    async def stop(_: web.Application) -> None:
        await runner.stop()
        await asyncio.get_running_loop().run_in_executor(None, store.close)

    app.on_startup.append(start)
    app.on_cleanup.append(stop)


def _store(request: web.Request) -> Store:
    store: Store | None = request.app.get(STORE)
    if store is None:
        raise NotFound(
            "This server keeps no files. Start it with --files-dir DIR for /v1/files and "
            "/v1/batches.",
            code="files_disabled",
        )
    return store


async def upload(request: web.Request, context: HttpContext) -> web.Response:
    store = _store(request)
    if request.content_type != "multipart/form-data":
        raise refused(415, "Content-Type must be multipart/form-data with a file and a purpose.")
    record = FileObject(id=new_id("file"), bytes=0, created_at=now(), filename="", purpose="batch")
    is_added = False
    try:
        fields = await _receive(request, store, record.id, context)
        record.filename = _name_of(fields)
        owner = caller_for(request, context).owner
        record = await store.call(store.add_file, record, owner)
        is_added = True
    finally:
        if not is_added:
            await store.call(store.discard, record.id)
    return json_response(record)


def _name_of(fields: dict[str, str]) -> str:
    _check_choice(fields.get("purpose", ""), ("batch",), param="purpose")
    if "file" not in fields:
        raise InvalidRequest(
            "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
        )
    return fields["file"]


async def _receive(
    request: web.Request, store: Store, file_id: str, context: HttpContext
) -> dict[str, str]:
    """Receives a form. The content goes to the store; the field `file` is the name of the file."""
    try:
        async with asyncio.timeout(context.options.body_timeout) as deadline:
            return await _read_form(request, store, file_id, context, deadline)
    except TimeoutError:
        raise refused(408, "The file did not arrive in time. See --body-timeout.") from None
    except HttpProcessingError as error:
        raise _invalid_form(error.message) from None
    except ValueError as error:
        raise _invalid_form(str(error)) from None


def _invalid_form(why: str) -> InvalidRequest:
    return InvalidRequest(f"The form is not valid: {why[:200]}.")


async def _read_form(
    request: web.Request,
    store: Store,
    file_id: str,
    context: HttpContext,
    deadline: asyncio.Timeout,
) -> dict[str, str]:
    fields: dict[str, str] = {}
    content: Any = _FormContent(request.content)
    reader = MultipartReader(request.headers, content)
    while (part := await _next_part(reader)) is not None:
        if not isinstance(part, BodyPartReader) or not part.name:
            raise refused(400, "A part of the form has no name, or is a form itself.")
        if part.name in fields:
            raise refused(400, f"The form has two parts with the name '{part.name[:MAX_FIELD]}'.")
        if part.name == "file":
            fields["file"] = await _keep(part, store, file_id, context, deadline)
        else:
            fields[part.name] = await _field(part)
    return fields


async def _next_part(reader: MultipartReader) -> BodyPartReader | MultipartReader | None:
    try:
        return await reader.next()
    except RuntimeError as error:  # aiohttp's, of a field `_charset_` that is too long
        raise _invalid_form(str(error)) from None


class _FormContent:
    """The body of a form, with a bound on the lines before, between and behind the contents of its
    parts. WHY: aiohttp reads lines that have arrived, millions of them, without a turn of the loop.
    """

    def __init__(self, body: StreamReader) -> None:
        self._num_left = MAX_LINES
        self._readline = body.readline
        self.read = body.read
        self.at_eof = body.at_eof
        self.unread_data = body.unread_data

    async def readline(self, **limits: int) -> bytes:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"more than {MAX_LINES} lines outside of its contents")
        return await self._readline(**limits)


async def _keep(
    part: BodyPartReader,
    store: Store,
    file_id: str,
    context: HttpContext,
    deadline: asyncio.Timeout,
) -> str:
    """Appends the content chunk by chunk, and returns the file's name. Each byte that arrives
    extends the deadline.
    """
    limit = context.options.max_file_size
    size = 0
    while chunk := await part.read_chunk(CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            raise refused(413, f"The file has more than {limit} bytes (--max-file-size).")
        await store.call(store.append, file_id, bytes(chunk))
        until_s = deadline.when()
        assert until_s is not None
        deadline.reschedule(until_s + len(chunk) / MIN_BYTES_PER_S)
    name = (part.filename or "file")[:MAX_NAME]
    return name.encode("utf-8", "backslashreplace").decode()  # its bytes may be no UTF-8


async def _field(part: BodyPartReader) -> str:
    data = b""
    while chunk := await part.read_chunk(MAX_FIELD):
        data += chunk
        if len(data) > MAX_FIELD:
            raise refused(413, f"A field of the form has more than {MAX_FIELD} bytes.")
    return data.decode(errors="replace")


async def list_files(request: web.Request, context: HttpContext) -> web.Response:
    return await _page(request, context, FileObject)


async def list_batches(request: web.Request, context: HttpContext) -> web.Response:
    return await _page(request, context, BatchObject)


async def _page(
    request: web.Request, context: HttpContext, kind: type[FileObject] | type[BatchObject]
) -> web.Response:
    store, owner = _store(request), caller_for(request, context).owner
    query = parse_query(request, ListQuery)
    check_within(query.limit, Range(1, MAX_PAGE), param="limit")
    if kind is BatchObject:
        query.purpose = None
    records, has_more = await store.call(store.page, kind, owner, query)
    runner = request.app[RUNNER]
    shown = [runner.open_batch(each.id, owner) or each for each in records]
    page = Page(data=shown, has_more=has_more)
    if shown:
        page.first_id, page.last_id = shown[0].id, shown[-1].id
    return json_response(page)


async def read_file(request: web.Request, context: HttpContext) -> web.Response:
    store, owner = _store(request), caller_for(request, context).owner
    return json_response(await store.call(store.find, FileObject, request.match_info["id"], owner))


async def file_content(request: web.Request, context: HttpContext) -> web.StreamResponse:
    store, owner = _store(request), caller_for(request, context).owner
    record = await store.call(store.find, FileObject, request.match_info["id"], owner)
    headers = {hdrs.CONTENT_TYPE: "application/octet-stream"}
    return web.FileResponse(store.path_of(record.id), headers=headers)


async def delete_file(request: web.Request, context: HttpContext) -> web.Response:
    store, owner = _store(request), caller_for(request, context).owner
    await store.call(store.delete_file, request.match_info["id"], owner)
    return json_response(Deleted(request.match_info["id"], "file"))


async def create_batch(request: web.Request, context: HttpContext, body: BatchBody) -> web.Response:
    store, caller = _store(request), caller_for(request, context)
    request.app[RUNNER].check_alive()
    _check_choice(body.endpoint, ENDPOINTS, param="endpoint")
    _check_choice(body.completion_window, WINDOWS, param="completion_window")
    check_metadata(body.metadata or {})
    await store.call(store.find, FileObject, body.input_file_id, caller.owner)
    created = now()
    batch = BatchObject(
        id=new_id("batch"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        status="validating",
        created_at=created,
        expires_at=created + WINDOWS[body.completion_window],
        metadata=body.metadata,
    )
    lowest = dataclasses.replace(caller, may_set_priority=True)
    owned = Owned(batch, caller.owner, msgspec.json.encode(lowest))
    await store.call(store.add_batch, owned, MAX_OPEN)
    answer = json_response(batch)
    request.app[RUNNER].inbox.send(owned)
    return answer


def _check_choice(given: str, choices: Collection[str], *, param: str) -> None:
    if given not in choices:
        raise InvalidRequest(
            f"Invalid value for '{param}': '{given[:80]}'. Supported values are "
            f"{', '.join(choices)}.",
            param=param,
            code="invalid_value",
        )


async def read_batch(request: web.Request, context: HttpContext) -> web.Response:
    store, owner = _store(request), caller_for(request, context).owner
    batch_id = request.match_info["id"]
    batch = request.app[RUNNER].open_batch(batch_id, owner)
    return json_response(batch or await store.call(store.find, BatchObject, batch_id, owner))


async def cancel_batch(request: web.Request, context: HttpContext) -> web.Response:
    store, owner = _store(request), caller_for(request, context).owner
    batch_id = request.match_info["id"]
    batch = await request.app[RUNNER].cancel(batch_id, owner)
    return json_response(batch or await store.call(store.find, BatchObject, batch_id, owner))


ROUTES = (
    Route("POST", "/v1/files", upload),
    get("/v1/files", list_files),
    get("/v1/files/{id}", read_file),
    get("/v1/files/{id}/content", file_content),
    Route("DELETE", "/v1/files/{id}", delete_file),
    post("/v1/batches", BatchBody, create_batch),
    get("/v1/batches", list_batches),
    get("/v1/batches/{id}", read_batch),
    Route("POST", "/v1/batches/{id}/cancel", cancel_batch),
)
