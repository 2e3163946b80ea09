"""Which attention backend an engine gets: the one it was told, or the first of its device's that
can what the model's layers need. It knows no backend by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionBackend, AttentionKind, AttentionUnavailable
from aserve.gpu.attention.capabilities import AttentionSite, Capabilities
from aserve.gpu.attention.registry import BACKENDS

AUTO = "auto"

# Of a package, of a library under it, and of two whose versions do not fit together.
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """A backend that was built, and why those before it were not, by name."""

    name: str
    can: Capabilities
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
        return Attention(name, kind.can, backend, is_auto, reasons)
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
    if refusals := [*kind.can.refusals(site)]:
        raise AttentionUnavailable(f"does not support {', '.join(refusals)}")
    return kind.build(site)


def _able(site: AttentionSite, *, besides: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in BACKENDS.keys() - set(besides):
        try:
            kind = _load(name)
        except AttentionUnavailable:
            continue
        if not any(kind.can.refusals(site)):
            found.append(name)
    return sorted(found)
