"""Builds an executor: loads the model, sizes KV pools, chooses attention, connects the parts.

This is the only place in gpu/ that chooses devices, backends and modes by name.
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
from aserve.gpu.attention.select import Attention, build_attention
from aserve.gpu.cudagraph.graphs import GraphParts, StepGraphs
from aserve.gpu.cudagraph.shapes import FILTER, GREEDY, NOISE, ShapeTable, row_counts
from aserve.gpu.cudagraph.warmup import names_the_option, run_largest_steps
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.decode.registry import MODES, PLAIN
from aserve.gpu.device.base import Device
from aserve.gpu.device.fused_step import FusedStep
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.device.registry import DEVICES, OpenDevice, open_device
from aserve.gpu.executor import ExecutorParts, TorchExecutor
from aserve.gpu.kv.layer_groups import LayerGroup, group_layers
from aserve.gpu.kv.pools import KvOps, KvPools
from aserve.gpu.kv.store import kv_dtype_name, kv_dtype_of
from aserve.gpu.live_loader import LiveLoader, model_reader
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel, DraftModel, LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.registry import Code
from aserve.gpu.runner import DraftParts, ModelRunner, RunnerParts
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.prediction import Predicted, verifying
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import DraftRequest, SpecOptions
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.format import WeightRequest, dtype_name
from aserve.gpu.weights.source import OnProgress, Target, ignore_progress
from aserve.messages.executor import EngineSpec

MIB = 1 << 20
MIN_PAGES = 2  # page 0 is padding
DEFAULT_THREADS = torch.get_num_threads()  # read before any engine lowers it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The settings of the engine. A None lets the engine choose."""

    model_dir: Path
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    kv_dtype: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    memory_share: float = 0.9  # share of the device memory that the engine may use in all
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
    graph_rows: int | None = None  # rows of the largest captured step; 0 captures none
    deterministic: bool = False  # logits of a token do not depend on the rest of the batch
    speculative: SpecOptions | None = None
    max_loras: int = 0  # LoRA adapters on the device at once; 0: none, and linear layers are plain
    max_lora_rank: int = 16
    threads: int | None = None  # of torch; None: as many as the model benefits from


def build_executor(
    options: BuildOptions,
    *,
    on_progress: OnProgress = ignore_progress,
    devices: Mapping[str, OpenDevice] = DEVICES,
    mode: DecodeMode | None = None,
) -> TorchExecutor:
    device = open_device(options.device, devices)
    return build_on(device, options, on_progress=on_progress, mode=mode)


def build_on(
    device: Device,
    options: BuildOptions,
    *,
    on_progress: OnProgress = ignore_progress,
    mode: DecodeMode | None = None,
) -> TorchExecutor:
    """Loads the model on the calling thread, and calls `on_progress(bytes loaded, total bytes)`.
    `mode` is used in place of the one that the options name.
    """
    loader, code = make_loader(
        options.model_dir, options.model_impl, free_bytes=device.free_bytes()
    )
    if options.deterministic and code.name != "native":
        raise ConfigError(
            f"--deterministic needs a model with native code; with {code.name} code ({code.why}) "
            "the result of a token may depend on the other tokens of its batch",
            param="deterministic",
        )
    form = device.weight_format(
        WeightRequest(
            options.dtype,
            loader.stored_dtype,
            loader.num_weights,
            options.quantization,
            options.deterministic,
        )
    )
    torch.set_num_threads(
        options.threads or min(form.max_threads or DEFAULT_THREADS, DEFAULT_THREADS)
    )
    is_dummy = options.load_format == "dummy"
    ops = device.ops(form.dtype, is_deterministic=options.deterministic)
    target = Target(device.torch_device, device.free_bytes(), form.prepare, ops.elementwise)
    loras = None
    if options.max_loras:
        _refuse_adapters(code)
        loras = LoraTables(
            max_loras=options.max_loras, max_rank=options.max_lora_rank, ops=ops.lora_ops()
        )
        target = dataclasses.replace(target, wrap=loras.wrap)
    with names_the_option("the model does not fit; free memory of the device"):
        plan = LoadPlan(form.dtype, options.max_model_len, is_dummy, target, on_progress)
        model = loader.load(plan)
    random = "random weights, " if is_dummy else ""
    about = f"{code.name} code ({code.why}), {random}{form.about}"
    drafter = None
    if options.speculative is not None:
        loaded = ALGORITHMS[options.speculative.algorithm](
            DraftRequest(options.speculative, model, plan, ops, target_dir=options.model_dir)
        )
        drafter = loaded.model
        mode = verifying(loaded.drafter, ops.suffix_match, loaded.fuse)
        about = f"{about}, {options.speculative.algorithm} drafts {loaded.about}"
    if mode is None and options.decode == PLAIN:
        mode = Predicted(None, ops.suffix_match)
    mode = mode or MODES[options.decode]()
    max_mixed_prefill_tokens = options.max_mixed_prefill_tokens or form.max_mixed_prefill_tokens
    options = dataclasses.replace(options, max_mixed_prefill_tokens=max_mixed_prefill_tokens)
    live_loader = LiveLoader(model, loras, model_reader(loader, plan))
    return assemble(
        model, mode, device, options, about=about, drafter=drafter, live_loader=live_loader
    )


def _refuse_adapters(code: Code) -> None:
    if code.name != "native":
        raise ConfigError(
            f"--enable-lora needs a model with native code; this one has {code.name} code "
            f"({code.why})",
            param="enable_lora",
        )


def assemble(
    model: CausalModel,
    mode: DecodeMode,
    device: Device,
    options: BuildOptions,
    *,
    about: str | None = None,
    drafter: DraftModel | None = None,
    live_loader: LiveLoader | None = None,
) -> TorchExecutor:
    """Builds an executor around loaded models. `about` describes the weights if there is more to
    say than their dtype. `live_loader` has the adapters that the model was built with."""
    live_loader = live_loader or LiveLoader(model)
    ops = device.ops(model.dtype, is_deterministic=options.deterministic)
    parts = _Parts(
        model, group_layers(model.layers), mode, device, ops, options, drafter, live_loader.loras
    )
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
    size_bytes = pools.size_bytes
    if (draft_pools := made.runner.state.draft_pools) is not None:
        size_bytes += draft_pools.size_bytes - pools.token_pool.nbytes  # which both share
    kv_about = f"KV {kv_dtype_name(pools.dtype)} {size_bytes / MIB:,.0f} MiB"
    about = (
        f"{about or dtype_name(model.dtype)} on {device.about}, "
        f"attention {made.attention.name} ({made.attention.why}), {kv_about}"
    )
    if device.graph_rows:
        about += f", {graphs.about}"
    return TorchExecutor(
        ExecutorParts(
            runner=made.runner,
            device=device,
            spec=made.spec,
            graphs=graphs,
            is_debug=options.debug_checks,
            about=about,
            live_loader=live_loader,
            needs_host_lens=made.attention.capabilities.host_lens,
        )
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    model: CausalModel
    groups: tuple[LayerGroup, ...]
    mode: DecodeMode
    device: Device
    ops: DeviceOps
    options: BuildOptions
    drafter: DraftModel | None = None
    loras: LoraTables | None = None

    @property
    def draft_groups(self) -> tuple[LayerGroup, ...]:
        return group_layers(self.drafter.layers) if self.drafter is not None else ()

    @property
    def draft_groups_by_table(self) -> tuple[LayerGroup, ...]:
        """The same, one for each page table of the target; some may have no layers."""
        by_window = {group.window: group for group in self.draft_groups}
        windows = (group.window for group in self.groups)
        return tuple(by_window.get(window, LayerGroup(window, ())) for window in windows)

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
    """Runs the largest steps with tables of their own and page 0 alone, to measure their memory."""
    with parts.device.stream():
        made = _make(parts, num_pages=MIN_PAGES, budget_bytes=0)
        run_largest_steps(made.runner, parts.device, made.spec)


def _shapes(parts: _Parts, made: _Made) -> ShapeTable:
    """Returns the shapes of the steps that may be captured."""
    device, graph_rows = parts.device, parts.options.graph_rows
    by_shape = parts.ops.sample_ops.filters_by_shape
    can_capture = bool(device.graph_rows) and made.attention.capabilities.can_capture
    max_rows = min(device.graph_rows if graph_rows is None else graph_rows, made.spec.max_rows)
    return ShapeTable(
        counts=row_counts(max_rows if can_capture else 0),
        widths=tuple(sorted({1, *parts.mode.graph_widths})),
        samplings=(GREEDY, NOISE, FILTER) if by_shape else (GREEDY, NOISE),
    )


def _make(parts: _Parts, *, num_pages: int | None, budget_bytes: int) -> _Made:
    model, groups, mode, device = parts.model, parts.groups, parts.mode, parts.device
    options = parts.options
    kv_dtype = kv_dtype_of(options.kv_dtype, model.dtype)
    spec = _plan_spec(parts, kv_dtype, num_pages=num_pages, budget_bytes=budget_bytes)
    state = _allocate(parts, spec, kv_dtype)
    # The executor replaces bounds by published lengths before it plans a step. The lengths of
    # further forwards within the step are known on the device only.
    publishes = any(field.name == SEQ_LEN for field in mode.fields)
    site = dataclasses.replace(
        _site(parts, state.pools, groups, model.dtype),
        num_plans=(options.depth + 1) * mode.num_forwards,
        has_bounds=publishes and mode.num_forwards > 1,
        has_tree_masks=mode.caps.tree is not None,
    )
    attention = build_attention(options.attention, site, order=device.attention)
    drafter = _build_drafter(parts, state)
    clears_pages = attention.capabilities.whole_pages or drafter is not None
    state = dataclasses.replace(state, clears_pages=clears_pages)
    # A fused step has attention of its own, so it is not used where the user names a backend.
    make = parts.ops.fused_step
    fused_model = make(model, state) if attention.is_auto else None
    fused_step: FusedStep | None = fused_model
    if fused_model is not None and isinstance(mode, Speculative | Predicted):
        fused_step = mode.fused_step(fused_model, make, state)
    runner = ModelRunner(
        RunnerParts(
            model=model,
            state=state,
            attention=attention.backend,
            mode=mode,
            is_debug=options.debug_checks,
            sample_ops=parts.ops.sample_ops,
            fused_step=fused_step,
            resolve=parts.ops.resolve,
            drafter=drafter,
            loras=parts.loras,
        )
    )
    spec = msgspec.structs.replace(spec, names_shared_pages=attention.capabilities.shared_pages)
    return _Made(runner, spec, attention)


def _site(
    parts: _Parts, pools: KvPools, groups: tuple[LayerGroup, ...], dtype: torch.dtype
) -> AttentionSite:
    deterministic = parts.options.deterministic
    return AttentionSite(pools, groups, dtype, parts.device, is_deterministic=deterministic)


def _build_drafter(parts: _Parts, state: DeviceState) -> DraftParts | None:
    """NOTE: the drafter runs before the host knows how many tokens the step accepts, so its
    attention cannot plan from exact lengths."""
    if parts.drafter is None or state.draft_pools is None:
        return None
    site = dataclasses.replace(
        _site(parts, state.draft_pools, parts.draft_groups_by_table, parts.drafter.dtype),
        num_plans=(parts.options.depth + 1) * parts.mode.num_draft_forwards,
        has_bounds=True,
        has_tree_masks=parts.mode.caps.tree is not None,
    )
    attention = build_attention("auto", site, order=parts.device.attention)
    return DraftParts(parts.drafter, attention.backend)


def _plan_spec(
    parts: _Parts, kv_dtype: torch.dtype, *, num_pages: int | None, budget_bytes: int
) -> EngineSpec:
    options = parts.options
    layouts = [_layout(parts, group, kv_dtype) for group in parts.groups]
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
        dtype=dtype_name(parts.model.dtype),
    )


def _layout(parts: _Parts, group: LayerGroup, kv_dtype: torch.dtype) -> GroupLayout:
    """Returns the group's layout, with the drafter's layers of the same window."""
    layout = group.layout(kv_dtype.itemsize)
    if parts.drafter is None:
        return layout
    draft_dtype = kv_dtype_of(parts.options.kv_dtype, parts.drafter.dtype)
    per_token = sum(
        own.layout(draft_dtype.itemsize).bytes_per_token
        for own in parts.draft_groups
        if own.window == group.window
    )
    return msgspec.structs.replace(layout, draft_bytes_per_token=per_token)


def _context_with_room(parts: _Parts, layouts: Sequence[GroupLayout], budget_bytes: int) -> int:
    """Returns the model's context length, or what one request has KV memory for if that is less."""
    max_model_len = parts.model.max_model_len
    room = longest_context(
        layouts,
        page_size=parts.options.page_size,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        max_batched_tokens=parts.max_batched_tokens,
    )
    if room in (0, max_model_len):
        return max_model_len  # with no room at all, plan_groups reports what is missing
    logger.warning(
        "the context is %d tokens instead of the model's %d: KV memory is %d MiB; "
        "--num-pages gives more",
        *(room, max_model_len, budget_bytes // MIB),
    )
    return room


def _allocate(parts: _Parts, spec: EngineSpec, kv_dtype: torch.dtype) -> DeviceState:
    """Allocates the tables that live as long as the engine, before any graph is captured."""
    device, ops = parts.device, parts.ops
    where = device.torch_device
    # A drafter's forwards of rows with few drafts reach as far as those of others.
    most = spec.max_model_len + spec.decode.most_tokens(is_predicted=True)
    pages_per_row = -(-most // spec.page_size) + 1
    pools = KvPools(
        parts.groups,
        spec.groups,
        page_size=spec.page_size,
        table_shape=(spec.max_rows + 1, pages_per_row),
        dtype=kv_dtype,
        device=where,
        ops=KvOps(device.zeros, ops.rope_and_store_kv),
    )
    draft_pools = None
    if parts.drafter is not None:
        draft_dtype = kv_dtype_of(parts.options.kv_dtype, parts.drafter.dtype)
        draft_pools = pools.beside(parts.draft_groups, spec.groups, draft_dtype)
    return DeviceState(
        pools=pools,
        tables=RowTables(max_rows=spec.max_rows, device=where),
        relay=FutureMap(
            parts.mode.fields,
            max_rows=spec.max_rows,
            device=where,
            ops=ops.row_ops,
        ),
        draft_pools=draft_pools,
    )
