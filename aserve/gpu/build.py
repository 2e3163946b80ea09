"""Builds an executor: loads the model, sizes the KV, and connects what lives on the device.

It knows no scheduler and no request. The only place in gpu/ that chooses by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.cache.layout import GroupLayout, plan_groups
from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.attention.capabilities import AttentionSite
from aserve.gpu.attention.choice import build_attention
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.decode.registry import MODES
from aserve.gpu.device.base import Device
from aserve.gpu.device.registry import open_device
from aserve.gpu.executor import ExecutorParts, TorchExecutor
from aserve.gpu.future_map import FutureMap
from aserve.gpu.graphs import GraphRunner
from aserve.gpu.kv.layer_groups import LayerGroup, group_layers
from aserve.gpu.kv.pools import KvPools, KvWays
from aserve.gpu.kv.stored import kv_dtype_name, kv_dtype_of
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.resolve import DeviceState
from aserve.gpu.runner import ModelRunner, RunnerParts
from aserve.gpu.sample.row_tables import RowTables
from aserve.gpu.weights.blueprint import LoadPlan
from aserve.gpu.weights.form import WeightWish, dtype_name
from aserve.gpu.weights.load import read_blueprint
from aserve.gpu.weights.target import Target
from aserve.messages import EngineSpec, GroupSpec

MIB = 1 << 20
GIB = 1 << 30
KV_PART = 4  # of free memory, KV takes one part of so many
MAX_KV_BYTES = GIB
FOUND_THREADS = torch.get_num_threads()  # before an engine of a small model asks for fewer

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """None lets the engine choose; `graph_sizes` are the captured numbers of rows, none is
    eager.
    """

    model_dir: Path
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    kv_dtype: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    prefix_cache: bool = True
    max_rows: int = 64
    max_batched_tokens: int = 2048
    max_waiting: int = 512
    depth: int = 2
    lead: int = 2
    debug_checks: bool = False
    device: str = "cpu"
    attention: str = "auto"
    decode: str = "autoregressive"
    graph_sizes: tuple[int, ...] = ()
    threads: int | None = None  # of torch; None: those that the model gains from


def build_executor(
    options: BuildOptions, *, on_progress: OnProgress = lambda _done, _total: None
) -> TorchExecutor:
    return build_on(open_device(options.device), options, on_progress=on_progress)


def build_on(
    device: Device,
    options: BuildOptions,
    *,
    on_progress: OnProgress = lambda _done, _total: None,
) -> TorchExecutor:
    """Takes as long as loading takes; `on_progress(bytes done, bytes in all)` is called from
    here.
    """
    blueprint, code = read_blueprint(options.model_dir, options.model_impl)
    form = device.weight_form(
        WeightWish(
            options.dtype, blueprint.stored_dtype, blueprint.num_weights, options.quantization
        )
    )
    torch.set_num_threads(options.threads or min(form.max_threads or FOUND_THREADS, FOUND_THREADS))
    is_dummy = options.load_format == "dummy"
    target = Target(
        device.torch_device, device.free_bytes(), form.prepare, device.elementwise(form.dtype)
    )
    model = blueprint.load(
        LoadPlan(form.dtype, options.max_model_len, is_dummy, target, on_progress)
    )
    random = "random weights, " if is_dummy else ""
    about = f"{code.name} code ({code.why}), {random}{form.about}"
    return assemble(model, MODES[options.decode](), device, options, about=about)


def assemble(
    model: CausalModel,
    mode: DecodeMode,
    device: Device,
    options: BuildOptions,
    *,
    about: str | None = None,
) -> TorchExecutor:
    """An executor around a model that is there already; `about` says in which form, if
    that is more than its dtype."""
    groups = group_layers(model.layers)
    kv_dtype = kv_dtype_of(options.kv_dtype, model.dtype)
    layouts = [group.layout(kv_dtype.itemsize) for group in groups]
    specs = _plan_pages(model, layouts, device, options)
    spec = EngineSpec(
        page_size=options.page_size,
        groups=specs,
        max_rows=options.max_rows,
        max_model_len=model.max_model_len,
        max_batched_tokens=options.max_batched_tokens,
        vocab_size=model.vocab_size,
        depth=options.depth,
        lead=options.lead,
        max_waiting=options.max_waiting,
        prefix_cache=options.prefix_cache,
        decode=mode.caps,
    )
    state = _allocate(model, groups, spec, mode=mode, device=device, kv_dtype=kv_dtype)
    site = AttentionSite(state.pools, groups, model.dtype, device, options.depth)
    attention = build_attention(options.attention, site, order=device.attention)
    state = dataclasses.replace(state, clears_pages=attention.can.whole_pages)
    runner = ModelRunner(
        RunnerParts(
            model=model,
            state=state,
            attention=attention.backend,
            mode=mode,
            graphs=_graphs(model, attention.backend, state.pools, options.graph_sizes),
            is_debug=options.debug_checks,
            sample_ops=device.sample_ops(model.dtype),
        )
    )
    kv_about = f"KV {kv_dtype_name(kv_dtype)} {state.pools.size_bytes / MIB:,.0f} MiB"
    about = (
        f"{about or dtype_name(model.dtype)} on {device.about}, "
        f"attention {attention.name} ({attention.why}), {kv_about}"
    )
    return TorchExecutor(ExecutorParts(runner, device, spec, options.debug_checks, about))


def _plan_pages(
    model: CausalModel, layouts: Sequence[GroupLayout], device: Device, options: BuildOptions
) -> tuple[GroupSpec, ...]:
    return plan_groups(
        layouts,
        page_size=options.page_size,
        budget_bytes=min(device.free_bytes() // KV_PART, MAX_KV_BYTES),
        max_rows=options.max_rows,
        max_model_len=model.max_model_len,
        max_batched_tokens=options.max_batched_tokens,
        num_pages=options.num_pages,
    )


def _allocate(
    model: CausalModel,
    groups: tuple[LayerGroup, ...],
    spec: EngineSpec,
    *,
    mode: DecodeMode,
    device: Device,
    kv_dtype: torch.dtype,
) -> DeviceState:
    """Every table that lives as long as the engine, before anything is captured."""
    where = device.torch_device
    pages_per_row = -(-model.max_model_len // spec.page_size) + 1
    return DeviceState(
        pools=KvPools(
            groups,
            spec.groups,
            page_size=spec.page_size,
            table_shape=(spec.max_rows + 1, pages_per_row),
            dtype=kv_dtype,
            device=where,
            ways=KvWays(device.zeros, device.store_kv(model.dtype)),
        ),
        tables=RowTables(max_rows=spec.max_rows, device=where),
        relay=FutureMap(mode.fields, max_rows=spec.max_rows, device=where),
    )


def _graphs(
    model: CausalModel, attention: AttentionBackend, pools: KvPools, sizes: tuple[int, ...]
) -> GraphRunner | None:
    return GraphRunner(model, attention, pools, sizes=sizes) if sizes else None
