"""`aserve bench lora` measures the decode steps of rows with different LoRA adapters.

The adapters are random and change every linear layer. Each batch runs with and without them in
turns, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from aserve.bench.one_batch import Shape, requests_of, summarize
from aserve.bench.options import LoraBenchOptions, integers
from aserve.bench.result import BenchResult, Table, median, progress, spread
from aserve.bench.step_driver import StepDriver, running
from aserve.bench.windows import TokenWindows
from aserve.config import LoraOptions, Resolved
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError, StepError
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.host.threads import new_event_loop
from aserve.load import find_model, load
from aserve.messages.changes import LoadLora
from aserve.messages.requests import AdmitRequest

TITLE = "LoRA adapters in one batch"


def run(options: LoraBenchOptions, resolved: Resolved) -> BenchResult:
    counts = integers(options.rows, flag="--rows")
    shapes = [Shape(rows, options.input_len, options.output_len) for rows in counts]
    lora = LoraOptions(enable_lora=True, max_loras=options.adapters, max_lora_rank=options.rank)
    scheduler = dataclasses.replace(resolved.scheduler, max_num_seqs=max(counts))
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=True)
    loaded = load(dataclasses.replace(resolved, lora=lora, scheduler=scheduler, kv=kv))
    windows = TokenWindows(loaded.text.tokenizer, seed=0)
    loader, code = make_loader(find_model(resolved))
    if not isinstance(loader, NativeLoader):
        raise ConfigError(f"adapters need native code; the model has {code.name} code")
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        paths = [
            write_adapter(Path(folder) / str(number), loader.config, rank=options.rank, seed=number)
            for number in range(options.adapters)
        ]
        work = _measure(loaded.executor, shapes, paths, windows, repeats=options.repeats)
        lines = runner.run(work)
    rows = [[f"{value:,}" for value in line.values()] for line in lines]
    notes = (f"{resolved.model_name}: {loaded.executor.about}",)
    return BenchResult({"batches": lines}, (Table(TITLE, list(lines[0]), rows),), notes)


async def _measure(
    executor: LocalExecutor,
    shapes: list[Shape],
    paths: list[Path],
    windows: TokenWindows,
    *,
    repeats: int,
) -> list[dict[str, float]]:
    driver = StepDriver(executor)
    batches = [(shape, num_loras) for shape in shapes for num_loras in (0, len(paths))]
    steps_s: dict[tuple[Shape, int], list[float]] = {batch: [] for batch in batches}
    async with running(executor):
        await _load_all(executor, paths)
        with progress(TITLE, len(batches) * (repeats + 1)) as done:
            for batch in batches * (repeats + 1):
                requests = with_adapters(requests_of(batch[0], windows), batch[1])
                steps_s[batch].append(summarize(await driver.run(requests)).step_s)
                done()
    return [_line(shape, steps_s[shape, 0], steps_s[shape, len(paths)]) for shape in shapes]


async def _load_all(executor: LocalExecutor, paths: list[Path]) -> None:
    for slot, path in enumerate(paths, 1):
        error = await executor.run_job(LoadLora(slot, slot, str(path)))
        if error is not None:
            raise StepError(error.message)


def with_adapters(requests: list[AdmitRequest], num_loras: int) -> list[AdmitRequest]:
    """Gives the rows the adapters in turns; with 0 none."""
    if not num_loras:
        return requests
    slots = [1 + number % num_loras for number in range(len(requests))]
    return [
        msgspec.structs.replace(request, lora_slot=slot, namespace=f"lora-{slot}")
        for request, slot in zip(requests, slots, strict=True)
    ]


def write_adapter(directory: Path, config: ModelConfig, *, rank: int, seed: int) -> Path:
    """Writes a random adapter of every linear layer of a Llama-like model, in PEFT's format."""
    q_size, kv_size = (num * config.head_dim for num in (config.num_heads, config.num_kv_heads))
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for name, (num_out, num_in) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn((rank, num_in), generator=generator) / num_in**0.5
            b = torch.randn((num_out, rank), generator=generator) / rank
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def _line(shape: Shape, plain_s: list[float], adapted_s: list[float]) -> dict[str, float]:
    """The first run of each warms up. `best_ratio` compares the fastest runs, for busy machines."""
    plain_s, adapted_s = plain_s[1:], adapted_s[1:]
    plain, adapted = median(plain_s), median(adapted_s)
    return {
        "rows": shape.num_rows,
        "none_ms": round(plain * 1e3, 3),
        "adapters_ms": round(adapted * 1e3, 3),
        "ratio": round(adapted / plain, 3),
        "best_ratio": round(min(adapted_s) / min(plain_s), 3),
        "none_spread": round(spread(plain_s), 3),
        "adapters_spread": round(spread(adapted_s), 3),
    }
