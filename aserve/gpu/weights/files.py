"""The files of a model directory: safetensors, one or several with an index, or GGUF with a table
of its tensors. What is opened is read by name, whole or in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gguf.table import file_name as gguf_name
from aserve.gguf.table import read_table
from aserve.gpu.weights.gguf import GgufFile
from aserve.json_file import read_json_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class StoredSlice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, part: tuple[int | slice, ...], /) -> Tensor: ...


class WeightFile(Protocol):
    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> StoredSlice: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def __enter__(self) -> WeightFile: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_file(path: Path, device: torch.device) -> WeightFile:
    """Raises ConfigError."""
    is_gguf = path.suffix == ".gguf"
    try:
        if is_gguf:
            return GgufFile(path, device)
        file: WeightFile = safe_open(path, framework="pt", device=str(device))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        kind = "GGUF" if is_gguf else "safetensors"
        raise ConfigError(f"{path} is not a readable {kind} file: {error}") from error
    return file


def read_index(directory: Path) -> Mapping[str, str]:
    """Maps each tensor's name to its file. It is empty where there is a single file, which wins
    over an index."""
    if (table := read_table(directory)) is not None:
        return {name: gguf_name(tensor.file) for name, tensor in table.tensors.items()}
    if (directory / SINGLE).exists():
        return {}
    path = directory / INDEX
    try:
        index = read_json_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{directory} has no {SINGLE} and no {INDEX}{_hint(directory)}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map names no tensors")
    for name, file_name in weight_map.items():
        # An index is untrusted input: its file names must not lead out of the directory.
        is_text = isinstance(file_name, str) and file_name
        if not is_text or Path(file_name).name != file_name:
            raise ConfigError(
                f"{path}: {name} is said to be in {file_name!r}, which is no file name"
            )
    return weight_map


def _hint(directory: Path) -> str:
    others = sorted(path.name for path in directory.glob("*.bin"))
    return (
        f"; {others[0]} is in a format that is not read, convert it to safetensors"
        if others
        else ""
    )


def listed(names: Iterable[str]) -> str:
    """Returns the first five names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + more
