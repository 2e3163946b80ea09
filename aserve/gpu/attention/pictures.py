"""Attention of models in which the tokens of a picture see each other (Gemma 3).

A step that computes such tokens runs with explicit masks, by `PagedSdpa`, and all other steps in
the backend that the engine chose. The scheduler never cuts such a picture, so the keys and values
of all its tokens are there when the first of them attends.
"""

from __future__ import annotations

from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionSite,
    AttentionUnavailable,
    StaticPlans,
)
from aserve.gpu.attention.sdpa import PagedSdpa
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch


class PictureBackend:
    """Leaves steps without such pictures to `causal`."""

    __slots__ = ("_causal", "_masked")

    def __init__(self, causal: AttentionBackend, masked: PagedSdpa) -> None:
        self._causal = causal
        self._masked = masked

    @property
    def static_plans(self) -> StaticPlans | None:
        return self._causal.static_plans

    def plan(self, batch: ForwardBatch) -> object:
        return self._backend_of(batch).plan(batch)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        return self._backend_of(batch).bind(batch, plan)

    def _backend_of(self, batch: ForwardBatch) -> AttentionBackend:
        features = batch.features
        return self._causal if features is None or features.spans is None else self._masked


def with_pictures(inner: AttentionBackend, site: AttentionSite) -> AttentionBackend:
    """Returns `inner`, with masks for pictures if the model has such ones."""
    if not site.has_spans:
        return inner
    if site.is_deterministic:
        raise AttentionUnavailable(
            "does not support --deterministic with pictures whose tokens see each other"
        )
    return PictureBackend(inner, PagedSdpa(site.pools, site.groups))
