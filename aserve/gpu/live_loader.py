"""Loads adapters and new weights while the engine serves: a thread reads them, and the executor's
thread writes them between two steps. Profiles begin and end there as well.

New weights come from a checkpoint of the same model, with tensors of further files in place of some
of its own. They are read into host memory as a second
model, whose tensors are then copied into those of the first one. So graphs and fused steps, which
hold addresses, stay valid, and a checkpoint that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, assert_never

import torch

from aserve.errors import ConfigError, EngineDead, EngineError, ErrorInfo, InvalidRequest
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel, LoadPlan, ModelLoader
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.gpu.parallel.balancer import BalancedDispatcher
from aserve.gpu.profiler import Profiler
from aserve.gpu.replace_weights import Copy, copies
from aserve.gpu.weight_check import WeightChecker
from aserve.gpu.weights.source import CPU, ignore_progress, unwrapped
from aserve.host.threads import in_thread
from aserve.messages.changes import (
    CheckWeights,
    EngineJob,
    LoadLora,
    LoadWeights,
    Profile,
    Sleep,
    Wake,
)

NO_SLEEP = InvalidRequest("An engine sleeps only in a process of its own: --processes 2").info()
EXPERTS_MOVE = InvalidRequest(
    "Experts move between the ranks (--enable-eplb), so no rank keeps the weights of a snapshot.",
    param="action",
    code="experts_move",
).info()
# What is raised for files that do not fit this model.
UNREADABLE = (ConfigError, OSError, RuntimeError, ValueError, MemoryError)
# Fields of config.json that do not change what a model computes.
NEUTRAL_FIELDS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})

ReadModel: TypeAlias = Callable[[LoadWeights], CausalModel]
Submit: TypeAlias = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class LiveLoader:
    """Loads adapters and weights into a running engine. `read_model` reads another checkpoint of
    `model`; it is None for a model that takes no new weights. `balanced_dispatchers` move the
    experts of the model's layers between ranks.
    """

    model: CausalModel
    loras: LoraTables | None = None
    read_model: ReadModel | None = None
    balanced_dispatchers: Sequence[BalancedDispatcher] = ()
    profiler: Profiler = field(default_factory=Profiler)
    checker: WeightChecker = field(default_factory=WeightChecker)

    async def run(
        self,
        job: EngineJob,
        *,
        submit: Submit,
        died: asyncio.Future[BaseException],
    ) -> ErrorInfo | None:
        """Returns the error if it cannot be done. `submit` takes a job for the executor's thread,
        behind the steps that were launched; `died` completes if that thread ends.
        """
        match job:
            case LoadLora():
                param, read = "lora_path", partial(self._read_adapter, job)
            case LoadWeights():
                param = "path" if job.tensors else "model_path"
                read = partial(self._read_weights, job)
            case Profile():
                return await self._profile(job, submit, died)
            case CheckWeights():
                return await self._check_weights(job)
            case Sleep() | Wake():
                return NO_SLEEP
            case _:
                assert_never(job)
        try:
            writes = await in_thread(read, name="load")
        except UNREADABLE as error:
            return InvalidRequest(str(error), param=param, code="invalid_checkpoint").info()
        return await run_between_steps(lambda: _write(writes), submit=submit, died=died)

    async def _profile(
        self, job: Profile, submit: Submit, died: asyncio.Future[BaseException]
    ) -> ErrorInfo | None:
        """torch.profiler records the thread that starts it. The trace is written by another one."""
        try:
            work = self.profiler.end() if job.path else self.profiler.begin(job.flags)
            error = await run_between_steps(work, submit=submit, died=died)
            if error is None and job.path:
                await in_thread(lambda: self.profiler.write(Path(job.path)), name="profile")
            return error
        except InvalidRequest as refusal:
            return refusal.info()
        except OSError as failure:
            return InvalidRequest(f"The trace cannot be written: {failure}").info()

    async def _check_weights(self, job: CheckWeights) -> ErrorInfo | None:
        """Another thread reads the weights, beside the steps, which never write them."""
        if self.balanced_dispatchers:
            return EXPERTS_MOVE
        work = self.checker.compare if job.compares else self.checker.take
        try:
            await in_thread(lambda: work(self.model), name="weights")
        except InvalidRequest as refusal:
            return refusal.info()
        except (RuntimeError, MemoryError) as failure:
            return EngineError(f"the weights cannot be read: {failure}").info()
        return None

    def _read_adapter(self, load: LoadLora) -> list[Copy]:
        loras = self.loras
        if loras is None:
            raise ConfigError("the engine takes no LoRA adapters: start it with --enable-lora")
        _check_no_pipes(Path(load.path))
        adapter = loras.read(Path(load.path))
        return [lambda: loras.write(load.slot, adapter)]

    def _read_weights(self, load: LoadWeights) -> list[Copy]:
        if self.read_model is None:
            raise ConfigError("this model takes no new weights, because it has no native code")
        _check_no_pipes(*map(Path, filter(None, (load.path, *load.tensors))))
        with torch.inference_mode():
            other = self.read_model(load)
        if other.layers != self.model.layers:
            raise ConfigError(f"{load.path}: the scales of its KV cache differ from the model's")
        return [*copies(self.model, other), *(each.restart for each in self.balanced_dispatchers)]


def _check_no_pipes(*paths: Path) -> None:
    """Raises ConfigError. WHY: the open of a pipe waits for somebody who writes to it, and new
    requests are refused meanwhile.
    """
    for path in paths:
        for each in [path, *(path.iterdir() if path.is_dir() else ())]:
            if each.exists() and not (each.is_file() or each.is_dir()):
                raise ConfigError(f"{each} is no regular file, such as a pipe or a device")


def _write(writes: Iterable[Copy]) -> None:
    for write in writes:
        write()


async def run_between_steps(
    work: Callable[[], None], *, submit: Submit, died: asyncio.Future[BaseException]
) -> ErrorInfo | None:
    """Runs `work` on the executor's thread, and returns the error if it raised one."""
    ended: Future[None] = Future()
    submit(lambda: _settle(work, ended))
    outcome = asyncio.wrap_future(ended)
    await asyncio.wait((outcome, died), return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        return EngineDead(f"the device thread ended: {died.result()!r}").info()
    if (reason := outcome.exception()) is not None:
        return EngineError(f"the device could not do it: {reason}").info()
    return None


def _settle(work: Callable[[], None], ended: Future[None]) -> None:
    """NOTE: an exception that left this job would end the executor's thread."""
    try:
        work()
    except RuntimeError as error:  # all that torch raises
        ended.set_exception(error)
    else:
        ended.set_result(None)


def model_reader(loader: ModelLoader, plan: LoadPlan) -> ReadModel | None:
    """Returns the function that reads other checkpoints as the plan says, into host memory. Only
    models with native code have one."""
    if not isinstance(loader, NativeLoader):
        return None
    target = replace(plan.target, device=CPU, memory_bytes=None, wrap=unwrapped)
    host_plan = replace(plan, target=target, is_dummy=False, on_progress=ignore_progress)
    config = loader.config

    def read(load: LoadWeights) -> CausalModel:
        directory = Path(load.path) if load.path else loader.model_dir
        other, _ = make_loader(directory)
        if not isinstance(other, NativeLoader) or other.family != loader.family:
            raise ConfigError(f"{directory}: its architecture is not {config.architecture}")
        if names := config.fields.differing(other.config.fields) - NEUTRAL_FIELDS:
            raise ConfigError(
                f"{directory}/config.json differs from the model's in {', '.join(sorted(names))}"
            )
        return other.load(replace(host_plan, tensors=tuple(map(Path, load.tensors))))

    return read
