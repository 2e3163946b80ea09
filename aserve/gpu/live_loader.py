"""Loads adapters and new weights while the engine serves: a thread reads them, and the executor's
thread writes them between two steps.

New weights come from a checkpoint of the same model. They are read into host memory as a second
model, whose tensors are then copied into those of the first one. So graphs and fused steps, which
hold addresses, stay valid, and a checkpoint that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, assert_never

import torch

from aserve.errors import ConfigError, EngineDead, EngineError, ErrorInfo, InvalidRequest
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel, LoadPlan, ModelLoader
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.gpu.replace_weights import Copy, copies
from aserve.gpu.weights.source import CPU, ignore_progress, unwrapped
from aserve.host.threads import in_thread
from aserve.messages.requests import DeviceLoad, LoadLora, LoadWeights

# What is raised for files that do not fit this model.
UNREADABLE = (ConfigError, OSError, RuntimeError, ValueError, MemoryError)
# Fields of config.json that do not change what a model computes.
NEUTRAL_FIELDS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})

ReadModel: TypeAlias = Callable[[Path], CausalModel]


@dataclass(frozen=True, slots=True)
class LiveLoader:
    """Loads adapters and weights into a running engine. `read_model` reads another checkpoint of
    `model`; it is None for a model that takes no new weights.
    """

    model: CausalModel
    loras: LoraTables | None = None
    read_model: ReadModel | None = None

    async def load(
        self,
        load: DeviceLoad,
        *,
        submit: Callable[[Callable[[], None]], None],
        died: asyncio.Future[BaseException],
    ) -> ErrorInfo | None:
        """Returns the error if it cannot be loaded. `submit` takes a job for the executor's thread,
        behind the steps that were launched; `died` completes if that thread ends.
        """
        match load:
            case LoadLora():
                param, read = "lora_path", lambda: self._read_adapter(load)
            case LoadWeights():
                param, read = "model_path", lambda: self._read_weights(Path(load.path))
            case _:
                assert_never(load)
        try:
            writes = await in_thread(read, name="load")
        except UNREADABLE as error:
            return InvalidRequest(str(error), param=param, code="invalid_checkpoint").info()
        written: Future[None] = Future()
        submit(lambda: _write(writes, written))
        outcome = asyncio.wrap_future(written)
        await asyncio.wait((outcome, died), return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            return EngineDead(f"the device thread ended: {died.result()!r}").info()
        if (reason := outcome.exception()) is not None:
            return EngineError(f"the device could not be written to: {reason}").info()
        return None

    def _read_adapter(self, load: LoadLora) -> list[Copy]:
        loras = self.loras
        if loras is None:
            raise ConfigError("the engine takes no LoRA adapters: start it with --enable-lora")
        adapter = loras.read(Path(load.path))
        return [lambda: loras.write(load.slot, adapter)]

    def _read_weights(self, directory: Path) -> list[Copy]:
        if self.read_model is None:
            raise ConfigError("this model takes no new weights, because it has no native code")
        with torch.inference_mode():
            other = self.read_model(directory)
        if other.layers != self.model.layers:
            raise ConfigError(f"{directory}: the scales of its KV cache differ from the model's")
        return list(copies(self.model, other))


def _write(writes: Iterable[Copy], written: Future[None]) -> None:
    """NOTE: an exception that left this job would end the executor's thread."""
    try:
        for write in writes:
            write()
    except RuntimeError as error:  # all that torch raises
        written.set_exception(error)
    else:
        written.set_result(None)


def model_reader(loader: ModelLoader, plan: LoadPlan) -> ReadModel | None:
    """Returns the function that reads other checkpoints as the plan says, into host memory. Only
    models with native code have one."""
    if not isinstance(loader, NativeLoader):
        return None
    target = replace(plan.target, device=CPU, memory_bytes=None, wrap=unwrapped)
    host_plan = replace(plan, target=target, is_dummy=False, on_progress=ignore_progress)
    config = loader.config

    def read(directory: Path) -> CausalModel:
        other, _ = make_loader(directory)
        if not isinstance(other, NativeLoader) or other.family is not loader.family:
            raise ConfigError(f"{directory}: its architecture is not {config.architecture}")
        if names := config.fields.differing(other.config.fields) - NEUTRAL_FIELDS:
            raise ConfigError(
                f"{directory}/config.json differs from the model's in {', '.join(sorted(names))}"
            )
        return other.load(host_plan)

    return read
