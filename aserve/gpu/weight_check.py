"""Snapshots of the weights that a running model computes with, so that an administrator can see
whether updates have left them as they were.

A snapshot has one hash of the values on the device for each weight. It is lost when the engine's
process ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.errors import InvalidRequest
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.replace_weights import attributes_of, may_hold_weights

MAX_NAMED = 5  # weights in a message


class WeightChecker:
    """Its methods take as long as reading all weights, so call them in a thread."""

    __slots__ = ("_snapshot",)

    def __init__(self) -> None:
        self._snapshot: Mapping[str, bytes] | None = None

    def take(self, model: object) -> None:
        self._snapshot = hashes_of(model)

    def compare(self, model: object) -> None:
        """Raises InvalidRequest if the weights are not those of the snapshot."""
        if self._snapshot is None:
            raise InvalidRequest(
                "The engine has no snapshot of its weights: send the action 'snapshot' first.",
                param="action",
                code="no_snapshot",
            )
        before, now = self._snapshot, hashes_of(model)
        changed = [name for name, digest in now.items() if before.get(name) != digest]
        if changed:
            shown = ", ".join(changed[:MAX_NAMED])
            raise InvalidRequest(
                f"{len(changed)} of {len(now)} weights differ from the snapshot: {shown}"
                f"{', ...' if len(changed) > MAX_NAMED else ''}.",
                param="action",
                code="weights_differ",
            )


def hashes_of(model: object) -> dict[str, bytes]:
    """Returns the hash of the bytes of each weight, by the path of attributes that leads to it."""
    with torch.inference_mode():
        return {name: _hash(value) for name, value in _weights(model, "model", set())}


def _weights(
    value: object, name: str, seen: set[int]
) -> Iterator[tuple[str, Tensor | np.ndarray[Any, Any]]]:
    """Yields each tensor and array once. NOTE: what adapters add is no weight of the model."""
    if isinstance(value, LoraLinear):
        value = value.base
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor) and value.is_meta:
        return  # a layer of another stage
    if isinstance(value, Tensor | np.ndarray):
        yield name, value
    elif isinstance(value, torch.ScriptObject):  # a matrix in fbgemm's format
        yield name, torch.ops.quantized.linear_unpack_fp16(value)[0]
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _weights(each, f"{name}[{number}]", seen)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _weights(each, f"{name}[{key}]", seen)
    elif may_hold_weights(value):
        for attribute in attributes_of(value):
            yield from _weights(getattr(value, attribute), f"{name}.{attribute}", seen)


def _hash(value: Tensor | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, Tensor):
        dense = value.to_dense() if value.is_mkldnn else value.detach()
        value = dense.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=16).digest()
