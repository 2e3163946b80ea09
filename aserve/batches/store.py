"""Keeps files and batches in one folder: contents as files, everything else in SQLite.

The store alone writes the folder. All work is done by one thread, in order of the calls, so no call
sees half of another one. What a call has returned outlives a crash of the process.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sqlite3
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aserve.batches.records import BatchObject, BatchStatus, FileObject, ListQuery
from aserve.errors import CapacityError, ConfigError, InvalidRequest, NotFound, QueueFull

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, purpose TEXT, size INTEGER, record BLOB
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, caller BLOB, is_open INTEGER,
    record BLOB
);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT, line INTEGER, is_ok INTEGER, data BLOB, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
# The last status of a batch whose lines were all answered, or are not to be answered any more.
ENDS: dict[BatchStatus, BatchStatus] = {
    "finalizing": "completed",
    "failed": "failed",
    "cancelling": "cancelled",
    "expired": "expired",
}
TABLES: dict[type, str] = {FileObject: "files", BatchObject: "batches"}
RETRY_AFTER_S = 60.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Owned(msgspec.Struct, frozen=True):
    """A batch with its owner, and the caller in whose name its lines are answered."""

    batch: BatchObject
    owner: str
    caller: bytes


class Store:
    """The methods run in the store's thread: await them by `call`. An owner sees only what is its
    own.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            (folder / "contents").mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(
                folder / "batches.sqlite", check_same_thread=False, isolation_level=None
            )
            self._lock_folder()
            self._base.executescript(SCHEMA)
            self._drop_orphans()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot keep files in {folder}: {error}") from error

    def _lock_folder(self) -> None:
        """NOTE: two servers over one folder would both answer its batches."""
        self._base.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("BEGIN EXCLUSIVE")
        self._base.execute("COMMIT")

    def _drop_orphans(self) -> None:
        """Deletes contents without a record, which a crash has left."""
        known = {file_id for (file_id,) in self._base.execute("SELECT id FROM files")}
        for path in (self._folder / "contents").iterdir():
            if path.name not in known:
                path.unlink()

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises CapacityError if the folder cannot be used, as on a full disk."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, *arguments)
        except (OSError, sqlite3.OperationalError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CapacityError(
                f"The server cannot use its files: {reason}. Try again later.",
                code="files_full" if _is_full(error) else "files_unusable",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    def close(self) -> None:
        self._thread.submit(self._base.close)
        self._thread.shutdown()

    def path_of(self, file_id: str) -> Path:
        return self._folder / "contents" / file_id

    def _check_room(self, size: int) -> None:
        """Raises if the folder may not hold `size` more bytes. Outputs may always be kept."""
        (used,) = self._base.execute("SELECT COALESCE(SUM(size), 0) FROM files").fetchone()
        if used + size > self._max_bytes:
            raise QueueFull(
                f"The server keeps {used} bytes of files already, and may keep {self._max_bytes} "
                "(--files-size). Delete files that are no longer needed.",
                code="files_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def append(self, file_id: str, data: bytes) -> None:
        """Appends to a content that no record names yet."""
        with self.path_of(file_id).open("ab") as content:
            content.write(data)

    def discard(self, file_id: str) -> None:
        self.path_of(file_id).unlink(missing_ok=True)

    def add_file(self, record: FileObject, owner: str) -> FileObject:
        """Adds the record of a content that is complete, and returns it with its size."""
        with self.path_of(record.id).open("ab") as content:
            os.fsync(content.fileno())
            record = msgspec.structs.replace(record, bytes=content.tell())
        if record.purpose == "batch":
            self._check_room(record.bytes)
        self._base.execute(
            "INSERT INTO files (id, owner, purpose, size, record) VALUES (?, ?, ?, ?, ?)",
            (record.id, owner, record.purpose, record.bytes, msgspec.json.encode(record)),
        )
        return record

    def find(self, kind: type[T], record_id: str, owner: str) -> T:
        """Returns a file or a batch. Raises NotFound if the owner has none of this id."""
        query = f"SELECT record FROM {TABLES[kind]} WHERE id = ? AND owner = ?"
        row = self._base.execute(query, (record_id, owner)).fetchone()
        if row is None:
            what = TABLES[kind].removesuffix("es" if kind is BatchObject else "s")
            raise NotFound(f"No such {what}: '{record_id[:80]}'.", param="id")
        return msgspec.json.decode(row[0], type=kind)

    def delete_file(self, file_id: str, owner: str) -> None:
        self.find(FileObject, file_id, owner)
        query = (
            "SELECT id FROM batches WHERE is_open AND json_extract(record, '$.input_file_id') = ?"
        )
        user = self._base.execute(query, (file_id,)).fetchone()
        if user is not None:
            raise InvalidRequest(
                f"The file is the input of {user[0]}, which is open. Cancel the batch first.",
                param="id",
                code="file_in_use",
            )
        self._base.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.discard(file_id)

    def add_batch(self, owned: Owned, max_open: int) -> None:
        query = "SELECT COUNT(*) FROM batches WHERE owner = ? AND is_open"
        (num_open,) = self._base.execute(query, (owned.owner,)).fetchone()
        if num_open >= max_open:
            raise QueueFull(
                f"{num_open} batches are open, as many as may be. Wait for one to end.",
                code="too_many_batches",
                retry_after_s=RETRY_AFTER_S,
            )
        batch = owned.batch
        self._base.execute(
            "INSERT INTO batches (id, owner, caller, is_open, record) VALUES (?, ?, ?, 1, ?)",
            (batch.id, owned.owner, owned.caller, msgspec.json.encode(batch)),
        )

    def save_batch(self, batch: BatchObject) -> None:
        record = msgspec.json.encode(batch)
        values = (batch.is_open, record, batch.id)
        self._base.execute("UPDATE batches SET is_open = ?, record = ? WHERE id = ?", values)

    def open_batches(self) -> list[Owned]:
        query = "SELECT record, owner, caller FROM batches WHERE is_open ORDER BY number"
        return [
            Owned(msgspec.json.decode(record, type=BatchObject), owner, caller)
            for record, owner, caller in self._base.execute(query)
        ]

    def page(self, kind: type[T], owner: str, query: ListQuery) -> tuple[list[T], bool]:
        """Returns the records of a page in order of their creation, and whether more follow."""
        table = TABLES[kind]
        step, direction = ("<", "DESC") if query.order == "desc" else (">", "ASC")
        where, values = "owner = ?", [owner]
        if query.purpose is not None:
            where += " AND purpose = ?"
            values.append(query.purpose)
        if query.after is not None:
            self.find(kind, query.after, owner)
            where += f" AND number {step} (SELECT number FROM {table} WHERE id = ?)"
            values.append(query.after)
        text = f"SELECT record FROM {table} WHERE {where} ORDER BY number {direction} LIMIT ?"
        rows = self._base.execute(text, (*values, query.limit + 1)).fetchall()
        records = [msgspec.json.decode(record, type=kind) for (record,) in rows]
        return records[: query.limit], len(records) > query.limit

    def add_result(self, batch_id: str, line: int, is_ok: bool, data: bytes) -> None:
        self._base.execute(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", (batch_id, line, is_ok, data)
        )

    def finished_lines(self, batch_id: str) -> dict[int, bool]:
        """Returns the lines that have a result, and whether it is an answer of status 200."""
        query = "SELECT line, is_ok FROM results WHERE batch = ?"
        return {line: bool(is_ok) for line, is_ok in self._base.execute(query, (batch_id,))}

    def end_batch(self, batch: BatchObject, owner: str, now: int) -> None:
        """Writes the files of a batch that has no more lines to answer, and ends it. Everything
        happens or nothing: the results stay until the files are there, and `batch` as it is.
        """
        ended = msgspec.structs.replace(batch)
        with ExitStack() as undo:
            with self._base:
                self._base.execute("BEGIN")
                ended.output_file_id = self._write_results(batch.id, owner, now, undo, is_ok=True)
                ended.error_file_id = self._write_results(batch.id, owner, now, undo, is_ok=False)
                ended.enter(ENDS[batch.status], now)
                self.save_batch(ended)
                self._base.execute("DELETE FROM results WHERE batch = ?", (batch.id,))
            undo.pop_all()

    def _write_results(
        self, batch_id: str, owner: str, now: int, undo: ExitStack, *, is_ok: bool
    ) -> str | None:
        """Writes the results of one kind in the order of their lines. Returns the file's id, or
        None if there are none.
        """
        query = "SELECT data FROM results WHERE batch = ? AND is_ok = ? ORDER BY line"
        results = self._base.execute(query, (batch_id, is_ok))
        first = results.fetchone()
        if first is None:
            return None
        kind = "output" if is_ok else "error"
        record = FileObject(
            id=new_id("file"),
            bytes=0,
            created_at=now,
            filename=f"{batch_id}_{kind}.jsonl",
            purpose="batch_output",
        )
        undo.callback(self.discard, record.id)
        with self.path_of(record.id).open("wb") as content:
            content.writelines(data + b"\n" for (data,) in itertools.chain((first,), results))
        return self.add_file(record, owner).id


def _is_full(error: OSError | sqlite3.OperationalError) -> bool:
    """Returns whether room is what is missing."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    # Errors of the module itself, such as of a text that it cannot decode, have no code.
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}" if kind == "file" else f"{kind}_{uuid.uuid4().hex}"
