"""The tables of an engine by themselves, and a step brought to them as the executor would."""

from __future__ import annotations

import numpy as np
import torch

from aserve.gpu.kv.layer_groups import LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.forward_batch import DeviceBatch
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap, RelayField
from aserve.gpu.step.plan import plan_step
from aserve.gpu.step.resolve import (
    DRAFTS,
    DeviceState,
    DeviceStep,
    Resolve,
    apply_tables,
    resolve,
    stage_tables,
)
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.executor import GroupSpec
from aserve.messages.step import ScheduleBatch
from tests.fakes.hash_model import VOCAB, HashModel

CPU = torch.device("cpu")
MAX_ROWS = 6
PAGE_SIZE = 4
FIELDS = (RelayField(SEQ_LEN, (), torch.int64), RelayField(DRAFTS, (2,), torch.int64))


def make_pools(
    layers: tuple[LayerSpec, ...],
    num_pages: int,
    *,
    table_shape: tuple[int, int],
    page_size: int = PAGE_SIZE,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> KvPools:
    """Each layer group has `num_pages` pages."""
    groups = group_layers(layers)
    return KvPools(
        groups,
        tuple(GroupSpec(group.name, num_pages, group.window) for group in groups),
        page_size=page_size,
        table_shape=table_shape,
        dtype=dtype,
        device=device,
    )


def make_tables(*, num_pages: int = 20) -> DeviceState:
    """One layer group, with the relay fields of a mode that verifies two drafts."""
    pools = make_pools(HashModel().layers, num_pages, table_shape=(MAX_ROWS + 1, num_pages))
    tables = RowTables(max_rows=MAX_ROWS, device=CPU)
    return DeviceState(pools, tables, FutureMap(FIELDS, max_rows=MAX_ROWS, device=CPU))


def to_device(arrays: HostArrays) -> DeviceArrays:
    words = torch.zeros(arrays.num_words, dtype=torch.int32)
    indices = arrays.write(words.numpy())
    return DeviceArrays(words, indices)


def bring(batch: ScheduleBatch, state: DeviceState, by: Resolve = resolve) -> DeviceStep:
    """Stage, apply and resolve."""
    row_params = RowParams(MAX_ROWS)
    row_params.write(batch.row_inits)
    plan = plan_step(batch, row_params, vocab_size=VOCAB, slice_len=64)
    arrays = HostArrays()
    stage_tables(batch, arrays, state)
    plan.stage(arrays)
    staged = to_device(arrays)
    apply_tables(batch, staged, state)
    return by(plan, staged, state)


def paged() -> KvPools:
    """Two groups, the second with a window of 6; row r has the pages 3 r and 3 r + 1 of each."""
    made = make_pools(HashModel(window=6).layers, 20, table_shape=(MAX_ROWS, 4))
    for table in made.page_tables:
        table[1:, 0] = torch.arange(3, 18, 3)
        table[1:, 1] = torch.arange(4, 19, 3)
    return made


def device_batch(
    query_lens: list[int], kv_lens: list[int], *, first_id: int = 0, device: torch.device = CPU
) -> DeviceBatch:
    """Rows 1, 2, ..., with the ids from `first_id` on."""
    query_lens_cpu, lens_cpu = np.array(query_lens, np.int32), np.array(kv_lens, np.int32)
    token_to_row = np.repeat(np.arange(len(query_lens)), query_lens_cpu)
    starts = np.cumsum(query_lens_cpu) - query_lens_cpu
    return DeviceBatch(
        iteration=9,
        rows=torch.arange(1, len(query_lens) + 1, device=device),
        query_lens=torch.tensor(query_lens, dtype=torch.int64, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int64, device=device),
        input_ids=torch.arange(first_id, first_id + sum(query_lens), device=device),
        token_to_row=torch.from_numpy(token_to_row).to(device),
        offsets=torch.from_numpy(np.arange(sum(query_lens)) - starts[token_to_row]).to(device),
        query_lens_cpu=query_lens_cpu,
        len_bounds_cpu=lens_cpu + query_lens_cpu,
    )
