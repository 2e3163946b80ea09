"""What numba is told of functions that it compiles: it knows no operation."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core import config, event
from numba.core.dispatcher import Dispatcher

# What may be done with sums and products of floats: infinities and NaN keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp"}

# Of functions that make no array: nobody counts who holds a view, which numba otherwise does with
# two locked instructions for each.
# PERF: a prompt of 64 tokens through the tiny model of docs/performance.md spent 23 % of its time
# on them; 16 rows of 100 positions, 8 heads of 32: attention takes 57 us, and 74 with them.
UNCOUNTED: Mapping[str, Any] = {"_nrt": False}


logger = logging.getLogger(__name__)


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit`, whose code is kept for later processes where some folder can be written.

    WHY: njit(cache=True) is an error where none can, as on a read-only file system.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = njit(**options)(function)
        if isinstance(compiled, Dispatcher):
            with contextlib.suppress(RuntimeError):
                compiled.enable_caching()
        return compiled

    return decorate


def compile_ahead(function: Any, *arguments: Any) -> None:
    """For these numba types, or read from the cache of an earlier process. From then on calls
    compile nothing. With NUMBA_DISABLE_JIT=1 there is nothing to compile."""
    if not isinstance(function, Dispatcher):
        return
    name = function.py_func.__name__
    function.disable_compile(False)
    with _alone(name), event.install_listener("numba:compile", _Teller(name)):
        try:
            function.compile(types.void(*arguments))
        except OSError as error:  # it is compiled by then
            logger.warning("a compiled kernel cannot be kept for later starts: %s", error)
    function.disable_compile()


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Of several processes that start together one compiles a kernel; the others wait for it, and
    read it from the cache."""
    with contextlib.ExitStack() as stack:
        if config.CACHE_DIR:
            with contextlib.suppress(OSError):
                lock = stack.enter_context((Path(config.CACHE_DIR) / f"{name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Teller(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says it where the cache has nothing; once, whatever the function calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_told = False

    def on_start(self, _event: object) -> None:
        if not self._is_told:
            self._is_told = True
            logger.info("compiling a kernel for this and all later starts: %s", self._name)

    def on_end(self, _event: object) -> None:
        pass
