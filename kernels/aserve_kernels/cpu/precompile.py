"""Compiles numba kernels before they are called, once for all processes that start together, and
keeps them in an on-disk cache."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core import config, event
from numba.core.dispatcher import Dispatcher

# Fast-math flags that may reorder sums, but keep the meaning of infinities and NaN.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}

# For functions that allocate no array: numba then counts no references to array views, which takes
# two locked instructions per view.
# PERF: a prompt of 64 tokens through the tiny model of docs/performance.md spent 23 % of its time
# on them; 16 rows of 100 positions, 8 heads of 32: attention takes 57 us, and 74 with them.
NO_REFCOUNT: Mapping[str, Any] = {"_nrt": False}

# Of several threads one compiles, as numba has it; the others must not find compiling disabled.
ONE_COMPILES = threading.RLock()

logger = logging.getLogger(__name__)


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` with the on-disk cache, if there is a folder to write it to.

    WHY: njit(cache=True) raises an error where there is none, as on a read-only file system.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = njit(**options)(function)
        if isinstance(compiled, Dispatcher):
            with contextlib.suppress(RuntimeError):
                compiled.enable_caching()
        return compiled

    return decorate


def compile_ahead(function: Any, *arguments: Any) -> None:
    """Compiles a kernel for these numba types, or reads it from the cache. From then on a call with
    other types raises TypeError instead of compiling. With NUMBA_DISABLE_JIT=1 it does nothing."""
    if not isinstance(function, Dispatcher):
        return
    name = function.py_func.__name__
    with ONE_COMPILES, compile_lock(name):
        function.disable_compile(False)
        with event.install_listener("numba:compile", CompileLogger(name)):
            try:
                function.compile(types.void(*arguments))
            except OSError as error:  # the kernel is compiled by then
                logger.warning("a compiled kernel cannot be kept for later starts: %s", error)
        function.disable_compile()


@contextlib.contextmanager
def compile_lock(name: str) -> Iterator[None]:
    """A file lock: of several processes that start together one compiles the kernel, and the others
    wait and read it from the cache."""
    with contextlib.ExitStack() as stack:
        if config.CACHE_DIR:
            with contextlib.suppress(OSError):
                lock = stack.enter_context((Path(config.CACHE_DIR) / f"{name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class CompileLogger(event.Listener):  # type: ignore[misc]  # numba has no types
    """Logs one line if the kernel is not in the cache, however many functions it inlines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_logged = False

    def on_start(self, _event: object) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.info("compiling a kernel for this and all later starts: %s", self._name)

    def on_end(self, _event: object) -> None:
        pass
