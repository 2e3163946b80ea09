"""The largest steps that an engine may be asked for, run once to see what memory they take; and
small ones, so that no request waits for a kernel of sampling to be compiled.

It knows no scheduler. All rows share page 0, so it needs no page of KV; what it leaves in tables is
nonsense, so these must be thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device, slice_len_of
from aserve.gpu.runner import ModelRunner
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import plan_step
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.step import PageWrites, RowInit, ScheduleBatch

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
    """One prompt that takes the whole budget of tokens, then as many rows as run at once, which
    share it and want whatever sampling has. Logits that nothing is added to may be of another
    dtype, for which one token each is drawn. Within the device's stream. ConfigError where there is
    no memory for them.
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
        for wanted, query_lens in (
            (DEMANDING, [prompt]),
            (DEMANDING, [shared] * num_rows),
            (LIMITED, [1]),
            (NOISY, [1]),
        ):
            _run(
                runner, device, spec, row_params=row_params, batch=_batch(wanted, query_lens, spec)
            )


@contextlib.contextmanager
def names_the_option(what: str) -> Iterator[None]:
    """Where memory runs out, `what` says which option to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{what}, or take a smaller model: {reason}") from None


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


def _batch(wanted: RowInit, query_lens: list[int], spec: EngineSpec) -> ScheduleBatch:
    """New rows from 1 on, without pages."""
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
            msgspec.structs.replace(wanted, row=row, seed=row, prompt_len=query_lens[0])
            for row in range(1, num_rows + 1)
        ),
    )


def padding_batch(query_len: int, *, num_groups: int, num_rows: int = 1) -> ScheduleBatch:
    """Each row has `query_len` tokens and is sampled."""
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
