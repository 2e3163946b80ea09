"""The pictures of rows: rotary positions of their tokens, and features in place of placeholders.

A row's pictures arrive with its RowInit. The step whose chunk first touches a picture encodes it,
and the features are kept until a chunk has taken the last of them. A row that begins anew, after a
retraction or a failed step, is initialised anew and encodes what it still needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.vision_language import TokenFeatures, VisionLanguageModel
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32
from aserve.messages.executor import DecodeCaps
from aserve.messages.step import RowInit
from aserve.picture import NUM_AXES, Picture, rope_offsets

# Of the staged arrays.
OFFSETS, TOKENS, SPANS = "rope_offsets", "picture_tokens", "picture_spans"


class Part(NamedTuple):
    """The tokens of a picture that one step computes and that have features."""

    row: int
    picture: Picture
    tokens: npt.NDArray[np.int32]  # their indices in the step
    features: npt.NDArray[np.int32]  # their indices in the picture
    is_last: bool  # whether the step computes the picture's last token

    @property
    def spans(self) -> npt.NDArray[np.int32]:
        """int32 [n, 2]: see `TokenFeatures`."""
        span = (self.picture.start, self.picture.end)
        return np.full((len(self.tokens), 2), span, np.int32)


class PictureRows:
    """Written by the executor's thread. `forward` needs no other state than its batch."""

    __slots__ = ("_features", "_model", "_offsets", "_pictures", "has_axes")

    def __init__(self, model: VisionLanguageModel) -> None:
        self._model = model
        self.has_axes = model.has_axes  # of rotary positions, which pictures move
        self._offsets: dict[int, ArrayI32] = {}  # by row: see rope_offsets
        self._pictures: dict[int, tuple[Picture, ...]] = {}  # that a prefill has not passed yet
        self._features: dict[tuple[int, int], Tensor] = {}  # by row and start of the picture

    def touches(self, plan: StepPlan) -> bool:
        """Returns whether the step computes tokens of pictures."""
        self._write(plan.batch.row_inits)
        return any(self._parts(plan))

    def stage(self, plan: StepPlan, arrays: HostArrays) -> None:
        """Adds the arrays that `applied` reads: offsets in every step, so that a captured step has
        them, and the tokens of pictures where there are some."""
        self._write(plan.batch.row_inits)
        if self.has_axes:
            arrays.add(OFFSETS, self._offsets_of(plan).reshape(-1))
        parts = [*self._parts(plan)]
        if parts:
            arrays.add(TOKENS, np.concatenate([part.tokens for part in parts]))
        if parts and self._model.has_spans:
            arrays.add(SPANS, np.concatenate([part.spans for part in parts]).reshape(-1))

    def applied(self, step: DeviceStep) -> DeviceStep:
        """Returns the step with its rotary positions, and with the features of its pictures."""
        batch = step.batch
        if self.has_axes:
            offsets = step.arrays.ints(OFFSETS).view(NUM_AXES, -1)
            batch = dataclasses.replace(batch, rope_override=batch.cache_positions + offsets)
        parts = [*self._parts(step.plan)]
        if parts:
            values = torch.cat([self._values(part) for part in parts], dim=1)
            spans = None
            if self._model.has_spans:
                spans = step.arrays.ints(SPANS).view(-1, 2)
            features = TokenFeatures(step.arrays.ints(TOKENS), values, spans)
            self._forget_passed(step.plan)
            batch = dataclasses.replace(batch, features=features)
        return dataclasses.replace(step, batch=batch)

    def forward(self, batch: ForwardBatch, attend: Attend) -> Tensor:
        assert batch.features is not None
        return self._model.forward_with_pictures(
            batch.input_ids, batch.rope_positions, attend, batch.features, batch.capture
        )

    def _write(self, inits: Iterable[RowInit]) -> None:
        for init in inits:
            for picture in self._pictures.pop(init.row, ()):
                self._features.pop((init.row, picture.start), None)
            self._offsets.pop(init.row, None)
            if init.pictures:
                self._pictures[init.row] = init.pictures
                if self.has_axes:
                    self._offsets[init.row] = rope_offsets(init.pictures)

    def _offsets_of(self, plan: StepPlan) -> ArrayI32:
        """int32 [axes, tokens]. NOTE: a KV length that is only a bound belongs to a row that has
        left its prompt, where all offsets are the last one."""
        found = np.zeros((NUM_AXES, len(plan.input_ids)), np.int32)
        for row, first, start, stop in _known(plan, self._offsets):
            own = self._offsets[row]
            indices = np.minimum(np.arange(start, stop), own.shape[1] - 1)
            found[:, first : first + stop - start] = own[:, indices]
        return found

    def _parts(self, plan: StepPlan) -> Iterator[Part]:
        for row, first, start, stop in _known(plan, self._pictures):
            for picture in self._pictures[row]:
                low, high = max(start, picture.start), min(stop, picture.end)
                if low < high:
                    places = np.arange(low, high, dtype=np.int32)
                    features = picture.features_of(places - picture.start)
                    tokens = (first - start + places)[features >= 0]
                    is_last = high == picture.end
                    yield Part(row, picture, tokens, features[features >= 0], is_last)

    def _values(self, part: Part) -> Tensor:
        """[1 + deep layers, tokens, hidden]: the features of the part's tokens."""
        key = (part.row, part.picture.start)
        features = self._features.pop(key, None)
        if features is None:
            features = self._model.encode(part.picture)
        if not part.is_last:
            self._features[key] = features
        # A part's features are neighbours.
        first = int(part.features[0]) if len(part.features) else 0
        return features[:, first : first + len(part.features)]

    def _forget_passed(self, plan: StepPlan) -> None:
        """Drops the pixels of pictures whose last token was computed."""
        for row, _, _, stop in [*_known(plan, self._pictures)]:
            left = tuple(picture for picture in self._pictures[row] if picture.end > stop)
            self._pictures[row] = left
            if not left:
                del self._pictures[row]


def picture_rows(model: CausalModel, caps: DecodeCaps) -> PictureRows | None:
    """None for a model that reads no pictures. Raises ConfigError for draft trees that the model's
    positions do not allow."""
    if not isinstance(model, VisionLanguageModel):
        return None
    if model.has_axes and caps.tree is not None:
        raise ConfigError(
            "a model whose pictures have positions of three axes runs without draft trees; chains "
            "are supported",
            param="speculative_algorithm",
        )
    return PictureRows(model)


def has_spans(model: CausalModel) -> bool:
    """Returns whether the tokens of a picture see each other."""
    return isinstance(model, VisionLanguageModel) and model.has_spans


def _known(plan: StepPlan, rows: Mapping[int, object]) -> Iterator[tuple[int, int, int, int]]:
    """Yields each row of the step that is in `rows`, the index of its first token in the step, and
    the places of its first token and behind its last one in its sequence."""
    if not rows:
        return
    first = 0
    for row, length, kv_len in zip(plan.rows, plan.query_lens, plan.kv_lens, strict=True):
        if int(row) in rows:
            yield int(row), first, int(kv_len), int(kv_len + length)
        first += int(length)
