"""Attention backends by name. A new one is a file in this folder and a line here.

A line imports its file when it is called: some need packages that a machine may not have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
)


def _flashinfer() -> AttentionKind:
    import flashinfer  # noqa: F401  # a package that only a GPU needs: without it there is no kind

    from aserve.gpu.attention.flashinfer.backend import KIND

    return KIND


def _paged_cpu() -> AttentionKind:
    from aserve.gpu.attention.cpu import KIND

    return KIND


def _paged_sdpa() -> AttentionKind:
    from aserve.gpu.attention.sdpa import KIND

    return KIND


def _torch_ref() -> AttentionKind:
    from aserve.gpu.attention.reference import KIND

    return KIND


def _triton() -> AttentionKind:
    from aserve.gpu.attention.triton import KIND

    return KIND


BACKENDS: Mapping[str, Callable[[], AttentionKind]] = {
    "flashinfer": _flashinfer,
    "paged-cpu": _paged_cpu,
    "paged-sdpa": _paged_sdpa,
    "torch-ref": _torch_ref,
    "triton": _triton,
}


AUTO = "auto"

# Of a package, of a library under it, and of two whose versions do not fit together.
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """A backend that was built, and why those before it were not, by name."""

    name: str
    capabilities: Capabilities
    backend: AttentionBackend
    is_auto: bool
    passed_over: Mapping[str, str]

    @property
    def why(self) -> str:
        """Why it was this one, in a few words."""
        if not self.is_auto:
            return "as asked"
        return f"auto, without {', '.join(self.passed_over)}" if self.passed_over else "auto"

    def warn(self) -> None:
        for other, reason in self.passed_over.items():
            logger.warning("attention runs in %s, because %s %s", self.name, other, reason)


def build_attention(wanted: str, site: AttentionSite, *, order: Sequence[str]) -> Attention:
    """`order` is what the device has, best first. ConfigError if a backend that is named, or every
    one of the order, cannot do it here.
    """
    is_auto = wanted == AUTO
    names = tuple(order) if is_auto else (wanted,)
    reasons: dict[str, str] = {}
    for name in names:
        try:
            kind = _load(name)
            backend = _build(kind, site)
        except AttentionUnavailable as error:
            reasons[name] = str(error)
            continue
        return Attention(name, kind.capabilities, backend, is_auto, reasons)
    told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    if is_auto:
        what = f"no attention backend can do what is asked: {told}. Leave out what they lack"
    else:
        able = ", ".join((AUTO, *_able(site, besides=names)))
        what = f"--attention-backend {wanted} cannot be used here: {told}. Choose from: {able}"
    raise ConfigError(what, param="attention_backend")


def _load(name: str) -> AttentionKind:
    if name not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise ConfigError(
            f"attention backend {name!r} is not known; known: {known}", param="attention_backend"
        )
    try:
        return BACKENDS[name]()
    except IMPORT_ERRORS as error:
        raise AttentionUnavailable(f"cannot be imported: {error}") from None


def _build(kind: AttentionKind, site: AttentionSite) -> AttentionBackend:
    if refusals := [*kind.capabilities.refusals(site)]:
        raise AttentionUnavailable(f"does not support {', '.join(refusals)}")
    return kind.build(site)


def _able(site: AttentionSite, *, besides: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in BACKENDS.keys() - set(besides):
        try:
            kind = _load(name)
        except AttentionUnavailable:
            continue
        if not any(kind.capabilities.refusals(site)):
            found.append(name)
    return sorted(found)
