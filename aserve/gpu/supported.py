"""`aserve models`: the models that are supported, and what each device and attention backend has.

Everything is read from the registries, so the lists cannot be out of date. docs/models.md has the
same table of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aserve.gpu.attention.base import AttentionUnavailable, Capabilities
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.select import load_backend
from aserve.gpu.device.registry import device_names
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.format import dtype_name

FAMILY_COLUMNS = ("family", "architecture", "features")
BACKEND_COLUMNS = ("attention backend", "devices", "dtypes", "layers", "steps")
FALLBACK = (
    "Any other causal model runs in the code of transformers, if that can be verified at the "
    "start; others are refused with the reason. Code in a model directory is never run."
)
FORMATS = (
    "Weights: float32, bfloat16, float16 or float64 by --dtype; on the CPU also 8 and 4 bits by "
    "--quantization, and float16 that computes in float32 where the processor has no "
    "bfloat16. KV: the model's dtype, or 8 bits by --kv-cache-dtype. Checkpoints in fp8 with a "
    "scale per block, of AWQ, GPTQ and compressed-tensors with 4 bits, and experts in MXFP4 are "
    "read; others that are quantized are refused. Devices: "
)


def supported() -> Iterator[str]:
    """Returns the lines of `aserve models`."""
    yield from _aligned(FAMILY_COLUMNS, family_rows())
    yield from ("", FALLBACK, "")
    yield from _aligned(BACKEND_COLUMNS, backend_rows())
    yield from ("", f"{FORMATS}{', '.join(device_names())}.")


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
        return (name, f"not here: it {error}", "", "", "")
    dtypes = "all" if has.dtypes is None else ", ".join(sorted(map(dtype_name, has.dtypes)))
    devices = "all" if has.devices is None else ", ".join(sorted(has.devices))
    return name, devices, dtypes, ", ".join(_layers(has)), ", ".join(_steps(has))


def _layers(has: Capabilities) -> Iterator[str]:
    """The kinds of layers besides plain causal ones."""
    kinds = {
        "windows": has.windows,
        "soft caps": has.softcaps,
        "sinks": has.sinks,
        "latents": has.latents,
    }
    yield from (kind for kind, is_there in kinds.items() if is_there)
    yield from (f"mask {mask.value}" for mask in has.masks if mask.value != "causal")


def _steps(has: Capabilities) -> Iterator[str]:
    kinds = {
        "draft trees": has.tree_masks,
        "graphs": has.can_capture,
        "deterministic": has.deterministic,
    }
    yield from (kind for kind, is_there in kinds.items() if is_there)
