"""Builds an executor: loads the model, sizes KV pools, chooses attention, connects the parts.

This is the only place in gpu/ that chooses devices, backends and modes by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from aserve.cache.layout import GroupLayout, with_pages
from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.recurrent import (
    checkpoint_memory,
    empty_states,
    refuse_beside_recurrent,
    with_checkpoints,
    with_recurrent,
)
from aserve.gpu.attention.select import Attention, build_attention
from aserve.gpu.attention.sparse import index_bytes_per_token
from aserve.gpu.cudagraph.forwards import ForwardGraphs
from aserve.gpu.cudagraph.graphs import GraphParts, StepGraphs
from aserve.gpu.cudagraph.limits import GraphLimits
from aserve.gpu.cudagraph.shapes import shape_table
from aserve.gpu.cudagraph.warmup import names_the_option, run_largest_steps
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.device.base import Device
from aserve.gpu.device.fused_step import FusedStep
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.device.registry import DEVICES, OpenDevice, open_device
from aserve.gpu.diffusion.mode import diffusion_mode, in_blocks
from aserve.gpu.diffusion.registry import Denoising
from aserve.gpu.executor import ExecutorParts, TorchExecutor
from aserve.gpu.hisparse.backend import with_hisparse
from aserve.gpu.hisparse.config import HiSparseConfig, refuse_beside_hisparse
from aserve.gpu.hisparse.host_kv import HostKvPools
from aserve.gpu.hisparse.hot_rows import HotRows, HotShape
from aserve.gpu.hisparse.memory import host_memory, kv_budget
from aserve.gpu.kv.layer_groups import LayerGroup, group_layers
from aserve.gpu.kv.pools import KvOps, KvPools
from aserve.gpu.kv.store import kv_dtype_name, kv_dtype_of
from aserve.gpu.live_loader import LiveLoader, model_reader
from aserve.gpu.lora.tables import LoraTables, refuse_adapters
from aserve.gpu.models.base import CausalModel, DraftModel, LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.pooling import PooledModel, generating
from aserve.gpu.moe.two_batches import two_batches
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.experts import ExpertRanks, graph_rows
from aserve.gpu.parallel.fused_model import with_fusable_sums, with_fused_sums
from aserve.gpu.parallel.joint import JointDecoder
from aserve.gpu.parallel.source import for_rank
from aserve.gpu.parallel.stages import UNDIVIDED, Pipeline, groups_of, watch_of
from aserve.gpu.runner import DraftParts, ModelRunner, RunnerParts
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.prediction import Predicted
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.rejection import verification_for
from aserve.gpu.spec.request import DraftRequest, SpecOptions, refuse_drafts, tree_flags
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.pictures import has_spans
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.step.state_checkpoints import StateCheckpoints
from aserve.gpu.weights.format import WeightFormat, WeightRequest, dtype_name
from aserve.gpu.weights.source import LinearBits, OnProgress, Target, ignore_progress
from aserve.messages.base import MIB
from aserve.messages.executor import EngineSpec, TierPolicy

MIN_PAGES = 2  # page 0 is padding
DEFAULT_THREADS = torch.get_num_threads()  # read before any engine lowers it


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
    num_checkpoints: int | None = None  # of recurrent states; None: what a part of KV's memory has
    checkpoint_interval: int = 256  # tokens
    kv_tiers: TierPolicy = "off"
    max_rows: int | None = None
    max_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    max_waiting: int = 512
    depth: int = 2
    lead: int = 2
    debug_checks: bool = False
    device: str = "cpu"
    attention: str = "auto"
    graph_rows: int | None = None  # rows of the largest captured step; 0 captures none
    # Tokens of the largest forward that is captured in pieces; 0: decodes only. None: forwards are
    # captured within whole steps only.
    piece_tokens: int | None = None
    two_batches: bool = False  # forwards of models with experts run in two halves
    deterministic: bool = False  # logits of a token do not depend on the rest of the batch
    speculative: SpecOptions | None = None
    denoising: Denoising | None = None  # of a diffusion model; None: the default
    max_loras: int = 0  # LoRA adapters on the device at once; 0: none, and linear layers are plain
    max_lora_rank: int = 16
    hisparse: HiSparseConfig | None = None  # KV of sparse attention is in the host's memory
    threads: int | None = None  # of torch; None: as many as the model benefits from
    ranks: Collectives = ALONE  # among which the model is divided
    data_parallel: bool = False  # each of `ranks` has rows and pages of its own
    experts: ExpertRanks | None = None  # divides the experts whole; None: like other layers
    pipeline: Pipeline = UNDIVIDED
    num_processes: int = 1  # ranks that share this machine
    num_at_once: int = 1  # of these that compute at the same time
    shares_memory: bool = True  # these ranks also share the device's memory


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
            loader.stored_quantization,
            options.deterministic,
        )
    )
    torch.set_num_threads(
        options.threads
        or max(
            1,
            min(form.max_threads or DEFAULT_THREADS, DEFAULT_THREADS) // options.num_at_once,
        )
    )
    is_dummy = options.load_format == "dummy"
    ops = device.ops(form.dtype, is_deterministic=options.deterministic)
    target = _target(device, options, form, ops)
    loras = None
    if options.max_loras:
        refuse_adapters(code)
        loras = LoraTables(
            max_loras=options.max_loras,
            max_rank=options.max_lora_rank,
            ops=ops.lora_ops(),
            own_name=loader.own_name,
        )
        target = dataclasses.replace(target, wrap=loras.wrap, check_added=loras.check_room)
    with names_the_option("the model does not fit; free memory of the device"):
        plan = LoadPlan(form.dtype, options.max_model_len, is_dummy, target, on_progress)
        whole = loader.load(plan)
        model = with_fused_sums(
            options.pipeline.part_of(whole),
            options.ranks,
            is_plain=not options.data_parallel and not options.two_batches,
        )
    balanced = () if options.experts is None else options.experts.place_experts(model)
    live_loader = LiveLoader(whole, loras, model_reader(loader, plan), balanced)
    about = f"{code.name} code ({code.why}), {'random weights, ' * is_dummy}{form.about}"
    drafter = None
    refuse_beside_recurrent(
        whole,
        {
            **tree_flags(options.speculative),
            "--enable-two-batch-overlap": options.two_batches,
            "--enable-dp-attention": options.data_parallel,
            "--deterministic": options.deterministic,
        },
    )
    mode = mode or diffusion_mode(
        model,
        options.denoising,
        beside={
            "--speculative-algorithm": options.speculative is not None,
            "--enable-two-batch-overlap": options.two_batches,
        },
    )
    speculative = options.speculative
    if speculative is not None:
        refuse_drafts(model)
        loaded = options.pipeline.load_drafter(
            DraftRequest(speculative, model, plan, ops, target_dir=options.model_dir),
            ALGORITHMS[speculative.algorithm],
        )
        drafter = loaded.model
        verification = verification_for(speculative, loaded, vocab_size=model.vocab_size)
        mode = Predicted(loaded.drafter, ops.suffix_match, loaded.fuse, verification)
        about = f"{about}, {speculative.algorithm} drafts {loaded.about}"
        if verification is not None:
            about += f", {speculative.verification} verification"
    model = JointDecoder(model, options.ranks, loras) if options.data_parallel else model
    mode = mode or Predicted(None, ops.suffix_match)
    mode = options.pipeline.mode_of(mode, model, options.ranks)
    options = dataclasses.replace(
        options,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens or form.max_mixed_prefill_tokens,
        kv_dtype=form.kv_dtype_for(options.kv_dtype, model.layers),
    )
    return assemble(
        model, mode, device, options, about=about, drafter=drafter, live_loader=live_loader
    )


def _target(device: Device, options: BuildOptions, form: WeightFormat, ops: DeviceOps) -> Target:
    """Returns the target of this rank's part of the model."""
    target = with_fusable_sums(
        Target(
            device.torch_device,
            device.free_bytes(),
            form.prepare,
            form.prepare_grouped,
            form.prepare_moved,
            ops.elementwise,
            LinearBits(form.stored_bits, form.factor_bits),
        ),
        options.ranks,
    )
    unsupported: dict[str, object] = {
        "--enable-hisparse": options.hisparse,
        "--dllm-algorithm": options.denoising,
    }
    experts = options.experts
    return options.pipeline.target(
        for_rank(
            target,
            options.ranks if experts is None else experts.dense,
            beside=unsupported,
            experts=None if experts is None else experts.part,
            has_own_rows=options.data_parallel,
        ),
        beside=unsupported
        | {
            "--enable-two-batch-overlap": options.two_batches,
        },
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
    if options.hisparse is not None:
        refuse_beside_hisparse(
            () if drafter is None else drafter.layers, two_batches=options.two_batches
        )
    live_loader = live_loader or LiveLoader(model)
    ops = device.ops(model.dtype, is_deterministic=options.deterministic)
    pooled = model if isinstance(model, PooledModel) else generating(model)
    groups, loras = groups_of(model), live_loader.loras
    parts = _Parts(pooled.backbone, groups, mode, device, ops, options, pooled, drafter, loras)
    num_pages, budget_bytes = options.num_pages, device.free_bytes()
    if num_pages is None:
        run_largest = functools.partial(_run_largest, parts)
        budget_bytes = device.kv_bytes(run_largest, share=options.memory_share)
        # The graphs' memory is an estimate, which shall not take a small device's KV away.
        budget_bytes -= min(parts.graph_limits.reserved_bytes, budget_bytes // 4)
        # All ranks have the same pages, and some share the memory of a machine.
        budget_bytes = options.ranks.least(
            budget_bytes // (options.num_processes if options.shares_memory else 1)
        )
    what = (
        "the engine's tables do not fit beside the model; lower --num-pages, --max-num-seqs or "
        "--gpu-memory-utilization"
    )
    with device.stream(), names_the_option(what):
        made = _make(parts, num_pages=num_pages, budget_bytes=budget_bytes)
        graphs = _graphs(parts, made)
    made.attention.warn()
    pools = made.runner.state.pools
    size_bytes = pools.size_bytes
    if (draft_pools := made.runner.state.draft_pools) is not None:
        size_bytes += draft_pools.size_bytes - pools.token_pool.nbytes  # which both share
    kv_about = f"KV {kv_dtype_name(pools.dtype)} {size_bytes / MIB:,.0f} MiB"
    own = made.draft_attention
    attention_about = f"{made.attention.name} ({made.attention.why})" + (
        "" if own is None else f", the drafter's {own.name}"
    )
    about = (
        f"{about or dtype_name(model.dtype)} on {device.about}, "
        f"attention {attention_about}, {kv_about}"
    )
    if isinstance(pools, HostKvPools):
        about += f", {pools.about(made.spec)}"
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
            joint=model.joint if isinstance(model, JointDecoder) else None,
            needs_host_lens=made.attention.capabilities.host_lens,
            watch=watch_of(mode, made.runner),
            is_first=options.ranks.rank == 0,
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
    pooled: PooledModel
    drafter: DraftModel | None = None
    loras: LoraTables | None = None

    @property
    def hot_shape(self) -> HotShape | None:
        """The hot rows of HiSparse, if it is on."""
        config = self.options.hisparse
        if config is None:
            return None
        return HotShape(self.max_rows, config.num_hot(self.model.layers), config.backup_interval)

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

    @property
    def graph_limits(self) -> GraphLimits:
        """NOTE: ranks meet within a forward in collectives of the host, HiSparse keeps state on the
        host, and halves of a batch run in turns, so their forwards are captured in no form. Stages
        ask each other within a step, so theirs are not captured either."""
        options = self.options
        is_staged = options.pipeline != UNDIVIDED
        is_divided = options.ranks.num_ranks > 1 or is_staged
        return GraphLimits.of(
            self.device,
            0 if is_staged else options.graph_rows,
            None if is_divided or options.hisparse or options.two_batches else options.piece_tokens,
            max_rows=graph_rows(options.experts, self.mode, self.max_rows),
            max_tokens=self.max_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Made:
    runner: ModelRunner
    spec: EngineSpec
    attention: Attention
    draft_attention: Attention | None
    forwards: ForwardGraphs | None


def _run_largest(parts: _Parts) -> None:
    """Runs the largest steps with tables of their own and page 0 alone, and captures the largest
    graphs, to measure their memory."""
    what = "attention's workspace does not fit beside the model; lower --max-num-seqs"
    with parts.device.stream(), names_the_option(what):
        made = _make(parts, num_pages=MIN_PAGES, budget_bytes=parts.device.free_bytes())
        run_largest_steps(made.runner, parts.device, made.spec)
        if parts.options.ranks is ALONE:
            with torch.inference_mode():
                _graphs(parts, made).capture_largest()


def _graphs(parts: _Parts, made: _Made) -> StepGraphs:
    attention = made.attention
    # NOTE: how many tokens the others have is known to data-parallel ranks on the host alone.
    can_capture = attention.capabilities.can_capture and not parts.options.data_parallel
    table = shape_table(
        parts.mode,
        most_rows=parts.graph_limits.rows if can_capture and parts.mode.graph_widths else 0,
        by_shape=parts.ops.sample_ops.filters_by_shape,
        has_drafter=parts.drafter is not None,
    )
    return StepGraphs(
        GraphParts(
            *(made.runner, parts.device, attention.backend, made.spec, table),
            ranks=parts.options.ranks,
            forwards=made.forwards,
            experts=parts.options.experts,
        )
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
        has_spans=has_spans(model),
    )
    attention = with_recurrent(
        build_attention(options.attention, site, order=device.attention), model, state, parts.ops
    )
    if isinstance(state.pools, HostKvPools):
        attention = with_hisparse(attention, state.pools)
    drafter = None
    draft_attention = _build_draft_attention(parts, state)
    if parts.drafter is not None and draft_attention is not None:
        drafter = DraftParts(parts.drafter, draft_attention.backend)
    state = dataclasses.replace(state, clears_pages=attention.capabilities.whole_pages)
    # A fused step has attention of its own, so it is not used where the user names a backend.
    fused_model = parts.ops.fused_step(model, state) if attention.is_auto else None
    fused_step: FusedStep | None = fused_model
    sample_ops = parts.ops.sample_ops
    if isinstance(mode, Speculative | Predicted):
        sample_ops = mode.sample_ops(sample_ops, state)
        if fused_model is not None:
            fused_step = mode.fused_step(fused_model, parts.ops.fused_draft, state)
    if options.two_batches:
        has_loras = parts.loras is not None
        fused_step = two_batches(model, attention.backend, has_loras=has_loras)
    forwards = parts.graph_limits.forwards(
        model, state, attention, device=device, loras=parts.loras
    )
    runner = ModelRunner(
        RunnerParts(
            model=model,
            state=state,
            attention=attention.backend,
            mode=mode,
            is_debug=options.debug_checks,
            sample_ops=sample_ops,
            fused_step=fused_step or forwards,
            resolve=parts.ops.resolve,
            drafter=drafter,
            loras=parts.loras,
            pooler=parts.pooled.pooler,
        )
    )
    spec = msgspec.structs.replace(
        spec,
        names_shared_pages=attention.capabilities.shared_pages,
        hot_bytes_per_row=state.pools.row_bytes if isinstance(state.pools, HostKvPools) else 0,
    )
    return _Made(runner, spec, attention, draft_attention, forwards)


def _site(
    parts: _Parts, pools: KvPools, groups: tuple[LayerGroup, ...], dtype: torch.dtype
) -> AttentionSite:
    deterministic = parts.options.deterministic
    return AttentionSite(pools, groups, dtype, parts.device, is_deterministic=deterministic)


def _build_draft_attention(parts: _Parts, state: DeviceState) -> Attention | None:
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
    return build_attention("auto", site, order=parts.device.attention)


def _plan_spec(
    parts: _Parts, kv_dtype: torch.dtype, *, num_pages: int | None, budget_bytes: int
) -> EngineSpec:
    options = parts.options
    layouts = [_layout(parts, group, kv_dtype) for group in parts.groups]
    if parts.hot_shape is not None and options.hisparse is not None:
        budget_bytes = kv_budget(
            budget_bytes,
            layouts[0],
            shape=parts.hot_shape,
            ratio=options.hisparse.host_to_device_ratio,
            memory=host_memory(parts.device),
        )
    spec = EngineSpec(
        page_size=options.page_size,
        groups=(),
        max_rows=parts.max_rows,
        max_model_len=parts.model.max_model_len,
        max_batched_tokens=parts.max_batched_tokens,
        vocab_size=parts.model.vocab_size,
        depth=options.depth,
        lead=options.lead,
        max_waiting=options.max_waiting,
        prefix_cache=options.prefix_cache and not parts.pooled.whole_prompts,
        checkpoint_interval=options.checkpoint_interval,
        kv_tiers=options.kv_tiers,
        decode=parts.mode.caps,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens,
        dtype=dtype_name(parts.model.dtype),
        task=parts.pooled.task,
        whole_prompts=parts.pooled.whole_prompts,
        dp_size=options.ranks.num_ranks if options.data_parallel else 1,
    )
    state_bytes = checkpoint_memory(
        spec, parts.model, wanted=options.num_checkpoints, budget_bytes=budget_bytes
    )
    spec = with_pages(
        spec,
        layouts,
        num_pages=num_pages,
        budget_bytes=budget_bytes - state_bytes,
        may_shorten=options.max_model_len is None,
    )
    stateful = with_checkpoints(spec, parts.model, options.ranks, checkpoint_bytes=state_bytes)
    return in_blocks(options.pipeline.agreed(stateful))


def _layout(parts: _Parts, group: LayerGroup, kv_dtype: torch.dtype) -> GroupLayout:
    """Returns the group's layout, with the drafter's layers of the same window."""
    layout = msgspec.structs.replace(
        group.layout(kv_dtype.itemsize),
        index_bytes_per_token=index_bytes_per_token(group, parts.model.dtype),
    )
    if parts.drafter is None:
        return layout
    draft_dtype = kv_dtype_of(parts.options.kv_dtype, parts.drafter.dtype)
    per_token = sum(
        own.layout(draft_dtype.itemsize).bytes_per_token
        + index_bytes_per_token(own, parts.drafter.dtype)
        for own in parts.draft_groups
        if own.window == group.window
    )
    return msgspec.structs.replace(layout, draft_bytes_per_token=per_token)


def _allocate(parts: _Parts, spec: EngineSpec, kv_dtype: torch.dtype) -> DeviceState:
    """Allocates the tables that live as long as the engine, before any graph is captured."""
    device, ops = parts.device, parts.ops
    where = device.torch_device
    # A drafter's forwards of rows with few drafts reach as far as those of others.
    most = spec.max_model_len + spec.decode.most_tokens(is_predicted=True)
    pages_per_row = -(-most // spec.page_size) + 1
    shape = parts.hot_shape
    pools = (KvPools if shape is None else HostKvPools)(
        parts.groups,
        spec.groups,
        page_size=spec.page_size,
        table_shape=(spec.max_rows + 1, pages_per_row),
        dtype=kv_dtype,
        device=where,
        ops=KvOps(
            device.zeros if shape is None else host_memory(device).zeros, ops.rope_and_store_kv
        ),
    )
    if shape is not None and isinstance(pools, HostKvPools):
        pools.open(
            HotRows(pools.layers, shape, device.zeros, host_memory(device).copy),
            _layout(parts, parts.groups[0], kv_dtype),
            KvOps(device.zeros, ops.rope_and_store_kv),
        )
    draft_pools = None
    if parts.drafter is not None:
        draft_dtype = kv_dtype_of(parts.options.kv_dtype, parts.drafter.dtype)
        draft_pools = pools.beside(parts.draft_groups, spec.groups, draft_dtype)
    recurrent = empty_states(parts.model, spec, device.zeros)
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
        recurrent=recurrent,
        checkpoints=StateCheckpoints.of(recurrent, spec.num_checkpoints, device.zeros),
    )
