"""Builds an executor: loads the model, sizes the KV, and connects what lives on the device.

It knows no scheduler and no request. The only place in gpu/ that chooses by name.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from aserve.cache.layout import GroupLayout, longest_context, plan_groups
from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.registry import Attention, build_attention
from aserve.gpu.cudagraph.graphs import GraphParts, StepGraphs
from aserve.gpu.cudagraph.shapes import FILTER, GREEDY, NOISE, ShapeTable, row_counts
from aserve.gpu.cudagraph.warmup import names_the_option, run_largest_steps
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.decode.registry import MODES
from aserve.gpu.device.base import Device
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.device.registry import DEVICES, OpenDevice, open_device
from aserve.gpu.executor import ExecutorParts, TorchExecutor
from aserve.gpu.kv.layer_groups import LayerGroup, group_layers
from aserve.gpu.kv.pools import KvOps, KvPools
from aserve.gpu.kv.store import kv_dtype_name, kv_dtype_of
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.load import read_blueprint
from aserve.gpu.runner import ModelRunner, RunnerParts
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.format import WeightRequest, dtype_name
from aserve.gpu.weights.source import OnProgress, Target, ignore_progress
from aserve.messages.executor import EngineSpec

MIB = 1 << 20
MIN_PAGES = 2  # page 0 is nobody's
FOUND_THREADS = torch.get_num_threads()  # before an engine of a small model asks for fewer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """None lets the engine choose. `graph_rows`: of the largest step that is captured, on a device
    that captures; 0: none.
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
    memory_share: float = 0.9  # of a device's own memory, that may be used in all
    prefix_cache: bool = True
    max_rows: int | None = None
    max_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    max_waiting: int = 512
    depth: int = 2
    lead: int = 2
    debug_checks: bool = False
    device: str = "cpu"
    attention: str = "auto"
    decode: str = "autoregressive"
    graph_rows: int | None = None
    deterministic: bool = False  # a token gets the same bits in whatever step it is computed
    threads: int | None = None  # of torch; None: those that the model gains from


def build_executor(
    options: BuildOptions,
    *,
    on_progress: OnProgress = ignore_progress,
    devices: Mapping[str, OpenDevice] = DEVICES,
) -> TorchExecutor:
    return build_on(open_device(options.device, devices), options, on_progress=on_progress)


def build_on(
    device: Device, options: BuildOptions, *, on_progress: OnProgress = ignore_progress
) -> TorchExecutor:
    """Takes as long as loading takes; `on_progress(bytes done, bytes in all)` is called from
    here.
    """
    blueprint, code = read_blueprint(
        options.model_dir, options.model_impl, free_bytes=device.free_bytes()
    )
    if options.deterministic and code.name != "native":
        raise ConfigError(
            f"--deterministic is for models with native code; {code.name} code ({code.why}) may "
            "compute a token otherwise among others",
            param="deterministic",
        )
    form = device.weight_format(
        WeightRequest(
            options.dtype,
            blueprint.stored_dtype,
            blueprint.num_weights,
            options.quantization,
            options.deterministic,
        )
    )
    torch.set_num_threads(options.threads or min(form.max_threads or FOUND_THREADS, FOUND_THREADS))
    is_dummy = options.load_format == "dummy"
    ops = device.ops(form.dtype, is_deterministic=options.deterministic)
    target = Target(device.torch_device, device.free_bytes(), form.prepare, ops.elementwise)
    with names_the_option("the model does not fit; free memory of the device"):
        model = blueprint.load(
            LoadPlan(form.dtype, options.max_model_len, is_dummy, target, on_progress)
        )
    random = "random weights, " if is_dummy else ""
    about = f"{code.name} code ({code.why}), {random}{form.about}"
    mode = MODES[options.decode]()
    max_mixed_prefill_tokens = options.max_mixed_prefill_tokens or form.max_mixed_prefill_tokens
    options = dataclasses.replace(options, max_mixed_prefill_tokens=max_mixed_prefill_tokens)
    return assemble(model, mode, device, options, about=about)


def assemble(
    model: CausalModel,
    mode: DecodeMode,
    device: Device,
    options: BuildOptions,
    *,
    about: str | None = None,
) -> TorchExecutor:
    """Builds an executor around a loaded model; `about` describes its weights where that is more
    than the dtype. A fused step brings its own attention, so a backend chosen by name has none."""
    ops = device.ops(model.dtype, is_deterministic=options.deterministic)
    parts = _Parts(model, group_layers(model.layers), mode, device, ops, options)
    num_pages, budget_bytes = options.num_pages, 0
    if num_pages is None:
        run_largest = functools.partial(_run_largest, parts)
        budget_bytes = device.kv_bytes(run_largest, share=options.memory_share)
    what = "the KV does not fit beside the model; lower --num-pages or --gpu-memory-utilization"
    with device.stream(), names_the_option(what):
        made = _make(parts, num_pages=num_pages, budget_bytes=budget_bytes)
        attention = made.attention.backend
        graphs = StepGraphs(
            GraphParts(made.runner, device, attention, made.spec, _shapes(parts, made))
        )
    made.attention.warn()
    pools = made.runner.state.pools
    kv_about = f"KV {kv_dtype_name(pools.dtype)} {pools.size_bytes / MIB:,.0f} MiB"
    about = (
        f"{about or dtype_name(model.dtype)} on {device.about}, "
        f"attention {made.attention.name} ({made.attention.why}), {kv_about}"
    )
    if device.graph_rows:
        about += f", {graphs.about}"
    return TorchExecutor(
        ExecutorParts(made.runner, device, made.spec, graphs, options.debug_checks, about)
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    model: CausalModel
    groups: tuple[LayerGroup, ...]
    mode: DecodeMode
    device: Device
    ops: DeviceOps
    options: BuildOptions

    @property
    def max_rows(self) -> int:
        return self.options.max_rows or self.device.max_rows

    @property
    def max_batched_tokens(self) -> int:
        return self.options.max_batched_tokens or self.device.max_batched_tokens


@dataclass(frozen=True, slots=True)
class _Made:
    runner: ModelRunner
    spec: EngineSpec
    attention: Attention


def _run_largest(parts: _Parts) -> None:
    """With tables of its own, and page 0."""
    with parts.device.stream():
        made = _make(parts, num_pages=MIN_PAGES, budget_bytes=0)
        run_largest_steps(made.runner, parts.device, made.spec)


def _shapes(parts: _Parts, made: _Made) -> ShapeTable:
    """Of the steps that may be captured."""
    device, wanted = parts.device, parts.options.graph_rows
    by_shape = parts.ops.sample_ops.filters_by_shape
    can_capture = bool(device.graph_rows) and made.attention.capabilities.can_capture
    max_rows = min(device.graph_rows if wanted is None else wanted, made.spec.max_rows)
    return ShapeTable(
        counts=row_counts(max_rows if can_capture else 0),
        widths=tuple({1, made.spec.decode.max_tokens_per_step}),
        samplings=(GREEDY, NOISE, FILTER) if by_shape else (GREEDY, NOISE),
    )


def _make(parts: _Parts, *, num_pages: int | None, budget_bytes: int) -> _Made:
    model, groups, mode, device = parts.model, parts.groups, parts.mode, parts.device
    options = parts.options
    kv_dtype = kv_dtype_of(options.kv_dtype, model.dtype)
    spec = _plan_spec(parts, kv_dtype, num_pages=num_pages, budget_bytes=budget_bytes)
    state = _allocate(parts, spec, kv_dtype)
    site = AttentionSite(
        state.pools,
        groups,
        model.dtype,
        device,
        options.depth,
        is_deterministic=options.deterministic,
        has_bounds=any(field.name == SEQ_LEN for field in mode.fields),
    )
    attention = build_attention(options.attention, site, order=device.attention)
    state = dataclasses.replace(state, clears_pages=attention.capabilities.whole_pages)
    runner = ModelRunner(
        RunnerParts(
            model=model,
            state=state,
            attention=attention.backend,
            mode=mode,
            is_debug=options.debug_checks,
            sample_ops=parts.ops.sample_ops,
            fused_step=parts.ops.fused_step(model, state) if attention.is_auto else None,
            resolve=parts.ops.resolve,
        )
    )
    spec = msgspec.structs.replace(spec, names_shared_pages=attention.capabilities.shared_pages)
    return _Made(runner, spec, attention)


def _plan_spec(
    parts: _Parts, kv_dtype: torch.dtype, *, num_pages: int | None, budget_bytes: int
) -> EngineSpec:
    options = parts.options
    layouts = [group.layout(kv_dtype.itemsize) for group in parts.groups]
    max_model_len = parts.model.max_model_len
    if num_pages is None and options.max_model_len is None:
        max_model_len = _context_with_room(parts, layouts, budget_bytes)
    return EngineSpec(
        page_size=options.page_size,
        groups=plan_groups(
            layouts,
            page_size=options.page_size,
            budget_bytes=budget_bytes,
            max_rows=parts.max_rows,
            max_model_len=max_model_len,
            max_batched_tokens=parts.max_batched_tokens,
            num_pages=num_pages,
        ),
        max_rows=parts.max_rows,
        max_model_len=max_model_len,
        max_batched_tokens=parts.max_batched_tokens,
        vocab_size=parts.model.vocab_size,
        depth=options.depth,
        lead=options.lead,
        max_waiting=options.max_waiting,
        prefix_cache=options.prefix_cache,
        decode=parts.mode.caps,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens,
    )


def _context_with_room(parts: _Parts, layouts: Sequence[GroupLayout], budget_bytes: int) -> int:
    """The model's own, or as much of it as one request has KV memory for."""
    max_model_len = parts.model.max_model_len
    has_room = longest_context(
        layouts,
        page_size=parts.options.page_size,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        max_batched_tokens=parts.max_batched_tokens,
    )
    if has_room in (0, max_model_len):
        return max_model_len  # without any room the plan says what is missing
    logger.warning(
        "the context is %d tokens instead of the model's %d: KV memory is %d MiB; "
        "--num-pages gives more",
        *(has_room, max_model_len, budget_bytes // MIB),
    )
    return has_room


def _allocate(parts: _Parts, spec: EngineSpec, kv_dtype: torch.dtype) -> DeviceState:
    """Every table that lives as long as the engine, before anything is captured."""
    device, ops = parts.device, parts.ops
    where = device.torch_device
    pages_per_row = -(-spec.max_model_len // spec.page_size) + 1
    return DeviceState(
        pools=KvPools(
            parts.groups,
            spec.groups,
            page_size=spec.page_size,
            table_shape=(spec.max_rows + 1, pages_per_row),
            dtype=kv_dtype,
            device=where,
            ops=KvOps(device.zeros, ops.rope_and_store_kv),
        ),
        tables=RowTables(max_rows=spec.max_rows, device=where),
        relay=FutureMap(
            parts.mode.fields,
            max_rows=spec.max_rows,
            device=where,
            ops=ops.row_ops,
        ),
    )
