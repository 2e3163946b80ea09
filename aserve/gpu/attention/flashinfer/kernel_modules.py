"""Compiles the kernel modules of FlashInfer in one parallel build, before a plan needs the first.

A plan that needs a module compiles it and waits, so plans alone would compile one module after
another. Here each plan that the engine can make is begun once while `JitSpec.build_and_load` only
notes the module and raises. What was noted goes to the package's `build_jit_specs`, which runs one
build for all of them. Modules of flashinfer-jit-cache, or of an earlier start, are not built again.

WHY not the package's functions that make the modules: which module a plan needs, and under what
name, changes from release to release. A release without these two names compiles as its plans do.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NoReturn, TypeAlias

import torch

from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.flashinfer.wrappers import (
    HOPPER_TILE,
    JitCore,
    KernelModule,
    LayerKind,
    PlanArrays,
    Queries,
    Wrappers,
)
from aserve_kernels.packed_mask import PackedMask

logger = logging.getLogger(__name__)

# A failing compiler or linker, or a release of the package whose arguments have other names.
BUILD_ERRORS = (
    *(RuntimeError, OSError, ValueError, subprocess.SubprocessError),
    *(ImportError, AttributeError, TypeError, AssertionError),
)
PROGRESS_S = 15.0  # between two lines of progress

Call: TypeAlias = Callable[[], object]


class _Noted(Exception):
    """Ends a plan whose module was noted."""


def compile_modules(wrappers: Wrappers, site: AttentionSite, kinds: Iterable[LayerKind]) -> None:
    """Compiles the modules that the engine needs. What fails here is only logged: it is compiled
    again, and its error raised, when a plan needs it."""
    try:
        core = wrappers.package.jit.core
        needed = needed_modules(core, first_calls(wrappers, site, kinds))
        missing = [module for module in needed if not module.is_compiled]
        if missing:
            _build(core, missing)
    except BUILD_ERRORS as error:
        logger.warning(
            "FlashInfer's modules are compiled one after another, because building them together "
            "failed: %s: %s",
            *(type(error).__name__, str(error).partition("\n")[0]),
        )


def needed_modules(core: JitCore, calls: Iterable[Call]) -> list[KernelModule]:
    """Returns the modules that the calls would load, at most one for each call. NOTE: no other
    thread may use the package meanwhile."""
    noted: dict[str, KernelModule] = {}

    def note(module: KernelModule) -> NoReturn:
        noted[module.name] = module
        raise _Noted

    real = core.JitSpec.build_and_load
    core.JitSpec.build_and_load = note
    try:
        for call in calls:
            with contextlib.suppress(_Noted):
                call()
    finally:
        core.JitSpec.build_and_load = real
    return list(noted.values())


def _build(core: JitCore, modules: Sequence[KernelModule]) -> None:
    started = time.monotonic()
    logger.info(
        "compiling FlashInfer's kernels, %d modules together (%s); this takes minutes where "
        "flashinfer-jit-cache is not installed and no earlier start has compiled them",
        *(len(modules), ", ".join(module.name for module in modules)),
    )
    with ThreadPoolExecutor(1, "flashinfer-build") as pool:
        building = pool.submit(core.build_jit_specs, list(modules))
        while not wait((building,), PROGRESS_S).done:
            logger.info(
                "compiling FlashInfer's kernels: %d of %d modules are done after %.0f s",
                sum(module.is_compiled for module in modules),
                *(len(modules), time.monotonic() - started),
            )
        building.result()
    took_s = time.monotonic() - started
    logger.info("compiled %d modules of FlashInfer in %.0f s", len(modules), took_s)


def first_calls(
    wrappers: Wrappers, site: AttentionSite, kinds: Iterable[LayerKind]
) -> Iterator[Call]:
    """Yields one call for each module that an engine may use: a plan of every kind of forward for
    every layer kind, and the sum of two levels of a cascade."""
    all_queries = [Queries.DECODE, Queries.PARTIAL_TILES, Queries.FULL_TILES]
    if site.has_tree_masks:
        all_queries.append(Queries.TREES)
    for kind, queries in itertools.product(kinds, all_queries):
        yield partial(_plan, wrappers, site, kind, queries)
    out = torch.zeros((1, 1, 64), dtype=site.dtype, device=site.pools.device)
    lse = out.new_zeros((1, 1), dtype=torch.float32)
    yield partial(wrappers.package.merge_state_in_place, out, lse, out.clone(), lse.clone())


def _plan(wrappers: Wrappers, site: AttentionSite, kind: LayerKind, queries: Queries) -> None:
    query_len = {Queries.DECODE: 1, Queries.FULL_TILES: HOPPER_TILE}.get(queries, 2)
    page_size, where = site.pools.page_size, site.pools.device
    num_pages = -(-query_len // page_size)
    numbers = ([0, query_len], [0, num_pages], [(query_len - 1) % page_size + 1], [query_len])
    host = PlanArrays(*(torch.tensor(each, dtype=torch.int32) for each in numbers))
    indices = torch.zeros(num_pages, dtype=torch.int32, device=where)
    mask = None
    if queries is Queries.TREES:
        mask = PackedMask(indices.new_zeros(query_len**2, dtype=torch.uint8), indices.new_zeros(2))
    wrapper = wrappers.make(kind, queries)
    width = 1 if queries is Queries.DECODE else None
    wrappers.plan(wrapper, kind, host, indices=indices, width=width, mask=mask)
