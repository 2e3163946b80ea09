"""The input of a part: the device, the sizes, a folder for model configs, and where to keep
figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.gpu.build import BuildOptions
from aserve.gpu.device.base import Device
from aserve.gpu.device.registry import open_device
from aserve.tiny import MODEL_DIR
from tools.gpu_check.recorded_graphs import RecordingCpu
from tools.gpu_check.records import Figures
from tools.gpu_check.shapes import SIZES, ModelShape, Sizes

PAGE_SIZE = 16
DTYPES: Mapping[str, str] = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of a part. `keep` stores its figures so far, in case it does not reach its end."""

    device: str
    shape: str
    folder: Path
    keep: Callable[[Figures], None]

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.shape]

    @property
    def device_flags(self) -> dict[str, object]:
        """Returns the options of every engine. There is no structured output, because the imports
        of a grammar worker would compete with what is measured.
        """
        return {"device": self.device, "grammar_workers": 0}

    def flags(self, model: ModelShape, *, num_rows: int, max_len: int) -> dict[str, object]:
        """Returns options of an engine that runs `num_rows` rows of `max_len` tokens at once."""
        pages_per_row = -(-max_len // PAGE_SIZE) + 1
        return {
            **self.device_flags,
            "model": str(model.write(self.folder) / "config.json"),
            "load_format": "dummy",
            "dtype": DTYPES[self.device],
            "generation_config": "none",
            "max_model_len": max_len,
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": max(8192, num_rows),
            "page_size": PAGE_SIZE,
            "num_pages": 1 + num_rows * pages_per_row,
            "no_prefix_cache": True,
            "cuda_graph_capture": "eager",  # else captures would be part of the measurement
        }

    def open_device(self) -> Device:
        """Opens the device. The CPU of a dry run captures steps as well."""
        device = RecordingCpu() if self.device == "cpu" else open_device(self.device)
        device.graph_rows = max(self.sizes.batches)
        return device

    def for_steps(self, options: BuildOptions) -> BuildOptions:
        """Forwards are captured within whole steps only, because replays are counted. A dry run
        has other options: compiled CPU kernels cannot be recorded."""
        options = dataclasses.replace(options, piece_tokens=None)
        if self.device == "cuda":
            return options
        return dataclasses.replace(options, attention="torch-ref", dtype="float64")


def resolved_of(flags: Mapping[str, object]) -> Resolved:
    """NOTE: it reads neither environment nor file, so all machines run the same options."""
    return resolve(Raw(command_line=flags), Facts(default_model=str(MODEL_DIR)))


def command_line(flags: Mapping[str, object]) -> list[str]:
    """Returns the options as command-line arguments."""
    words = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words
