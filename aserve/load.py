"""Loads a model: finds its directory, reads its text side and builds the executor.

All of it blocks, so it runs in a thread. torch is imported there, so that the port is open and
/health answers while it loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.grammar.compile import Vocabulary
from aserve.parallel.leader import load_ranks
from aserve.parallel.topology import Coordinates, Meet, Patience
from aserve.parsers.registry import every_marker
from aserve.progress import OnProgress, OnStage, ignore_stage, shown_progress
from aserve.text.load import TextSide, load_text
from aserve.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from aserve.gpu.build import BuildOptions
    from aserve.gpu.device.base import Device
    from aserve.gpu.diffusion.registry import Denoising
    from aserve.gpu.executor import TorchExecutor
    from aserve.gpu.hisparse.config import HiSparseConfig
    from aserve.gpu.parallel.experts import ExpertRanks
    from aserve.gpu.parallel.stages import Pipeline
    from aserve.gpu.spec.request import SpecOptions


@dataclass(frozen=True, slots=True)
class Loaded:
    """The executor and the text side of a loaded model."""

    executor: LocalExecutor
    text: TextSide


LoadExecutor: TypeAlias = Callable[[Resolved, Path, OnStage], LocalExecutor]


def load_mlx_executor(resolved: Resolved, model_dir: Path, on_stage: OnStage) -> LocalExecutor:
    on_stage("kernels", 0, 0)
    if find_spec("mlx") is None:
        raise ConfigError("--device mlx needs MLX: pip install 'aserve[mlx]'", param="device")
    from aserve.gpu.mlx.build import build_mlx_executor

    with _progress_of("weights", "loading weights", on_stage) as on_progress:
        options = build_options(resolved, model_dir)
        executor = build_mlx_executor(options, on_progress=on_progress)
    on_stage("warm-up", 0, 0)
    return executor


# Executors that are not torch's, by the name of their device. Every other device is opened by
# torch's executor, which has a registry of its own (gpu/device/registry.py).
EXECUTORS: Mapping[str, LoadExecutor] = {"mlx": load_mlx_executor}


def load(
    resolved: Resolved,
    on_stage: OnStage = ignore_stage,
    *,
    executors: Mapping[str, LoadExecutor] = EXECUTORS,
) -> Loaded:
    """Loads the model. It blocks for as long as that takes, so run it in a thread."""
    model_dir = find_model(resolved)
    text = load_text(model_dir, resolved.model)
    executor = load_executor(resolved, model_dir, on_stage=on_stage, executors=executors)
    return Loaded(executor, text)


def find_model(resolved: Resolved) -> Path:
    """Returns the model's directory; blocks while it is downloaded from the hub."""
    from aserve.host.hub import resolve_model_dir

    is_dummy = resolved.model.load_format == "dummy"
    return resolve_model_dir(resolved.model_source, has_weights=not is_dummy)


def load_executor(
    resolved: Resolved,
    model_dir: Path,
    *,
    on_stage: OnStage = ignore_stage,
    executors: Mapping[str, LoadExecutor] = EXECUTORS,
) -> LocalExecutor:
    """Loads the executor for `--device`. It takes as long as loading the weights takes."""
    load_named = executors.get(resolved.machine.device)
    is_alone = resolved.num_processes == 1
    if load_named is not None:
        if not is_alone:
            raise ConfigError(
                f"--device {resolved.machine.device} runs on one rank", param="tensor_parallel_size"
            )
        return load_named(resolved, model_dir, on_stage)
    patience = Patience(resolved.machine.ranks_timeout)
    build = functools.partial(load_rank, resolved, model_dir, patience=patience, on_stage=on_stage)
    if is_alone:
        return build(Coordinates)
    kv_parts = _kv_parts(resolved, model_dir)
    return load_ranks(resolved, model_dir, build, patience, serve_store, kv_parts=kv_parts)


def serve_store(listener: socket.socket) -> object:
    """Serves what ranks on several machines find each other by, as long as the result lives."""
    from aserve.gpu.parallel import meeting

    return meeting.serve_store(listener)


def _kv_parts(resolved: Resolved, model_dir: Path) -> int | None:
    """Returns into how many parts tensor-parallel ranks divide the KV heads, if it is to travel."""
    is_staged = resolved.machine.pipeline_parallel_size > 1
    if resolved.disaggregation.disaggregation_mode == "null" or is_staged or resolved.dp_size > 1:
        return None
    # PERF: this imports torch. Without transfers the other ranks start first.
    from aserve.gpu.models.config.model import parse_config, read_fields

    num_heads = parse_config(read_fields(model_dir), defaults={}).num_kv_heads
    return min(resolved.machine.tensor_parallel_size, num_heads)


def load_rank(
    resolved: Resolved, model_dir: Path, meet: Meet, *, patience: Patience, on_stage: OnStage
) -> TorchExecutor:
    """Loads the executor of one rank, or of the only one."""
    on_stage("kernels", 0, 0)  # torch is imported, and the CPU's kernels are compiled, if need be
    from aserve.gpu.build import build_on
    from aserve.gpu.device.registry import devices_of, open_device

    with _progress_of("weights", "loading weights", on_stage) as on_progress:
        options = build_options(resolved, model_dir)
        place = meet()
        devices = devices_of(place.local_rank, place.num_on_node)
        device = open_device(options.device, devices)
        if place.num_processes > 1:
            options = _among_ranks(resolved, options, device, place=place, patience=patience)
        executor = build_on(device, options, on_progress=on_progress)
    # Ranks are not idle at the same time, and capture together.
    is_joint = place.num_processes > 1 and device.graph_rows > 0
    if is_joint or resolved.graphs.cuda_graph_capture == "eager":
        with _progress_of("graphs", "capturing graphs", on_stage) as on_progress:
            executor.capture_graphs(on_progress)
    on_stage("warm-up", 0, 0)
    return executor


def _among_ranks(
    resolved: Resolved,
    options: BuildOptions,
    device: Device,
    *,
    place: Coordinates,
    patience: Patience,
) -> BuildOptions:
    """Meets the other ranks, and returns the options of this one."""
    from aserve.gpu.device.ranks import JoinOptions, join_ranks, rank_backend

    backend = rank_backend(device)
    own = place.in_stage
    # PERF: on shared cores each of several steps would have a part of the threads, and read all
    # weights: with Qwen3-0.6B 0.63 of one process with 8 rows, and 1.09 in turns, with all threads.
    shares_cores = backend.shares_memory and place.num_on_node == place.num_processes
    depth = resolved.scheduler.overlap_depth or (1 if shares_cores else place.num_stages)
    takes_turns = shares_cores and depth == 1
    uses_peers = not resolved.machine.disable_custom_all_reduce
    join = JoinOptions(resolved.machine.deterministic, uses_peers)
    options = dataclasses.replace(
        options,
        depth=depth,
        ranks=join_ranks(device, own, patience, join),
        pipeline=_pipeline(device, place, patience, options.speculative),
        data_parallel=place.has_own_rows,
        num_processes=place.num_on_node,
        num_at_once=place.num_ranks if takes_turns else place.num_on_node,
        shares_memory=backend.shares_memory,
    )
    return dataclasses.replace(options, experts=_expert_ranks(resolved, own, options))


@contextlib.contextmanager
def _progress_of(stage: str, shown: str, on_stage: OnStage) -> Iterator[OnProgress]:
    """Shows the progress of a stage and passes it on."""
    with shown_progress(shown) as show:

        def on_progress(done: int, total: int) -> None:
            show(done, total)
            on_stage(stage, done, total)

        yield on_progress


def build_options(resolved: Resolved, model_dir: Path) -> BuildOptions:
    from aserve.gpu.build import BuildOptions

    return BuildOptions(
        model_dir=model_dir,
        load_format=resolved.model.load_format,
        model_impl=resolved.model.model_impl,
        dtype=resolved.model.dtype,
        quantization=resolved.model.quantization,
        max_model_len=resolved.model.max_model_len,
        kv_dtype=resolved.kv.kv_cache_dtype,
        page_size=resolved.kv.page_size,
        num_pages=resolved.kv.num_pages,
        memory_share=resolved.kv.gpu_memory_utilization,
        prefix_cache=not resolved.kv.no_prefix_cache,
        num_checkpoints=resolved.kv.num_state_checkpoints,
        kv_tiers=resolved.kv.tier_policy,
        max_rows=resolved.scheduler.max_num_seqs,
        max_batched_tokens=resolved.scheduler.max_num_batched_tokens,
        max_mixed_prefill_tokens=resolved.scheduler.max_mixed_prefill_tokens,
        max_waiting=resolved.scheduler.max_queue,
        depth=resolved.scheduler.overlap_depth or resolved.machine.pipeline_parallel_size,
        lead=resolved.scheduler.overlap_lead,
        debug_checks=resolved.debug.debug_checks,
        attention=resolved.machine.attention_backend,
        device=resolved.machine.device,
        two_batches=resolved.machine.enable_two_batch_overlap,
        hisparse=_hisparse(resolved),
        deterministic=resolved.machine.deterministic,
        graph_rows=0 if resolved.graphs.eager else resolved.graphs.cuda_graph_max_bs,
        piece_tokens=resolved.graphs.piece_tokens,
        max_loras=resolved.lora.max_slots,
        max_lora_rank=resolved.lora.max_lora_rank,
        threads=resolved.machine.threads,
        speculative=_speculative(resolved, model_dir),
        denoising=_denoising(resolved),
    )


def _expert_ranks(
    resolved: Resolved, place: Coordinates, options: BuildOptions
) -> ExpertRanks | None:
    from aserve.gpu.parallel.experts import expert_ranks
    from aserve.gpu.weights.source import ExpertPart

    if resolved.expert_parallel_size == 1:
        return None
    asked = resolved.experts
    return expert_ranks(
        place,
        options.ranks,
        ExpertPart(place.rank, place.num_ranks, asked.eplb_num_redundant_experts),
        backend=asked.all2all_backend,
        is_divided=resolved.machine.tensor_parallel_size > 1 or resolved.dp_size > 1,
        interval=asked.eplb_step_interval if asked.enable_eplb else None,
    )


def _pipeline(
    device: Device, place: Coordinates, patience: Patience, drafts: SpecOptions | None
) -> Pipeline:
    from aserve.gpu.device.ranks import rank_backend
    from aserve.gpu.parallel.collectives import GroupCollectives
    from aserve.gpu.parallel.pipe import open_pipe
    from aserve.gpu.parallel.stages import UNDIVIDED, WITHOUT_MODEL, Pipeline
    from aserve.gpu.weights.source import Stage

    count = place.num_stages
    if count == 1:
        return UNDIVIDED
    world = GroupCollectives(place.among_all, patience)
    has_drafter = drafts is not None and drafts.algorithm != WITHOUT_MODEL
    stage = Stage(place.stage, count, has_drafter)
    open_link = rank_backend(device).open_link
    link = None if open_link is None else open_link(device, place, patience, world)
    return Pipeline(stage, open_pipe(place, world, link), world)


def _hisparse(resolved: Resolved) -> HiSparseConfig | None:
    from aserve.gpu.hisparse.config import HiSparseConfig

    if not resolved.kv.enable_hisparse:
        return None
    return HiSparseConfig.of(resolved.kv.hisparse_config)


def _denoising(resolved: Resolved) -> Denoising | None:
    from aserve.gpu.diffusion.registry import denoising_of

    options = resolved.diffusion
    file = options.dllm_algorithm_config
    if options.dllm_algorithm is None and file is None:
        return None
    return denoising_of(options.dllm_algorithm, {} if file is None else _settings_in(Path(file)))


def _settings_in(path: Path) -> Mapping[str, object]:
    """Reads settings in YAML, of which JSON is a part."""
    import yaml  # only for those who use it

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --dllm-algorithm-config {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--dllm-algorithm-config {path} holds no settings")
    return found


def _speculative(resolved: Resolved, model_dir: Path) -> SpecOptions | None:
    from aserve.gpu.spec.request import SpecOptions
    from aserve.host.hub import resolve_file, resolve_model_dir
    from aserve.tiny import DRAFTERS_DIR, MODEL_DIR

    options = resolved.speculative
    if options.speculative_algorithm is None:
        return None
    draft, token_map = options.speculative_draft_model_path, options.speculative_token_map
    return SpecOptions(
        algorithm=options.speculative_algorithm,
        draft_model_dir=None if draft is None else resolve_model_dir(draft),
        bundled_drafters=DRAFTERS_DIR if model_dir.resolve() == MODEL_DIR.resolve() else None,
        num_steps=options.speculative_num_steps,
        topk=options.speculative_topk,
        num_draft_tokens=options.speculative_num_draft_tokens,
        verification=options.speculative_verification,
        token_tree=options.speculative_token_tree,
        token_map=None if token_map is None else resolve_file(token_map),
        min_match_len=options.speculative_min_match_len,
        max_match_len=options.speculative_max_match_len,
        shared_table_size=options.speculative_shared_table_size,
    )


def vocabulary_of(tokenizer: TextTokenizer, vocab_size: int) -> Vocabulary:
    """Builds the vocabulary for grammars. Special tokens have no bytes, so that no grammar allows
    them, except those that mark calls and reasoning.

    It takes a while for a large vocabulary.
    """
    markers = {marker.encode() for marker in every_marker()}
    hidden = {i for i in tokenizer.special_ids if tokenizer.token_bytes(i) not in markers}
    hidden.update(tokenizer.eos_ids)
    ids = range(min(tokenizer.vocab_size, vocab_size))
    return Vocabulary(
        tuple(b"" if i in hidden else tokenizer.token_bytes(i) for i in ids),
        vocab_size=vocab_size,
        end_ids=tokenizer.eos_ids,
    )
