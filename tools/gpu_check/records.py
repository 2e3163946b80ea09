"""The records of all parts: one JSON file per part while they run, and one file with all of them.

A file is replaced as a whole, so a reader never sees a part of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from aserve.errors import ConfigError
from tools.gpu_check.host import Host

T = TypeVar("T")

MERGED = "gpu-check.json"
PARTS_DIR = "parts"

Status: TypeAlias = Literal["done", "failed", "killed", "not run", "running"]
Figures: TypeAlias = dict[str, object]  # values that JSON can represent


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one part. `reason` says why it is not done. A part that was killed has the
    figures that it had kept until then. `attempt` counts how often it was started without an end.
    """

    part: str
    status: Status
    device: str
    shape: str
    reason: str = ""
    figures: Figures = {}
    took_s: float = 0.0
    attempt: int = 1
    host: Host | None = None

    @property
    def is_dry(self) -> bool:
        """Whether its figures are not those of a GPU."""
        return (self.device, self.shape) != ("cuda", "full")

    @property
    def is_final(self) -> bool:
        """Whether the next call does not run the part again."""
        return self.status in ("done", "failed", "killed")


class Merged(msgspec.Struct, frozen=True):
    """The content of the file with all records, in the order of the catalog."""

    parts: dict[str, Record]


class Records:
    """The records of one output folder. The file of a part is newer than its merged record."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def read(self) -> dict[str, Record]:
        found = dict(_read(self._out / MERGED, Merged).parts) if self.merged.exists() else {}
        for path in sorted((self._out / PARTS_DIR).glob("*.json")):
            found[path.stem] = _read(path, Record)
        return found

    def write(self, record: Record) -> None:
        _replace(self._out / PARTS_DIR / f"{record.part}.json", msgspec.json.encode(record))

    def merge(self, records: Mapping[str, Record]) -> None:
        encoded = msgspec.json.encode(Merged(dict(records)))
        _replace(self.merged, msgspec.json.format(encoded) + b"\n")

    def log(self, part: str) -> Path:
        """Returns the file for the output of the part."""
        path = self._out / PARTS_DIR / f"{part}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def merged(self) -> Path:
        return self._out / MERGED


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: not a record of gpu-check: {error}; remove it") from None


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
