"""The metadata of a GGUF file: values by key, and where its tensors lie.

Source: docs/gguf.md of ggml; the keys are in `gguf.constants.Keys`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
from gguf import GGUFReader

from aserve.errors import ConfigError

PART = re.compile(r"-00001-of-(\d{5})\.gguf$")  # the first of several files


class StoredBlocks(msgspec.Struct, frozen=True):
    """A tensor as a file has it. `shape` is that of torch: the last dimension lies in blocks."""

    file: int  # the number of the file
    kind: int  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    at: int  # the first byte
    size: int  # in bytes


class Metadata:
    """Metadata are what the files of a model say. Methods take a `key` as it is, or a `name` that
    stands behind the architecture's in a key.
    """

    __slots__ = ("_values", "architecture", "paths", "tensors")

    def __init__(
        self,
        paths: tuple[Path, ...],
        values: Mapping[str, object],
        tensors: Mapping[str, StoredBlocks],
    ) -> None:
        self.paths = paths
        self.tensors = tensors
        self._values = values
        self.architecture = self.text("general.architecture")

    @property
    def num_layers(self) -> int:
        """Without those of multi-token prediction, which follow."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    def get(self, key: str) -> object:
        """Returns the value of a whole key, or None."""
        return self._values.get(key)

    def has(self, name: str) -> bool:
        return self._own(name) is not None

    def is_in_layers(self, name: str) -> bool:
        """Returns whether some layer has a tensor of this name."""
        return self.rows_in_layers(name) is not None

    def rows_in_layers(self, name: str) -> int | None:
        """Returns the rows of the first layer's tensor of this name, None if no layer has one."""
        found = (self.tensors.get(f"blk.{layer}.{name}") for layer in range(self.num_layers))
        return next((tensor.shape[0] for tensor in found if tensor is not None), None)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            self.refuse(key, value, "a text")
        return value

    def integers(self, name: str) -> list[int]:
        """Returns a value that may differ by layer: one, or one for each layer."""
        value = self._own(name)
        found = value if isinstance(value, list) else [value]
        integers = [each for each in found if isinstance(each, int)]
        if len(integers) < len(found):
            self.refuse(name, value, "an integer, or one for each layer")
        return integers

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a value that layers share. A layer with 0 lacks what it is of, and without a
        default some layer has it."""
        if default is not None and self._own(name) is None:
            return default
        distinct = {*self.integers(name)} - {0}
        if len(distinct) > 1 or (default is None and not distinct):
            self.refuse(name, self._own(name), "the same integer for all layers, not 0")
        return max(distinct, default=0)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._own(name)
        return default if value is None else bool(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._own(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float):
            self.refuse(name, value, "a number")
        return float(value)

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        shown = "is missing" if value is None else f"is {str(value)[:80]!r}"
        raise ConfigError(f"{self.paths[0]}: {key} {shown}; expected {expected}")

    def _own(self, name: str) -> object:
        return self._values.get(f"{self.architecture}.{name}")


def read_metadata(path: Path) -> Metadata:
    """Reads the header of a GGUF file, and of those that it is the first of. Raises
    ConfigError.
    """
    paths = _paths(path)
    values: dict[str, object] = {}
    tensors: dict[str, StoredBlocks] = {}
    for number, each in enumerate(paths):
        reader, found = _open(each)
        values = values or found
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise ConfigError(f"{each}: tensor {tensor.name} is in two files")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            tensors[tensor.name] = StoredBlocks(
                number,
                int(tensor.tensor_type),
                shape,
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
    return Metadata(paths, values, tensors)


def _paths(first: Path) -> tuple[Path, ...]:
    found = PART.search(first.name)
    if found is None:
        return (first,)
    stem, count = first.name[: found.start()], found[1]
    paths = tuple(
        first.with_name(f"{stem}-{number:05}-of-{count}.gguf")
        for number in range(1, int(count) + 1)
    )
    lost = [path.name for path in paths if not path.is_file()]
    if lost:
        raise ConfigError(f"{first} is one of {count} files, of which {lost[0]} is not there")
    return paths


def _open(path: Path) -> tuple[GGUFReader, dict[str, object]]:
    try:
        reader = GGUFReader(path)
        return reader, {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
