"""Compiles kernels for this processor ahead of time, in several processes at once.

numba keeps compiled code in NUMBA_CACHE_DIR, and a later process only loads it. `build_kernels`
starts worker processes (`python -m aserve_kernels.cpu.build`), which read the variants to compile
from stdin and answer each with one line. An empty file beside the cache marks each variant that is
done. Its name contains the processor and the version of numba, as numba's own cache does, so
another processor compiles again.

NOTE: all variants of a kernel go to one worker, because numba keeps them in one index file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import numba
import torch
from numba.core import config
from numba.core.registry import cpu_target

from aserve_kernels.cpu.chunk_attention import compile_chunk_attention
from aserve_kernels.cpu.conv_layer import compile_conv_layer
from aserve_kernels.cpu.decoder_forward import compile_decoder_forward, compile_decoder_layers
from aserve_kernels.cpu.delta_layer import compile_delta_layer
from aserve_kernels.cpu.delta_rule import compile_advance_rows
from aserve_kernels.cpu.draft_forward import compile_draft_forward
from aserve_kernels.cpu.draw import compile_draw
from aserve_kernels.cpu.expert_mlp import compile_expert_mlp
from aserve_kernels.cpu.gated_mul import compile_gated_mul
from aserve_kernels.cpu.gemm import compile_packed_linear
from aserve_kernels.cpu.index_scores import compile_index_scores
from aserve_kernels.cpu.latent_attention import compile_latent_attention
from aserve_kernels.cpu.lora import compile_lora
from aserve_kernels.cpu.mamba_layer import compile_mamba_layer
from aserve_kernels.cpu.paged_attention import compile_paged_attention
from aserve_kernels.cpu.quant_codes import E2M1, INT4, INT8
from aserve_kernels.cpu.quant_linear import compile_quant_linear
from aserve_kernels.cpu.rms_norm import compile_rms_norm
from aserve_kernels.cpu.rope_and_store_kv import compile_rope_and_store_kv
from aserve_kernels.cpu.shared_table import compile_shared_table
from aserve_kernels.cpu.state_space import compile_advance_spaces
from aserve_kernels.cpu.suffix_match import compile_suffix_match

Tasks: TypeAlias = "deque[list[KernelVariant]]"

# The slowest kernels come first, so that no worker is left alone with one at the end.
COMPILERS: Mapping[str, Callable[[torch.dtype, int], None]] = {
    "decoder_layers": lambda dtype, _: compile_decoder_layers(dtype, dtype),
    "decoder_layers_fp8": lambda dtype, _: compile_decoder_layers(dtype, torch.float8_e4m3fn),
    "decoder_layers_bfloat16": lambda dtype, _: compile_decoder_layers(dtype, torch.bfloat16),
    "draft_forward": lambda dtype, _: compile_draft_forward(dtype),
    "paged_attention": compile_paged_attention,
    "paged_attention_fp8": partial(compile_paged_attention, kv_dtype=torch.float8_e4m3fn),
    "paged_attention_bfloat16": partial(compile_paged_attention, kv_dtype=torch.bfloat16),
    "decoder_forward": lambda dtype, _: compile_decoder_forward(dtype),
    "chunk_attention": compile_chunk_attention,
    "chunk_attention_fp8": partial(compile_chunk_attention, kv_dtype=torch.float8_e4m3fn),
    "chunk_attention_bfloat16": partial(compile_chunk_attention, kv_dtype=torch.bfloat16),
    "latent_attention": compile_latent_attention,
    "delta_rule": compile_advance_rows,
    "state_space": compile_advance_spaces,
    "delta_layer": lambda dtype, _: compile_delta_layer(dtype),
    "conv_layer": lambda dtype, _: compile_conv_layer(dtype),
    "mamba_layer": lambda dtype, _: compile_mamba_layer(dtype),
    "expert_mlp": lambda dtype, _: compile_expert_mlp(dtype),
    "index_scores": compile_index_scores,
    "packed_linear": compile_packed_linear,
    "packed_bf16_linear": partial(compile_packed_linear, stored=torch.bfloat16),
    "rope_and_store_kv": lambda dtype, _: compile_rope_and_store_kv(dtype),
    "lora": compile_lora,
    "int8_linear": partial(compile_quant_linear, kind=INT8),
    "int4_linear": partial(compile_quant_linear, kind=INT4),
    "e2m1_linear": partial(compile_quant_linear, kind=E2M1),
    "gated_mul": lambda dtype, _: compile_gated_mul(dtype),
    "rms_norm": lambda dtype, _: compile_rms_norm(dtype),
    "draw": lambda _, __: compile_draw(),
    "shared_table": lambda _, __: compile_shared_table(),
    "suffix_match": lambda _, __: compile_suffix_match(),
}


class KernelVariant(NamedTuple):
    """One compilation of a kernel. `num_threads` is 1, or 2 for any larger number."""

    kernel: str  # a key of COMPILERS
    dtype: str  # a name of torch, such as "float32"
    num_threads: int = 1


class KernelBuildError(Exception):
    """A worker ended before it had compiled its kernels."""


def missing_kernels(variants: Iterable[KernelVariant]) -> list[KernelVariant]:
    """Returns the variants that no process has compiled yet for this processor.

    It returns none where compiled code cannot be kept, or where numba compiles nothing at all.
    """
    if config.DISABLE_JIT or not config.CACHE_DIR:
        return []
    return [variant for variant in variants if not _mark_of(variant).exists()]


def build_kernels(
    variants: Sequence[KernelVariant],
    *,
    num_processes: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Compiles `variants` and marks them as done. `on_progress(done, total)` may be called from any
    thread. Raises KernelBuildError. Whatever it raises, as at Ctrl-C, no worker goes on.
    """
    order = list(COMPILERS)
    by_kernel = sorted(variants, key=lambda variant: order.index(variant.kernel))
    tasks: Tasks = deque(
        list(group) for _, group in groupby(by_kernel, key=lambda variant: variant.kernel)
    )
    processes: list[subprocess.Popen[str]] = []
    lock = threading.Lock()
    num_done = 0

    def count() -> None:
        nonlocal num_done
        with lock:
            num_done += 1
            on_progress(num_done, len(variants))

    on_progress(0, len(variants))
    num_workers = min(num_processes, len(tasks))
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        try:
            workers = [
                pool.submit(_run_worker, tasks, count, processes) for _ in range(num_workers)
            ]
            for worker in workers:
                worker.result()
        finally:
            tasks.clear()
            for process in processes:
                process.kill()  # which does nothing to one that has ended


def _run_worker(
    tasks: Tasks, count: Callable[[], None], processes: list[subprocess.Popen[str]]
) -> None:
    """Gives one worker process task after task, and blocks until none is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "aserve_kernels.cpu.build"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],  # the package need not be installed
        text=True,
        process_group=0,  # Ctrl-C in a terminal is for this process, which ends the workers
    )
    processes.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while (variants := _next_task(tasks)) is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(" ".join(map(_word, variants)) + "\n")
                process.stdin.flush()
            for variant in variants:
                _await_reply(process.stdout, variant)
                count()
    finally:
        tasks.clear()  # after an error the other workers need not go on
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # at which the worker ends
        process.stdout.close()
        process.wait()


def _await_reply(replies: IO[str], variant: KernelVariant) -> None:
    if replies.readline() != f"{_word(variant)}\n":
        raise KernelBuildError(
            f"the process that compiled the kernel {variant.kernel} for {variant.dtype} has ended"
        )


def _next_task(tasks: Tasks) -> list[KernelVariant] | None:
    try:
        return tasks.popleft()
    except IndexError:
        return None


def _word(variant: KernelVariant) -> str:
    return ":".join(map(str, variant))


def _mark_of(variant: KernelVariant) -> Path:
    target = (numba.__version__, *cpu_target.target_context.codegen().magic_tuple())
    digest = hashlib.sha256(repr(target).encode()).hexdigest()[:16]
    return Path(config.CACHE_DIR) / f"compiled-{digest}-{'-'.join(map(str, variant))}"


def main() -> None:
    """Runs a worker: each line of stdin holds variants, and each is answered by its own word. It
    ends when nobody reads the answers any more.

    NOTE: Python would write a failed answer once more, and complain, if it were still in a buffer.
    """
    for line in sys.stdin:
        for word in line.split():
            kernel, dtype, num_threads = word.split(":")
            variant = KernelVariant(kernel, dtype, int(num_threads))
            COMPILERS[kernel](getattr(torch, dtype), variant.num_threads)
            with contextlib.suppress(OSError):  # a full disk: the next start compiles again
                _mark_of(variant).touch()
            try:
                os.write(sys.stdout.fileno(), f"{word}\n".encode())
            except BrokenPipeError:
                return


if __name__ == "__main__":
    main()
