"""The tables of an engine by themselves, and a step brought to them as the executor would."""

from __future__ import annotations

import numpy as np
import torch

from aserve.gpu.device_batch import DeviceBatch, DeviceStep
from aserve.gpu.future_map import SEQ_LEN, FutureMap, RelayField
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.resolve import (
    DRAFTS,
    DeviceState,
    Resolve,
    apply_tables,
    resolve,
    stage_tables,
)
from aserve.gpu.sample.plan import RowFacts
from aserve.gpu.sample.row_tables import RowTables
from aserve.gpu.sections import DeviceSections, HostSections
from aserve.gpu.step_plan import plan_step
from aserve.messages import GroupSpec, ScheduleBatch
from tests.gpu.hash_model import VOCAB, HashModel

CPU = torch.device("cpu")
MAX_ROWS = 6
PAGE_SIZE = 4
FIELDS = (RelayField(SEQ_LEN, (), torch.int64), RelayField(DRAFTS, (2,), torch.int64))


def make_tables(*, num_pages: int = 20) -> DeviceState:
    """One layer group, with the relay fields of a mode that verifies two drafts."""
    pools = KvPools(
        group_layers(HashModel().layers),
        (GroupSpec("full", num_pages),),
        page_size=PAGE_SIZE,
        table_shape=(MAX_ROWS + 1, num_pages),
        dtype=torch.float64,
        device=CPU,
    )
    tables = RowTables(max_rows=MAX_ROWS, device=CPU)
    return DeviceState(pools, tables, FutureMap(FIELDS, max_rows=MAX_ROWS, device=CPU))


def to_device(sections: HostSections) -> DeviceSections:
    words = torch.zeros(sections.num_words, dtype=torch.int32)
    places = sections.write(words.numpy())
    return DeviceSections(words, places)


def bring(batch: ScheduleBatch, state: DeviceState, by: Resolve = resolve) -> DeviceStep:
    """Stage, apply and resolve."""
    facts = RowFacts(MAX_ROWS)
    facts.write(batch.row_inits)
    plan = plan_step(batch, facts, vocab_size=VOCAB, slice_len=64)
    sections = HostSections()
    stage_tables(batch, sections, state)
    plan.stage(sections)
    staged = to_device(sections)
    apply_tables(batch, staged, state)
    return by(plan, staged, state)


def paged() -> KvPools:
    """Two groups, the second with a window of 6; row r has the pages 3 r and 3 r + 1 of each."""
    made = KvPools(
        group_layers(HashModel(window=6).layers),
        (GroupSpec("full", 20), GroupSpec("window-6", 20, 6)),
        page_size=PAGE_SIZE,
        table_shape=(MAX_ROWS, 4),
        dtype=torch.float64,
        device=CPU,
    )
    for table in made.page_tables:
        table[1:, 0] = torch.arange(3, 18, 3)
        table[1:, 1] = torch.arange(4, 19, 3)
    return made


def device_batch(
    spans: list[int], kv_lens: list[int], *, first_id: int = 0, device: torch.device = CPU
) -> DeviceBatch:
    """Rows 1, 2, ..., with the ids from `first_id` on."""
    spans_cpu, lens_cpu = np.array(spans, np.int32), np.array(kv_lens, np.int32)
    owners = np.repeat(np.arange(len(spans)), spans_cpu)
    starts = np.cumsum(spans_cpu) - spans_cpu
    return DeviceBatch(
        iteration=9,
        rows=torch.arange(1, len(spans) + 1, device=device),
        spans=torch.tensor(spans, dtype=torch.int64, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int64, device=device),
        input_ids=torch.arange(first_id, first_id + sum(spans), device=device),
        owners=torch.from_numpy(owners).to(device),
        offsets=torch.from_numpy(np.arange(sum(spans)) - starts[owners]).to(device),
        spans_cpu=spans_cpu,
        len_bounds_cpu=lens_cpu + spans_cpu,
    )
