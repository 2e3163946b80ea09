"""The records of mixtures of experts that the compiled steps of the CPU read. The kernel is
aserve_kernels.cpu.expert_mlp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from aserve.gpu.device.cpu.kernel_linear import QuantLinear, TiledExperts, TiledLinear
from aserve.gpu.device.cpu.linear import LinearPerExpert
from aserve.gpu.device.cpu.ops import CompiledGate
from aserve.gpu.device.cpu.product_records import Values, filled, is_packed, packed_of, product_of
from aserve.gpu.layers.clamped import ClampedActivation
from aserve.gpu.layers.grouped_linear import GroupedLinearOp
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import Activation
from aserve.gpu.layers.plain_mlp import PlainMlp, relu2
from aserve.gpu.moe.dispatch import LocalDispatcher
from aserve.gpu.moe.layer import ExpertMlp, GatedExperts, SharedMlp
from aserve.gpu.moe.routing import ExpertGroups, Scores
from aserve_kernels.cpu.decoder_layers import NO_LIMIT, Records
from aserve_kernels.cpu.expert_mlp import LOGITS, MIXTURE, SIGMOID, SOFTMAX, mixture_sizes
from aserve_kernels.cpu.gated_mul import CLAMPED, KINDS, ONE, RELU2, Gate
from aserve_kernels.cpu.product import PRODUCT

SCORES: Mapping[Scores, int] = {
    Scores.SOFTMAX: SOFTMAX,
    Scores.SIGMOID: SIGMOID,
    Scores.LOGITS: LOGITS,
}
NO_GROUPS = ExpertGroups(0, 0, 0)
PerExpert: TypeAlias = LinearPerExpert | TiledExperts


def are_experts_covered(mlp: ExpertMlp) -> bool:
    """Whether the kernel can run the layer: this process has all experts, all products are packed,
    without adapters and sums over ranks, and the kernel knows the activation."""
    experts, shared = mlp.experts, mlp.shared
    if mlp.spec.num_identity or not isinstance(mlp.dispatcher, LocalDispatcher):
        return False
    if not isinstance(experts, GatedExperts) or (gate := _gate_of(experts.gated)) is None:
        return False
    if not isinstance(experts.gate_up, PerExpert) or not isinstance(experts.down, PerExpert):
        return False
    products = [mlp.router, *experts.gate_up.experts, *experts.down.experts]
    if shared is not None:
        if gate.kind == CLAMPED or isinstance(shared.mlp, PlainMlp) != (gate.kind == RELU2):
            return False  # its activation is that of the experts
        products += [*_inner_products(shared), *([] if shared.gate is None else [shared.gate])]
    return all(isinstance(p, TiledLinear | QuantLinear) and is_packed(p) for p in products)


def _gate_of(gated: Activation) -> Gate | None:
    """Returns None for what the kernel does not know."""
    if isinstance(gated, CompiledGate):
        return Gate(KINDS[gated.activation], ONE, NO_LIMIT)
    if isinstance(gated, ClampedActivation):
        return Gate(CLAMPED, np.float32(gated.alpha), np.float32(gated.limit))
    return Gate(RELU2, ONE, NO_LIMIT) if gated is relu2 else None


def _inner_products(shared: SharedMlp) -> tuple[LinearOp, LinearOp]:
    """Returns the layers into and out of the inner elements of the MLP of all tokens."""
    mlp = shared.mlp
    return (mlp.up if isinstance(mlp, PlainMlp) else mlp.gate_up), mlp.down


def expert_buffer_sizes(mlp: ExpertMlp) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype each token needs."""
    hidden, size, shared_size = _sizes_of(mlp)
    return mixture_sizes(mlp.spec.count, mlp.spec.routing.top_k, hidden, size, shared_size)


def mixture_of(mlp: ExpertMlp, dtype: torch.dtype) -> tuple[Records, ...]:
    """Returns the record of the layer, whose inputs have this dtype, and the arrays to which it
    points. The layer keeps the weights alive."""
    experts, shared, routing = mlp.experts, mlp.shared, mlp.spec.routing
    assert isinstance(experts, GatedExperts)
    gate = _gate_of(experts.gated)
    assert gate is not None
    hidden, size, shared_size = _sizes_of(mlp)
    gate_ups, downs = (_products_of(each, dtype) for each in (experts.gate_up, experts.down))
    bias = None if mlp.bias is None else mlp.bias.float().contiguous().numpy()
    inner, down = (None, None) if shared is None else _inner_products(shared)
    groups = routing.groups or NO_GROUPS
    values: Values = {
        "router": product_of(dtype, mlp.router),
        "shared_gate_up": product_of(dtype, inner),
        "shared_down": product_of(dtype, down),
        "shared_gate": product_of(dtype, None if shared is None else shared.gate),
        "gate_ups": gate_ups.ctypes.data,
        "downs": downs.ctypes.data,
        "bias": 0 if bias is None else bias.ctypes.data,
        "hidden": hidden,
        "count": mlp.spec.count,
        "size": size,
        "shared_size": shared_size,
        "activation": gate.kind,
        "gate_factor": float(gate.factor),
        "limit": float(gate.limit),
        "top_k": routing.top_k,
        "scores": SCORES[routing.scores],
        "is_normalised": routing.is_normalised,
        "groups": groups.count,
        "kept_groups": groups.num_kept,
        "summed_scores": groups.num_summed,
        "factor": routing.factor,
    }
    record = filled(np.zeros(1, MIXTURE), values)
    return (record, gate_ups, downs) if bias is None else (record, gate_ups, downs, bias)


def _sizes_of(mlp: ExpertMlp) -> tuple[int, int, int]:
    """Returns the hidden size, and the inner sizes of an expert and of the shared MLP."""
    experts, shared = mlp.experts, mlp.shared
    assert isinstance(experts, GatedExperts)
    assert isinstance(experts.down, PerExpert)
    down = packed_of(experts.down.experts[0])
    return down.num_out, down.num_in, 0 if shared is None else packed_of(shared.mlp.down).num_in


def _products_of(layer: GroupedLinearOp, dtype: torch.dtype) -> Records:
    assert isinstance(layer, PerExpert)
    return np.array([product_of(dtype, expert) for expert in layer.experts], PRODUCT)
