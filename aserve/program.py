"""Runs a command as a process: it opens the standard streams first, and ends the process
afterwards.

NOTE: no command is imported before the standard streams are open.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and ends the process with its exit code."""
    open_standard_streams()
    from aserve.cli import main

    end_process(main())


def open_standard_streams() -> None:
    """Replaces each closed standard stream by /dev/null.

    WHY: the system gives a new file the lowest free number. A socket with number 2 would get the
    text of error messages, and libuv ends the process when it closes one of the first three.
    """
    if not all(_is_open(number) for number in range(3)):
        null = os.open(os.devnull, os.O_RDWR)
        while null < 3:
            os.set_inheritable(null, True)
            null = os.dup(null)
        os.close(null)
    # Python has set the streams that it found closed to None.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def end_process(code: int) -> NoReturn:
    """Ends the process at once, even while threads still work.

    WHY: Python joins the threads of every pool before it ends, however long their work takes, and
    a thread that comes back from a library during Python's own end can abort the process. Threads
    of libraries are not known to Python, so this does not depend on how many it counts.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
