"""Builds the MLX executor: refuses what it does not have, loads the model, and sizes the KV cache.

On Apple silicon MLX computes on the GPU, whose memory is that of the machine. Elsewhere it has a
CPU backend, which the tests use.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import torch

from aserve.cache.layout import with_pages
from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions
from aserve.gpu.device.cpu.device import KV_PART
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.mlx.decoder import MlxDecoder, MlxModel, give_to_mlx
from aserve.gpu.mlx.executor import MlxExecutor
from aserve.gpu.mlx.kv import PagedKv
from aserve.gpu.mlx.runner import MlxRunner
from aserve.gpu.models.base import LoadPlan, ModelLoader
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.gpu.models.registry import Code, DecoderFamily
from aserve.gpu.weights.format import dtype_name, parse_dtype
from aserve.gpu.weights.source import OnProgress, Target, ignore_progress
from aserve.host.environment import installed_version
from aserve.host.limits import available_memory_bytes
from aserve.messages.base import MIB
from aserve.messages.executor import EngineSpec

MAX_ROWS = 64
MAX_BATCHED_TOKENS = 2048
MAX_CPU_KV_BYTES = 1 << 30  # WHY: MLX's pools are resident from the start
AUTO = "auto"


def build_mlx_executor(
    options: BuildOptions, *, on_progress: OnProgress = ignore_progress
) -> MlxExecutor:
    """Loads the model on the calling thread, and calls `on_progress(bytes loaded, total bytes)`."""
    for name, reason in _unsupported(options):
        raise ConfigError(f"--device mlx {reason}", param=name)
    free_bytes = available_memory_bytes()
    loader, code = make_loader(options.model_dir, options.model_impl, free_bytes=free_bytes)
    _refuse_model(loader, code)
    dtype, why = _dtype(options.dtype, loader.stored_dtype)
    decoder = loader.load(
        LoadPlan(
            dtype,
            options.max_model_len,
            options.load_format == "dummy",
            Target(memory_bytes=free_bytes, prepare=give_to_mlx),
            on_progress,
        )
    )
    assert isinstance(decoder, Decoder)
    return assemble_mlx(MlxDecoder(decoder), options, about=f"{dtype_name(dtype)} ({why})")


def assemble_mlx(model: MlxModel, options: BuildOptions, *, about: str) -> MlxExecutor:
    """Builds an executor around a loaded model; `about` describes its weights."""
    groups = group_layers(model.layers)
    spec = EngineSpec(
        page_size=options.page_size,
        groups=(),
        max_rows=options.max_rows or MAX_ROWS,
        max_model_len=model.max_model_len,
        max_batched_tokens=options.max_batched_tokens or MAX_BATCHED_TOKENS,
        vocab_size=model.vocab_size,
        depth=options.depth,
        lead=options.lead,
        max_waiting=options.max_waiting,
        prefix_cache=options.prefix_cache,
        max_mixed_prefill_tokens=options.max_mixed_prefill_tokens,
        dtype=str(model.dtype).removeprefix("mlx.core."),
    )
    spec = with_pages(
        spec,
        [group.layout(model.dtype.size) for group in groups],
        num_pages=options.num_pages,
        budget_bytes=available_memory_bytes()
        if options.num_pages is not None
        else _kv_bytes(options.memory_share),
        may_shorten=options.max_model_len is None,
    )
    kv = PagedKv(
        groups,
        spec.groups,
        page_size=spec.page_size,
        table_shape=(spec.max_rows + 1, -(-spec.max_model_len // spec.page_size) + 1),
        dtype=model.dtype,
    )
    num_slots = spec.groups[0].num_pages * spec.page_size
    runner = MlxRunner(model, kv, max_rows=spec.max_rows, num_slots=num_slots)
    where = f"mlx {installed_version('mlx')} ({mx.default_device().type.name})"
    about = f"{about} on {where}, KV {kv.size_bytes / MIB:,.0f} MiB"
    return MlxExecutor(runner, spec, about=about)


def _unsupported(options: BuildOptions) -> Iterator[tuple[str, str]]:
    """Yields the option and the reason for each setting that this executor does not have."""
    if options.speculative is not None:
        yield "speculative_algorithm", "runs without speculative decoding"
    if options.model_impl == "transformers":
        yield "model_impl", "runs models with native code alone, not those of transformers"
    if options.max_loras:
        yield "enable_lora", "takes no LoRA adapters"
    if options.quantization is not None:
        yield "quantization", f"does not quantize weights to {options.quantization}"
    if options.kv_dtype not in (AUTO, options.dtype):
        yield "kv_cache_dtype", "keeps KV in the model's dtype: leave out --kv-cache-dtype"
    if options.attention != AUTO:
        yield "attention_backend", f"has attention of its own, not {options.attention}"
    if options.deterministic:
        yield "deterministic", "cannot promise --deterministic: MLX's sums depend on the batch"
    if options.hisparse is not None:
        yield "enable_hisparse", "has no HiSparse"
    if options.two_batches:
        yield "enable_two_batch_overlap", "has no two-batch overlap"


def _refuse_model(loader: ModelLoader, code: Code) -> None:
    """Refuses it before its weights are read."""
    if not isinstance(loader, NativeLoader):
        raise ConfigError(
            f"--device mlx needs a model with native code; this one has {code.name} code "
            f"({code.why})",
            param="device",
        )
    if not isinstance(loader.family, DecoderFamily):
        raise ConfigError(
            f"--device mlx does not run {loader.family.name}: it runs decoders of text that "
            "generate, without pictures, pooling or a head of labels; take --device cpu or auto",
            param="device",
        )
    spec = loader.family.spec(loader.config)
    missing = {"experts or other MLPs": spec.mlps, "attention of its own kind": spec.mixers}
    for what, has in (
        *missing.items(),
        ("attention sinks", spec.has_sinks),
        ("queries that positions scale", spec.query_scale is not None),
    ):
        if has:
            raise ConfigError(
                f"--device mlx does not run {loader.config.architecture}, which has {what}; take "
                "--device cpu or auto",
                param="device",
            )


def _dtype(asked: str, stored: str | None) -> tuple[torch.dtype, str]:
    """The CPU backend is fastest in float32; Apple's GPU takes the checkpoint's dtype."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if asked != AUTO:
        dtype = parse_dtype(asked)
        if dtype == torch.float64 and not is_cpu:
            raise ConfigError("Apple's GPUs have no float64", param="dtype")
        return dtype, "as asked"
    if is_cpu or stored is None or parse_dtype(stored) == torch.float64:
        return torch.float32, "auto"
    return parse_dtype(stored), "auto: as stored"


def _kv_bytes(share: float) -> int:
    if mx.default_device().type == mx.DeviceType.cpu:
        return min(available_memory_bytes() // KV_PART, MAX_CPU_KV_BYTES)
    limit = int(mx.device_info()["max_recommended_working_set_size"])
    return max(0, int(share * limit) - int(mx.get_active_memory()))
