"""What a model's step costs at least on this machine: the bytes and operations of its weights.

It does not know what was measured, only what it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aserve.bench.limits import MachineLimits, measure_limits, read_limits
from aserve.bench.parameters import Parameters, count_parameters
from aserve.config import Resolved
from aserve.gpu.device.registry import open_device
from aserve.gpu.weights.form import WeightWish
from aserve.gpu.weights.hub import resolve_model_dir
from aserve.gpu.weights.load import read_blueprint


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a step has to read and compute at least, and what the machine can do at most."""

    parameters: Parameters
    weight_bits: int
    limits: MachineLimits

    def __str__(self) -> str:
        return (
            f"limits: a step reads {self._step_gb:,.3f} GB of weights ({self.weight_bits} bits); "
            f"the machine {self.limits.read_gb_per_s:,.1f} GB/s, "
            f"{self.limits.matmul_gflops:,.0f} GFLOP/s"
        )

    @property
    def _step_gb(self) -> float:
        return (self.parameters.body + self.parameters.head) * self.weight_bits / 8e9

    def read_share(self, step_s: float) -> float:
        """Of the memory's bandwidth, for one step that reads every weight once."""
        return self._step_gb / step_s / self.limits.read_gb_per_s

    def matmul_share(self, num_tokens: int, prefill_s: float, *, num_rows: int) -> float:
        """Of the matrix rate; attention is not counted, the head once per row."""
        products = self.parameters.body * num_tokens + self.parameters.head * num_rows
        return 2e-9 * products / prefill_s / self.limits.matmul_gflops


def make_yardstick(resolved: Resolved, *, limits_file: str | None) -> Yardstick:
    """Without a file the machine is measured."""
    is_dummy = resolved.model.load_format == "dummy"
    model_dir = resolve_model_dir(resolved.model_source, has_weights=not is_dummy)
    limits = read_limits(Path(limits_file)) if limits_file else measure_limits()
    blueprint, _ = read_blueprint(model_dir, resolved.model.model_impl)
    wish = WeightWish(
        resolved.model.dtype,
        blueprint.stored_dtype,
        blueprint.num_weights,
        resolved.model.quantization,
    )
    weight_bits = open_device("cpu").weight_form(wish).weight_bits
    return Yardstick(count_parameters(model_dir), weight_bits, limits)
