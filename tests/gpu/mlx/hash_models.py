"""The models of tests/fakes/hash_model.py on MLX arrays, in float64, which MLX has on the CPU."""

from __future__ import annotations

import math
from collections.abc import Collection

import mlx.core as mx

from aserve.gpu.mlx.arrays import from_torch
from aserve.gpu.mlx.decoder import MlxAttend
from tests.fakes.hash_model import HEAD_DIM, MAX_LOGIT, NUM_HEADS, STRENGTH, VOCAB, HashModel

POISON = VOCAB  # no token that the model gives


class MlxHashModel:
    """Fails in the forwards of these numbers, as a `FlakyModel` does: it raises, or its hidden
    states are NaN. The KV of the token POISON is NaN.
    """

    def __init__(
        self, model: HashModel, fails: Collection[int] = (), *, is_unsound: bool = False
    ) -> None:
        self.layers = model.layers
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.max_model_len = model.max_model_len
        self.dtype = mx.float64
        self.num_forwards = 0
        self._fails = frozenset(fails)
        self._is_unsound = is_unsound
        weights = model._phases, model._rates, model._mix, model._head
        self._phases, self._rates, self._mix, self._head = map(from_torch, weights)
        self._phases = mx.concatenate([self._phases, self._phases[:1]])  # of POISON
        mx.eval(self._phases)

    def forward(self, input_ids: mx.array, positions: mx.array, attend: MlxAttend) -> mx.array:
        self.num_forwards += 1
        phases = self._phases[input_ids] + positions[:, None].astype(mx.float64) * self._rates
        features = mx.where((input_ids == POISON)[:, None], float("nan"), _sin(phases))
        reads = [self._read(attend, 0, features)]
        for layer in range(1, len(self.layers)):
            reads.append(self._read(attend, layer, _hash(reads[-1], self._mix)))
        hidden = mx.concatenate(reads, axis=1)
        if self.num_forwards not in self._fails:
            return hidden
        if self._is_unsound:
            return hidden * float("nan")
        raise ArithmeticError(f"forward {self.num_forwards} fails, as the test wants it")

    def logits(self, hidden: mx.array) -> mx.array:
        return MAX_LOGIT * _hash(hidden, self._head)

    def _read(self, attend: MlxAttend, layer: int, values: mx.array) -> mx.array:
        none = mx.zeros((len(values), NUM_HEADS, HEAD_DIM), mx.float64)
        read = attend(self.layers[layer], none, none[:, :1], values[:, None])
        return read.reshape(len(values), -1)


def _hash(x: mx.array, weights: mx.array) -> mx.array:
    return _sin(STRENGTH * (x @ weights))


def _sin(x: mx.array) -> mx.array:
    """MLX computes the sine of float64 with the precision of float32, which STRENGTH turns into
    other tokens. This is Taylor's series, on [-pi / 2, pi / 2]."""
    turns = mx.round(x / math.pi)
    x = (x - turns * math.pi) * (1 - 2 * (mx.abs(turns) % 2))
    term = total = x
    for n in range(3, 24, 2):
        term = term * x * x * (-1 / (n * (n - 1)))
        total = total + term
    return total
