"""How a device computes, fastest, what a model of one dtype needs beside its products.

It knows no device: each says which ways are its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.gpu.future_map import PLAIN_ROWS, RowOps
from aserve.gpu.kv.stored import TurnAndStore, turn_then_store
from aserve.gpu.layers.elementwise import PLAIN, Elementwise
from aserve.gpu.resolve import Resolve, resolve
from aserve.gpu.sample.ops import PLAIN_OPS, SampleOps


@dataclass(frozen=True, slots=True)
class Ways:
    """In torch, if nothing else is said."""

    elementwise: Elementwise = PLAIN  # the layers between the products
    turn_and_store: TurnAndStore = turn_then_store  # how heads are turned, and get into their pools
    row_ops: RowOps = PLAIN_ROWS  # how rows of the relay are read and written
    resolve: Resolve = resolve  # how a step's words become the model's inputs
    sample_ops: SampleOps = PLAIN_OPS


TORCH_WAYS = Ways()
