"""The JSON log: one object per line whatever is logged, with the message's values as fields; and
announcements that cannot be written.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.host.logs import JsonFormatter, announce


def formatted(message: str, *values: object, **fields: Any) -> dict[str, Any]:
    level = fields.get("level", logging.INFO)
    exc_info = fields.get("exc_info")
    record = logging.LogRecord("aserve.x", level, "x.py", 1, message, values or None, exc_info)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry: dict[str, Any] = json.loads(line)
    return entry


def test_values_are_fields_with_their_types_and_the_message_is_whole() -> None:
    entry = formatted(
        "done 50%% request=%s status=%d ms=%.1f %s left=%s", "a b", 200, 1.25, "x", None
    )
    time = entry.pop("time")
    assert time.endswith("+00:00")
    assert entry == {
        "request": "a b",
        "status": 200,
        "ms": 1.25,
        "left": "None",
        "level": "info",
        "logger": "aserve.x",
        "message": "done 50% request=a b status=200 ms=1.2 x left=None",
    }


def test_a_value_displaces_no_field_of_the_record() -> None:
    entry = formatted("level=%s message=%s", "forged", "forged", level=logging.ERROR)
    assert (entry["level"], entry["message"]) == ("error", "level=forged message=forged")


@given(st.text(), st.text() | st.integers() | st.none())
def test_any_value_stays_on_one_line(value: str, other: object) -> None:
    entry = formatted("a=%s b=%s", value, other)
    assert entry["a"] == value
    assert entry["message"] == f"a={value} b={other}"


def test_an_exception_has_its_trace() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        entry = formatted("failed", exc_info=sys.exc_info())
    assert "ValueError: two\nlines" in entry["exception"]


def full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("open_stdout", [full, without_reader])
def test_a_server_goes_on_where_its_announcement_cannot_be_written(
    open_stdout: Callable[[], TextIO],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_stdout() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        announce("ready")
        announce("ready again")
    assert caplog.text.count("nothing more is written to stdout") == 1


def test_a_server_without_stdout_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    announce("ready")


def test_names_that_the_encoding_lacks_do_not_end_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    announce("m\u00f8del")
    stdout.buffer.seek(0)
    assert stdout.buffer.read() == b"m\\xf8del\n"
