"""The attention backends by name. A new one is a file in this folder and a row in `BACKENDS`. One
of another package is an entry point of the group `aserve.attention`; its object is an
`AttentionKind`.

NOTE: `--attention-backend` takes its choices from here, so this file imports neither torch nor a
backend. A row imports its backend when it is called, because some need packages that a machine may
not have.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aserve.gpu.attention.base import AttentionKind

AUTO = "auto"
GROUP = "aserve.attention"  # of entry points


def _kind_in(module: str, *, package: str | None = None) -> AttentionKind:
    """Imports a backend. Raises ImportError if `package`, which it will need, is missing."""
    if package is not None:
        importlib.import_module(package)
    kind: AttentionKind = importlib.import_module(module).KIND
    return kind


BACKENDS: Mapping[str, Callable[[], AttentionKind]] = {
    "flashinfer": partial(
        _kind_in, "aserve.gpu.attention.flashinfer.backend", package="flashinfer"
    ),
    "paged-cpu": partial(_kind_in, "aserve.gpu.attention.cpu_masks"),
    "paged-sdpa": partial(_kind_in, "aserve.gpu.attention.sdpa"),
    "torch-ref": partial(_kind_in, "aserve.gpu.attention.reference"),
    "triton": partial(_kind_in, "aserve.gpu.attention.triton"),
}


def find_backend(name: str) -> Callable[[], AttentionKind] | None:
    """Returns the backend of this name, of aserve or of another package, or None."""
    if name in BACKENDS:
        return BACKENDS[name]
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    return None if point is None else point.load
