"""`aserve models`: the models that are supported, and what each device and attention backend has.

The lists are read from the registries and the options, so they cannot be out of date.
docs/models.md has the same table of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aserve.config import KvOptions, ModelOptions
from aserve.gpu.attention.base import AttentionUnavailable, Capabilities
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.select import load_backend
from aserve.gpu.device.registry import device_names
from aserve.gpu.kv.store import kv_dtype_name
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.format import dtype_name
from aserve.options.option import options_of

FAMILY_COLUMNS = ("family", "architecture", "features")
BACKEND_COLUMNS = ("attention backend", "devices", "dtypes", "KV", "layers", "steps")
FALLBACK = (
    "Any other causal model runs in the code of transformers, if that can be verified at the "
    "start; others are refused with the reason. Code in a model directory is never run."
)
CHECKPOINTS = (
    "Checkpoints in fp8 with scales per block, row or tensor (also of compressed-tensors), of AWQ, "
    "GPTQ and compressed-tensors with 4 bits, and experts in MXFP4 are read; others that are "
    "quantized are refused."
)


def supported() -> Iterator[str]:
    """Returns the lines of `aserve models`."""
    yield from _aligned(FAMILY_COLUMNS, family_rows())
    yield from ("", FALLBACK, "")
    yield from _aligned(BACKEND_COLUMNS, backend_rows())
    yield from ("", f"{_formats()} {CHECKPOINTS} Devices: {', '.join(device_names())}.")


def _formats() -> str:
    """The number formats that options name."""
    options = {option.name: option for option in options_of(ModelOptions, KvOptions)}

    def values(name: str) -> str:
        choices = ", ".join(c for c in options[name].limits.choices if c != "auto")
        return f"{choices} by {options[name].flag}"

    return (
        f"Weights: {values('dtype')}; {values('quantization')} on CUDA and, but for fp8, the CPU. "
        f"KV: the model's dtype; {values('kv_cache_dtype')}."
    )


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def family_rows() -> list[tuple[str, str, str]]:
    """One row for each native architecture, by the families' names."""
    rows = [(family.name, name, family.about) for name, family in FAMILIES.items()]
    return sorted(rows, key=lambda row: row[0].lower())


def backend_rows() -> list[tuple[str, ...]]:
    return [_backend_row(name) for name in BACKENDS]


def _backend_row(name: str) -> tuple[str, ...]:
    try:
        has = load_backend(name).capabilities
    except AttentionUnavailable as error:
        return (name, f"not here: it {error}", "", "", "", "")
    dtypes = "all" if has.dtypes is None else ", ".join(sorted(map(dtype_name, has.dtypes)))
    kv_dtypes = ", ".join(sorted(map(kv_dtype_name, has.kv_dtypes))) or "the same"
    devices = "all" if has.devices is None else ", ".join(sorted(has.devices))
    return name, devices, dtypes, kv_dtypes, ", ".join(_layers(has)), ", ".join(_steps(has))


def _layers(has: Capabilities) -> Iterator[str]:
    """The kinds of layers besides plain causal ones."""
    kinds = {
        "windows": has.windows,
        "soft caps": has.softcaps,
        "sinks": has.sinks,
        "latents": has.latents,
    }
    yield from (kind for kind, is_there in kinds.items() if is_there)
    masks = sorted(mask.value for mask in has.masks)
    yield from (f"mask {mask}" for mask in masks if mask != "causal")


def _steps(has: Capabilities) -> Iterator[str]:
    kinds = {
        "draft trees": has.tree_masks,
        "graphs": has.can_capture,
        "deterministic": has.deterministic,
    }
    yield from (kind for kind, is_there in kinds.items() if is_there)
