"""The roofline of a model on this machine: the least bytes and operations of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from aserve.bench.limits import MachineLimits, measure_limits, read_limits
from aserve.config import Resolved
from aserve.gpu.device.registry import open_device
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.source import LinearBits
from aserve.host.hub import resolve_model_dir


@dataclass(frozen=True, slots=True)
class Roofline:
    """Compares a measured step with the machine's bandwidth and matrix rate."""

    parameters: Parameters
    step_bytes: float  # of the weights that a step reads
    limits: MachineLimits

    def __str__(self) -> str:
        return (
            f"limits: a step reads {self._step_gb:,.3f} GB of weights ({self._weight_bits:.3g} "
            "bits each); "
            f"the machine {self.limits.read_gb_per_s:,.1f} GB/s, "
            f"{self.limits.matmul_gflops:,.0f} GFLOP/s"
        )

    @property
    def _step_gb(self) -> float:
        return self.step_bytes / 1e9

    @property
    def _weight_bits(self) -> float:
        return 8 * self.step_bytes / (self.parameters.body + self.parameters.head)

    def read_share(self, step_s: float) -> float:
        """Returns the share of the memory bandwidth that a decode step uses. It reads every weight
        once.
        """
        return self._step_gb / step_s / self.limits.read_gb_per_s

    def matmul_share(self, num_tokens: int, prefill_s: float, *, num_rows: int) -> float:
        """Returns the share of the matrix rate that a prefill uses. Attention is not counted, and
        the head counts once per row.
        """
        products = self.parameters.body * num_tokens + self.parameters.head * num_rows
        return 2e-9 * products / prefill_s / self.limits.matmul_gflops


def make_roofline(resolved: Resolved, *, limits_file: str | None) -> Roofline:
    """Reads the limits from a file, or measures them."""
    is_dummy = resolved.model.load_format == "dummy"
    model_dir = resolve_model_dir(resolved.model_source, has_weights=not is_dummy)
    limits = read_limits(Path(limits_file)) if limits_file else measure_limits()
    loader, _ = make_loader(model_dir, resolved.model.model_impl)
    request = WeightRequest(
        resolved.model.dtype,
        loader.stored_dtype,
        loader.num_weights,
        resolved.model.quantization,
        loader.stored_quantization,
    )
    form = open_device("cpu").weight_format(request)
    parameters = count_parameters(model_dir)
    if isinstance(loader, NativeLoader):
        bits = LinearBits(form.stored_bits, form.factor_bits)
        size_bytes: float = loader.step_bytes(form.dtype, bits, is_dummy=is_dummy)
    else:
        size_bytes = (parameters.body + parameters.head) * form.weight_bits / 8
    return Roofline(parameters, size_bytes, limits)


class Parameters(msgspec.Struct, frozen=True):
    """The numbers of parameters. `head` is the LM head, which a prompt needs only at its last
    position. Neither includes the input embeddings, because a step reads only one row per token.
    """

    body: int
    head: int


def count_parameters(model_dir: Path) -> Parameters:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    total = sum(parameter.numel() for parameter in model.parameters())
    return Parameters(
        body=total - sum(table.numel() for table in tables),
        head=model.get_output_embeddings().weight.numel(),
    )
