"""Builds the attention backend that was asked for, or the fastest one that supports the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aserve.errors import ConfigError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
)
from aserve.gpu.attention.latents import with_latents
from aserve.gpu.attention.pictures import with_pictures
from aserve.gpu.attention.registry import AUTO
from aserve.gpu.attention.sparse import SparseBackend, with_sparse
from aserve.messages.base import MIB

# A missing package, a missing shared library, or two packages of incompatible versions.
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """The backend that was built, and the reasons why earlier ones of the order were not."""

    name: str
    capabilities: Capabilities
    backend: AttentionBackend
    is_auto: bool
    passed_over: Mapping[str, str]  # reason by name
    memory: Mapping[str, int]  # bytes that it keeps beside the KV, by what they are

    @property
    def why(self) -> str:
        """Why this backend was chosen, for the start-up line."""
        reason = "auto" if self.is_auto else "as asked"
        if self.is_auto and self.passed_over:
            reason += f", without {', '.join(self.passed_over)}"
        for what, num_bytes in self.memory.items():
            reason += f", {num_bytes / MIB:,.0f} MiB of {what}"
        return reason

    def warn(self) -> None:
        for other, reason in self.passed_over.items():
            logger.warning("attention uses %s, because %s %s", self.name, other, reason)


def build_attention(requested: str, site: AttentionSite, *, order: Sequence[str]) -> Attention:
    """Builds the requested backend, or for `auto` the first one that supports the model. `order`
    lists the device's backends, fastest first. Raises ConfigError if none can be built.
    """
    is_auto = requested == AUTO
    names = tuple(order) if is_auto else (requested,)
    reasons: dict[str, str] = {}
    for name in names:
        try:
            kind = load_backend(name)
            inner = with_pictures(with_latents(_build(kind, site), site), site)
            backend = with_sparse(inner, site, kind.make_sparse_ops)
        except AttentionUnavailable as error:
            reasons[name] = str(error)
            continue
        # With pictures some steps are gathered by pages.
        whole_pages = kind.capabilities.whole_pages or site.has_spans
        capabilities = replace(kind.capabilities, whole_pages=whole_pages)
        return Attention(name, capabilities, backend, is_auto, reasons, _memory(backend))
    why = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    if is_auto:
        message = (
            f"no attention backend supports this model with these options: {why}. "
            "Leave out an option that they lack"
        )
    else:
        usable = ", ".join((AUTO, *_usable(site, besides=names)))
        message = (
            f"--attention-backend {requested} cannot be used here: {why}. Use one of: {usable}"
        )
    raise ConfigError(message, param="attention_backend")


def _memory(backend: AttentionBackend) -> Mapping[str, int]:
    if not isinstance(backend, SparseBackend):
        return {}
    return {"index keys": backend.index_keys.size_bytes}


def load_backend(name: str) -> AttentionKind:
    """Raises AttentionUnavailable if its package cannot be imported."""
    load = registry.find_backend(name)
    if load is None:
        known = ", ".join((AUTO, *registry.BACKENDS))
        raise ConfigError(
            f"attention backend {name!r} is not known; known: {known}", param="attention_backend"
        )
    try:
        return load()
    except IMPORT_ERRORS as error:
        raise AttentionUnavailable(f"cannot be imported: {error}") from None


def _build(kind: AttentionKind, site: AttentionSite) -> AttentionBackend:
    if refusals := [*kind.capabilities.refusals(site)]:
        raise AttentionUnavailable(f"does not support {', '.join(refusals)}")
    return kind.build(site)


def _usable(site: AttentionSite, *, besides: Sequence[str]) -> list[str]:
    names: list[str] = []
    for name in registry.BACKENDS.keys() - set(besides):
        try:
            kind = load_backend(name)
        except AttentionUnavailable:
            continue
        if not any(kind.capabilities.refusals(site)):
            names.append(name)
    return sorted(names)
