"""Warm-up before an engine starts: the largest steps, which show how much memory steps take, and
small ones, which compile the sampling kernels that the large ones do not use.

All rows share page 0, so warm-up needs no KV pages. It leaves garbage in the runner's tables, so
that runner must be thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import Callable, Iterator

import msgspec
import torch

from aserve.errors import ConfigError, EngineDead
from aserve.gpu.device.base import Device, slice_len_of
from aserve.gpu.runner import ModelRunner
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import plan_step
from aserve.gpu.step.ticket import StepTicket
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.results import StepFailed
from aserve.messages.step import PageWrites, RowInit, ScheduleBatch, VerifyPlan

# torch raises RuntimeError for the host's memory, and for sizes that no memory has.
HOST_MEMORY = re.compile("can't allocate memory|size calculation overflowed")

NOISY = RowInit(
    row=0,
    seed=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    prompt_len=0,
    min_len=0,
    end_ids=(),
    logit_bias=(),
    num_logprobs=-1,
)
LIMITED = msgspec.structs.replace(NOISY, top_k=50, top_p=0.9, min_p=0.01)
DEMANDING = msgspec.structs.replace(
    LIMITED,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    num_logprobs=0,
)


def run_largest_steps(runner: ModelRunner, device: Device, spec: EngineSpec) -> None:
    """Runs, within the device's stream: one prompt of the whole token budget; the maximum number of
    rows, which share the budget and use every feature of sampling; one token each with filters and
    with noise alone, because logits without penalties may have a narrower dtype; and with
    speculation the widest windows of as many rows as the budget has room for. Raises ConfigError if
    memory does not suffice.
    """
    num_rows = min(spec.max_rows, spec.max_batched_tokens)
    prompt = min(spec.max_batched_tokens, spec.max_model_len)
    shared = min(spec.max_batched_tokens // num_rows, spec.max_model_len)
    row_params = RowParams(spec.max_rows)
    what = (
        f"the largest step does not fit beside the model; lower --max-num-batched-tokens "
        f"{spec.max_batched_tokens} or --max-num-seqs {spec.max_rows}"
    )
    with torch.inference_mode(), names_the_option(what):
        for params, query_lens in (
            (DEMANDING, [prompt]),
            (DEMANDING, [shared] * num_rows),
            (LIMITED, [1]),
            (NOISY, [1]),
        ):
            _run(
                runner, device, spec, row_params=row_params, batch=_batch(params, query_lens, spec)
            )
        width = spec.decode.max_tokens_per_step
        num_windows = min(num_rows, spec.max_batched_tokens // width)
        if (num_drafts := width - spec.decode.root_len) and num_windows:
            batch = _batch(LIMITED, [width] * num_windows, spec)
            verify = VerifyPlan(pack_i32([num_drafts] * num_windows), spec.decode.tree)
            batch = msgspec.structs.replace(batch, verify=verify)
            _run(runner, device, spec, row_params=row_params, batch=batch)


async def run_padding_steps(
    launch: Callable[[ScheduleBatch], StepTicket],
    died: asyncio.Future[BaseException],
    *,
    num_groups: int,
) -> None:
    """Runs one prefill and one decode of the padding row, which no request uses, on an executor
    that has started. Raises EngineDead if one fails.
    """
    for query_len in (2, 1):
        ticket = launch(padding_batch(query_len, num_groups=num_groups))
        await asyncio.wait((ticket.outcome, died), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise EngineDead(f"the device thread ended: {died.result()!r}")
        outcome = ticket.outcome.result()
        if isinstance(outcome, StepFailed):
            raise EngineDead(f"the warm-up step failed: {outcome.error.message}")


@contextlib.contextmanager
def names_the_option(what: str) -> Iterator[None]:
    """Turns an out-of-memory error into a ConfigError. `what` says which option to change."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError, OverflowError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{what}, or take a smaller model: {reason}") from None


def _is_out_of_memory(error: Exception) -> bool:
    match error:
        case OSError():
            return error.errno == errno.ENOMEM
        case torch.OutOfMemoryError() | MemoryError() | OverflowError():
            return True
        case _:
            return HOST_MEMORY.search(str(error)) is not None


def _run(
    runner: ModelRunner,
    device: Device,
    spec: EngineSpec,
    *,
    row_params: RowParams,
    batch: ScheduleBatch,
) -> None:
    row_params.write(batch.row_inits)
    slice_len = slice_len_of(device, vocab_size=spec.vocab_size)
    plan = plan_step(batch, row_params, vocab_size=spec.vocab_size, slice_len=slice_len)
    staged = _staged(device, runner.stage(plan))
    runner.apply(batch, staged)
    runner.step(plan, staged, lambda _lens: None)


def _staged(device: Device, arrays: HostArrays) -> DeviceArrays:
    host = device.host_buffer(arrays.num_words)
    places = arrays.write(host.numpy())
    return DeviceArrays(device.stage(host), places)


def _batch(params: RowInit, query_lens: list[int], spec: EngineSpec) -> ScheduleBatch:
    """Returns a batch of new rows, numbered from 1, without pages."""
    num_rows, num_tokens = len(query_lens), sum(query_lens)
    rows = pack_i32([*range(1, num_rows + 1)])
    return ScheduleBatch(
        iteration=1,
        rows=rows,
        query_lens=pack_i32(query_lens),
        input_ids=pack_i32([0] * num_tokens),
        next_ids=pack_i32([0] * num_rows),
        kv_lens=pack_i32([0] * num_rows),
        bounds=bytes(num_rows),
        expects=pack_i32([0] * num_rows),
        sample_rows=rows,
        page_writes=tuple(PageWrites() for _ in spec.groups),
        row_inits=tuple(
            msgspec.structs.replace(params, row=row, seed=row, prompt_len=query_lens[0])
            for row in range(1, num_rows + 1)
        ),
    )


def padding_batch(query_len: int, *, num_groups: int, num_rows: int = 1) -> ScheduleBatch:
    """Rows 0 with `query_len` tokens each, all sampled."""
    return ScheduleBatch(
        iteration=0,
        rows=pack_i32([0] * num_rows),
        query_lens=pack_i32([query_len] * num_rows),
        input_ids=pack_i32([0] * query_len * num_rows),
        next_ids=pack_i32([0] * num_rows),
        kv_lens=pack_i32([0] * num_rows),
        bounds=bytes(num_rows),
        expects=pack_i32([0] * num_rows),
        sample_rows=pack_i32([0] * num_rows),
        page_writes=tuple(PageWrites() for _ in range(num_groups)),
    )
