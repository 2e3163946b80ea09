"""The table of a model directory that was made of GGUF files: where each of the model's tensors is,
and what the converter has done to its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from aserve.errors import ConfigError
from aserve.gguf.families import GgufFamily
from aserve.gguf.metadata import Metadata

TABLE = "gguf.json"
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor of the model. The file has its rows one after the other from byte `at` on."""

    file: int  # the number of the file
    kind: int  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    at: int
    size: int  # in bytes
    # Of the heads whose rows the file has in another order, or 0: rows i and i + d/2 of a head of d
    # rows are neighbours there, as rope rotates them.
    heads: int = 0
    offset: float = 0.0  # to be added to the values of the file


class GgufTable(msgspec.Struct, frozen=True):
    num_files: int
    tensors: dict[str, GgufTensor]  # by their names in Hugging Face's format


def file_name(number: int) -> str:
    """Returns the name of a link to a GGUF file in the model directory."""
    return "model.gguf" if number == 0 else f"model-{number}.gguf"


def read_table(directory: Path) -> GgufTable | None:
    """Returns the table, or None for a directory without one."""
    try:
        data = (directory / TABLE).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=GgufTable)


def make_table(file: Metadata, family: GgufFamily) -> GgufTable:
    """Raises ConfigError for a tensor that the family does not have."""
    return GgufTable(len(file.paths), dict(_tensors(file, family)))


def _tensors(file: Metadata, family: GgufFamily) -> Iterator[tuple[str, GgufTensor]]:
    for name, stored in file.tensors.items():
        if name in ROPE:  # settings.py reads them
            continue
        module, _, suffix = name.rpartition(".")
        layer, number = "", ""
        if module.startswith("blk."):
            _, number, layer = module.split(".", 2)
        own = family.names.get(layer) if layer else family.around.get(module)
        if own is None:
            raise ConfigError(
                f"{file.paths[0]}: tensor {name} is unknown in the architecture "
                f"{file.architecture!r}; a newer converter may have written the file"
            )
        tensor = GgufTensor(
            stored.file,
            stored.kind,
            stored.shape,
            stored.at,
            stored.size,
            heads=_num_paired_heads(file, family, layer),
            offset=-family.norm_offset if module.endswith("norm") else 0.0,
        )
        prefix = f"model.layers.{number}." if layer else ""
        yield from _parts(f"{prefix}{own}.{suffix}", tensor)


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yields a tensor, or those of the experts of which it is made."""
    first, *rest = tensor.shape
    if "{}" in name:
        size = tensor.size // first
        for number in range(first):
            at = tensor.at + number * size
            own = msgspec.structs.replace(tensor, shape=tuple(rest), at=at, size=size)
            yield name.format(number), own
    elif name.endswith("conv.conv.weight"):  # [channels, taps] in the file
        yield name, msgspec.structs.replace(tensor, shape=(first, 1, *rest))
    else:
        yield name, tensor


def _num_paired_heads(file: Metadata, family: GgufFamily, layer: str) -> int:
    if not family.has_neighbours or layer not in ("attn_q", "attn_k"):
        return 0
    num_heads = file.integer("attention.head_count")
    return num_heads if layer == "attn_q" else file.integer("attention.head_count_kv", num_heads)
