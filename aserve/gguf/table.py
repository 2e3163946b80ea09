"""The table of a model directory that was made of GGUF files: where each of the model's tensors is,
and what the converter has done to its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aserve.errors import UNDECODABLE, ConfigError
from aserve.gguf.families import GgufFamily, RowOrder
from aserve.gguf.metadata import Metadata

TABLE = "gguf.json"
SUFFIXES = ("weight", "bias")  # a tensor without one is a weight
# Modules whose tensors have no suffix in the model; and of recurrent layers the one of which the
# file has -exp(x), the one whose inputs are in the file's order, and the norm without an offset.
WITHOUT_SUFFIX = ("ssm_a", "ssm_d", "ssm_dt", "exp_probs_b", "attn_sinks")
DECAY, ORDERED_INPUTS, PLAIN_NORM = "ssm_a", "ssm_out", "ssm_norm"
VECTORS = ("ssm_a", "ssm_d", "ssm_norm")  # which may have two dimensions in the file
ONE_ROW = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")  # matrices
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor of the model. The file has its rows one after the other from byte `at` on."""

    file: int  # the number of the file
    kind: int  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    at: int
    size: int  # in bytes
    order: RowOrder | None = None  # None: that of the model
    has_columns: bool = False  # `order` is that of the columns, not of the rows
    offset: float = 0.0  # to be added to the values of the file
    is_decay: bool = False  # -exp(x) in the file for x in the model


class GgufTable(msgspec.Struct, frozen=True):
    num_files: int
    tensors: dict[str, GgufTensor]  # by their names in Hugging Face's format


def file_name(number: int) -> str:
    """Returns the name of a link to a GGUF file in the model directory."""
    return "model.gguf" if number == 0 else f"model-{number}.gguf"


def read_table(directory: Path) -> GgufTable | None:
    """Returns the table, or None for a directory without one. Raises ConfigError."""
    path = directory / TABLE
    try:
        return msgspec.json.decode(path.read_bytes(), type=GgufTable)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no table of a GGUF file: {error}") from error


def make_table(file: Metadata, family: GgufFamily) -> GgufTable:
    """Raises ConfigError for a tensor that the family does not have."""
    return GgufTable(len(file.paths), dict(_tensors(file, family)))


def _tensors(file: Metadata, family: GgufFamily) -> Iterator[tuple[str, GgufTensor]]:
    for name, stored in file.tensors.items():
        place, _, suffix = name.rpartition(".")
        module, prefix = place, ""
        number, _, rest = name.removeprefix("blk.").partition(".")
        if place.startswith("blk.") and number.isdecimal():
            module, prefix = rest.removesuffix(f".{suffix}"), f"model.layers.{number}."
            if int(number) >= file.num_layers:  # multi-token prediction
                continue
        if name in ROPE:  # settings.py reads them
            continue
        own = (family.names if prefix else family.around).get(module)
        if own is None:
            raise ConfigError(
                f"{file.paths[0]}: tensor {name} is unknown in the architecture "
                f"{file.architecture!r}; a newer converter may have written the file"
            )
        suffix = suffix if suffix in SUFFIXES else SUFFIXES[0]
        is_shifted = module.endswith("norm") and module != PLAIN_NORM
        tensor = GgufTensor(
            stored.file,
            stored.kind,
            (math.prod(stored.shape),) if module in VECTORS else stored.shape,
            stored.at,
            stored.size,
            order=family.order_of(file, module, stored.shape[0]) if prefix else None,
            has_columns=module == ORDERED_INPUTS,
            offset=-family.norm_offset if is_shifted else 0.0,
            is_decay=module == DECAY,
        )
        ending = "" if module in WITHOUT_SUFFIX else f".{suffix}"
        yield from _parts(f"{prefix}{own}{ending}", tensor)


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yields a tensor, or those of the experts of which it is made. Biases of experts stay one."""
    first, *rest = tensor.shape
    if name.endswith(".bias"):
        name = name.replace(".{}.", ".").replace(".bias", "_bias") if "{}" in name else name
    if name.endswith(ONE_ROW) and not rest:  # some converters drop the 1
        yield name, msgspec.structs.replace(tensor, shape=(1, first))
    elif "{}" in name:
        size = tensor.size // first
        for number in range(first):
            at = tensor.at + number * size
            own = msgspec.structs.replace(tensor, shape=tuple(rest), at=at, size=size)
            yield name.format(number), own
    elif name.endswith(("conv.conv.weight", "conv1d.weight")):  # [channels, taps] in the file
        yield name, msgspec.structs.replace(tensor, shape=(first, 1, *rest))
    else:
        yield name, tensor
