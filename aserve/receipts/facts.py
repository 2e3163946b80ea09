"""Finds what a receipt says of the server: the hashes of its model, its settings, its machine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aserve.host.threads import in_thread
from aserve.receipts.digest import Digests
from aserve.receipts.record import (
    NUMERIC_OPTIONS,
    Machine,
    ModelDigest,
    ReceiptModel,
    Settings,
    this_machine,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The server's part of a receipt."""

    model: ReceiptModel
    settings: Settings
    machine: Machine


class FactFinder:
    """Finds the facts of receipts. The files of the model are hashed when the first receipt is
    asked for, which waits for that; without receipts nothing is computed.
    """

    def __init__(self, find_model: Callable[[], Path], settings: Mapping[str, object]) -> None:
        """`find_model` returns the directory of the model. It may block."""
        self._find_model = find_model
        self._settings = settings
        self._digests = Digests()
        self._turn = asyncio.Lock()
        self._model_dir: Path | None = None
        self._machine: Machine | None = None

    async def find(self, name: str, adapter_dir: Path | None, *, dtype: str) -> Facts:
        """Returns the facts for a model, and for the LoRA adapter in a directory. `dtype` is the
        one that the engine has chosen.
        """
        async with self._turn:
            work = functools.partial(self._find, name, adapter_dir, dtype)
            return await in_thread(work, name="receipt")

    async def weight_hashes(self, files: Sequence[Path]) -> tuple[str, list[str]]:
        """Returns the hash of the model's weights, and those of further files."""

        def find() -> tuple[str, list[str]]:
            self._model_dir = self._model_dir or self._find_model()
            has_weights = self._settings.get("load_format") != "dummy"
            digest = self._weights_of(self._model_dir, has_weights=has_weights)
            return digest.weights, [self._digests.of_file(path) for path in files]

        async with self._turn:
            return await in_thread(find, name="weights")

    def use(self, model_dir: Path) -> None:
        """The weights of the model are from now on those in this directory."""
        self._model_dir = model_dir

    def _find(self, name: str, adapter_dir: Path | None, dtype: str) -> Facts:
        self._model_dir = self._model_dir or self._find_model()
        self._machine = self._machine or this_machine()
        chosen = {**self._settings, "dtype": dtype}
        settings = {option: chosen.get(option) for option in NUMERIC_OPTIONS}
        has_weights = settings["load_format"] != "dummy"
        tokenizer = chosen.get("tokenizer")
        digest = self._weights_of(
            self._model_dir,
            has_weights=has_weights,
            tokenizer=None if tokenizer is None else str(tokenizer),
        )
        adapter = None if adapter_dir is None else self._weights_of(adapter_dir)
        return Facts(
            ReceiptModel(name, digest, adapter), msgspec.convert(settings, Settings), self._machine
        )

    def _weights_of(
        self, folder: Path, *, has_weights: bool = True, tokenizer: str | None = None
    ) -> ModelDigest:
        """Raises FileNotFoundError where the weights were, if somebody has moved them."""
        digest = self._digests.of(folder, has_weights=has_weights, tokenizer=tokenizer)
        if has_weights and not digest.weights:
            raise FileNotFoundError(f"{folder} has no weights any more")
        return digest
