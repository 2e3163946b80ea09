"""The log: lines of text, or one JSON object per line, on stderr; and what a server announces on
stdout.

Messages have the form `event key=%s`. The text format fills them in; the JSON format also has each
key as a field, with its value as a number where it is one.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
from datetime import UTC, datetime

STDERR = 2  # the file descriptor
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PLACEHOLDER = re.compile(r"(?:(\w+)=)?%(?:%|[-+ #0-9.]*[a-zA-Z])")

logger = logging.getLogger(__name__)


def start_logging(level: str, log_format: str = "text") -> None:
    """Logs from `level` on, which is debug, info, warning or error. The stacks of all threads are
    written at SIGUSR2, and when a signal such as SIGSEGV ends the process.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    faulthandler.enable(file=STDERR)
    faulthandler.register(signal.SIGUSR2, file=STDERR)


def announce(line: str) -> None:
    """Writes a line to stdout. The server goes on where that fails: its reader may have gone, as
    behind `aserve serve | head -1`, and the disk of a file may be full.
    """
    stream = sys.stdout
    if stream is None:  # it was closed before the start
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        logger.warning("nothing more is written to stdout error=%s", error.strerror)
        discard_stdout()


def discard_stdout() -> None:
    """Sends what is left to write to stdout nowhere, so that Python's flush at exit succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_stacks() -> None:
    """Writes the stacks of all threads to stderr."""
    faulthandler.dump_traceback(file=STDERR)


def write_stacks_after(seconds: float) -> None:
    """Writes the stacks of all threads after so long, unless it is called again before then: of a
    process whose event loop does not turn, too."""
    faulthandler.dump_traceback_later(seconds, file=STDERR)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = fields_of(record) | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the values of a message's keys: `{"status": 200}` for `status=%d` and 200."""
    fields: dict[str, object] = {}
    values = iter(record.args if isinstance(record.args, tuple) else ())
    for found in PLACEHOLDER.finditer(str(record.msg)):
        if found[0].endswith("%%"):
            continue
        value = next(values, None)
        if found[1]:
            fields[found[1]] = value if isinstance(value, int | float) else str(value)
    return fields
