"""Kernels are compiled before the first call, so that no request waits for a compiler.

It knows no kernel.
"""

from __future__ import annotations

import logging
from typing import Any

from numba import types
from numba.core import event
from numba.core.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


def compile_ahead(function: Any, *arguments: Any) -> None:
    """For these numba types, or read from the cache of an earlier process. From then on calls
    compile nothing. With NUMBA_DISABLE_JIT=1 there is nothing to compile."""
    if not isinstance(function, Dispatcher):
        return
    function.disable_compile(False)
    with event.install_listener("numba:compile", _Teller(function.py_func.__name__)):
        function.compile(types.void(*arguments))
    function.disable_compile()


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
