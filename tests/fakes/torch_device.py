"""The CPU as a device whose layers, attention and sampling are torch's operators and nothing else,
so that a capture of any step sees all of it; and a token gets the same bits in whatever step it is
computed, as `--deterministic` has it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from aserve.gpu.attention.base import AttentionKind, AttentionSite, Capabilities
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.models.base import Attend
from aserve.gpu.sampling.ops import SHAPED_OPS
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.fakes.graph_device import GraphDevice

ATTENTION = "each-token-alone"


class TorchDevice(GraphDevice):
    """Attention is of `ATTENTION`, which a test has to make known."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = (ATTENTION,)

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        return DeviceOps(sample_ops=SHAPED_OPS)


class EachTokenAlone:
    """The reference, to which each token is a row of its own, of the greatest length there is: so
    all its sums are of the same number of terms in the same order."""

    static_plans = None

    def __init__(self, site: AttentionSite) -> None:
        self._reference = TorchReference(site.pools)
        self._max_len = (site.pools.page_tables[0].shape[1] - 1) * site.pools.page_size

    def plan(self, batch: ForwardBatch) -> object:
        return None

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        alone = dataclasses.replace(
            batch,
            rows=batch.rows.index_select(0, batch.token_to_row),
            lens=batch.cache_positions + 1,
            query_lens_cpu=np.ones(batch.num_tokens, np.int32),
            len_bounds_cpu=np.full(batch.num_tokens, self._max_len, np.int32),
        )
        return self._reference.bind(alone, None)


KIND = AttentionKind(Capabilities(can_capture=True, deterministic=True), EachTokenAlone)
