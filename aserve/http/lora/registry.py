"""The LoRA adapters that clients may name as `model`, and how they come and go.

An adapter has a slot on the device. A slot is free if no adapter that is served has it and no open
request uses it, so an adapter that is unloaded stays on the device until its last request has
ended. Every load gets an id that is never used again. The id is part of the namespace of the prefix
cache, so an adapter that is loaded again under its name finds no pages of its former weights.

`load` and `unload` alone change what is served. Loads run one after the other. If the client that
asked for one goes away, its slot counts as free: the engine keeps the order of loads, so what is
still written there is overwritten by the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

import msgspec

from aserve.config import LoraOptions
from aserve.errors import BugError, ConfigError, ErrorInfo, InvalidRequest, NotFound
from aserve.http.errors import RequestFailed
from aserve.messages.changes import EngineJob, LoadLora
from aserve.messages.requests import GenerateRequest

MAX_NAME_CHARS = 256

# Runs a job of the engine, such as loading an adapter; returns the error if that is not possible.
RunOnDevice: TypeAlias = Callable[[EngineJob], Awaitable[ErrorInfo | None]]

NO_LORAS = LoraOptions()

logger = logging.getLogger(__name__)


async def cannot_run(_: EngineJob) -> ErrorInfo:
    return BugError("something was loaded before the engine had started").info()


@dataclass(frozen=True, slots=True)
class ServedLora:
    name: str
    path: str
    lora_id: int
    slot: int
    created: int  # seconds since 1970
    token: str  # tells its KV from that of other servers' adapters, where they share KV

    def applied_to(self, request: GenerateRequest) -> GenerateRequest:
        """NOTE: no client's own namespace begins with `lora-` (Caller.namespace_of)."""
        namespace = f"lora-{self.lora_id}-{self.token}:{request.namespace}"
        return msgspec.structs.replace(request, lora_slot=self.slot, namespace=namespace)


class LoraRegistry:
    """`slots_in_use` are the slots of the open requests."""

    def __init__(
        self,
        options: LoraOptions = NO_LORAS,
        *,
        slots_in_use: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._options = options
        self.run_on_device: RunOnDevice = cannot_run
        self._slots_in_use = slots_in_use
        self._served: dict[str, ServedLora] = {}
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def served(self) -> tuple[ServedLora, ...]:
        return tuple(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    def find(self, name: str) -> ServedLora | None:
        """Finds an adapter by its name, or by SGLang's `base:name`."""
        return self._served.get(name) or self._served.get(name.partition(":")[2])

    def apply(
        self, model: str | None, requests: tuple[GenerateRequest, ...]
    ) -> tuple[GenerateRequest, ...]:
        """Returns the requests with the adapter that `model` names, if it names one."""
        lora = self.find(model or "")
        return requests if lora is None else tuple(map(lora.applied_to, requests))

    async def open(self, run_on_device: RunOnDevice) -> None:
        """Begins to load adapters, first those of --lora-modules. Raises ConfigError."""
        self.run_on_device = run_on_device
        for name, path in modules_of(self._options.lora_modules):
            try:
                await self.load(name, path)
            except (InvalidRequest, RequestFailed) as error:
                reason = error.info.message if isinstance(error, RequestFailed) else error.message
                raise ConfigError(f"--lora-modules {name}={path}: {reason}") from None

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Serves the adapter in the directory `path` as `name`; one that is served so stays as it
        is. With `replaces` the files are read again, and the adapter may take the name of another
        one, whose running requests end with the adapter that they began with.
        """
        async with self._turn:
            served = self._served.get(name)
            if served is not None and served.path == path and not replaces:
                return
            self._check_name(name, replaces=replaces)
            load = LoadLora(next(self._ids), self._free_slot(), path)
            error = await self.run_on_device(load)
            if error is not None:
                raise RequestFailed(error)
            created, token = int(time.time()), secrets.token_hex(8)
            self._served[name] = ServedLora(name, path, load.lora_id, load.slot, created, token)
            logger.info("adapter loaded name=%s slot=%d path=%s", name, load.slot, path)

    def unload(self, name: str) -> None:
        """From now on no request finds the adapter. Those that run keep it to their ends."""
        if self._served.pop(name, None) is None:
            raise NotFound(
                f"The LoRA adapter '{name[:200]}' cannot be found.",
                param="lora_name",
                code="model_not_found",
            )
        logger.info("adapter unloaded name=%s", name)

    def _check_name(self, name: str, *, replaces: bool) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise InvalidRequest(
                f"Invalid 'lora_name': expected 1 to {MAX_NAME_CHARS} characters, got {len(name)}.",
                param="lora_name",
                code="invalid_value",
            )
        if name in self._served and not replaces:
            raise InvalidRequest(
                f"The LoRA adapter '{name}' has already been loaded from another path. Unload it "
                "first, or set 'load_inplace' to replace it.",
                param="lora_name",
                code="adapter_exists",
            )

    def _free_slot(self) -> int:
        most = self._options.max_slots
        if not most:
            raise InvalidRequest(
                "This server takes no LoRA adapters: start it with --enable-lora.",
                code="lora_disabled",
            )
        taken = {each.slot for each in self._served.values()} | set(self._slots_in_use())
        free = next((slot for slot in range(1, most + 1) if slot not in taken), None)
        if free is None:
            raise InvalidRequest(
                f"All {most} adapters of --max-loras are loaded, or still used by requests that "
                "run. Unload one, wait for its requests, or start the server with more.",
                param="lora_name",
                code="too_many_adapters",
            )
        return free


def modules_of(text: str | None) -> list[tuple[str, str]]:
    """Parses `NAME=PATH,...`. A path alone is served under its last part."""
    modules: list[tuple[str, str]] = []
    for item in (text or "").split(","):
        name, equals, path = item.strip().partition("=")
        if not name:
            continue
        if equals and not path:
            raise ConfigError(f"--lora-modules {item}: expected NAME=PATH")
        modules.append((name, path) if equals else (PurePath(name).name, name))
    return modules
