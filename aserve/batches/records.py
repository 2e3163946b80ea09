"""The objects of OpenAI's files and batches, and the lines of a batch's files."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo

Purpose: TypeAlias = Literal["batch", "batch_output"]
BatchStatus: TypeAlias = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
OPEN: frozenset[BatchStatus] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    object: str = "file"
    status: str = "processed"


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


class LineError(msgspec.Struct):
    """An error of a line of the input file. Lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct):
    data: list[LineError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Each time is in seconds since 1970, and null until its status is reached."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    object: str = "batch"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def enter(self, status: BatchStatus, now: int) -> None:
        self.status = status
        setattr(self, f"{status}_at", now)


class BatchBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class ListQuery(msgspec.Struct, kw_only=True):
    """`after` is the last id of the page before."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchLine(msgspec.Struct, kw_only=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineResult(msgspec.Struct):
    """A line of an output or error file. An answer of another status than 200 is in the latter."""

    id: str
    custom_id: str
    response: LineResponse
    error: ErrorInfo | UnsetType | None = None


class Page(msgspec.Struct, kw_only=True):
    data: list[FileObject] | list[BatchObject]
    has_more: bool
    first_id: str | UnsetType | None = UNSET
    last_id: str | UnsetType | None = UNSET
    object: str = "list"
