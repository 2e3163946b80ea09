"""The mixture of experts, an MLP of which each token uses a few parts.

    y = sum over the chosen experts e of w_e * mlp_e(x)  [+ g * shared(x)]  [+ w_identity * x]

with the weights w of `routing.py`, MLPs mlp_e of the size `ExpertsSpec.size`, gated or plain, and
optionally an MLP that all tokens share, with or without a gate g = sigmoid(x w_g). Identity experts
return what they are given, and their weights add up to w_identity: they travel nowhere. A layer
runs in three stages, between which rows travel: `start` routes and sends, `compute` is the experts'
own work, and `finish` receives the sums.

Source: https://arxiv.org/abs/1701.06538; shared experts: https://arxiv.org/abs/2401.06066;
identity experts: https://arxiv.org/abs/2509.01322
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import GroupedLinearOp, Groups
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import Activation, GatedMlp
from aserve.gpu.layers.plain_mlp import PLAIN_ACTIVATIONS, PlainMlp
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.moe.dispatch import Combining, Dispatcher, LocalDispatcher, Sent
from aserve.gpu.moe.routing import Routing, route, without_identity
from aserve.gpu.weights.source import WeightSource

SharedOp: TypeAlias = GatedMlp | PlainMlp


class ExpertNames(msgspec.Struct, frozen=True):
    """The checkpoint's names below a layer's own."""

    mlp: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    bias: str = "gate.e_score_correction_bias"


class ExpertsSpec(msgspec.Struct, frozen=True):
    """The mixture of one layer; as a `MakeMlp`, it builds that layer."""

    count: int  # without identity experts, whose numbers follow
    size: int  # inner size of each expert
    routing: Routing
    shared_size: int = 0  # inner size of the shared MLP; 0: none
    has_shared_gate: bool = False
    has_joined_shared: bool = False  # the checkpoint stores the shared MLP's gate_up_proj
    has_score_bias: bool = False
    has_bias_row: bool = False  # the checkpoint stores that bias as a matrix of one row
    num_identity: int = 0
    plain_activation: str | None = None  # of MLPs without gates; None: they have gates
    names: ExpertNames = ExpertNames()

    def __call__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> ExpertMlp:
        names, hidden = self.names, spec.config.hidden_size
        prefix = f"model.layers.{index}.{names.mlp}"
        gated = weights.elementwise.gated(spec.config.activation)
        if self.plain_activation is not None:
            gated = PLAIN_ACTIVATIONS[self.plain_activation]
        router = {f"{prefix}.{names.router}": self.num_choices}
        return ExpertMlp(
            self,
            router=weights.linear(router, in_features=hidden, bias=False),
            bias=self._score_bias(f"{prefix}.{names.bias}", weights),
            experts=self._experts(f"{prefix}.experts", weights, hidden, gated),
            shared=self._shared(prefix, weights, hidden, gated),
        )

    @property
    def num_choices(self) -> int:
        return self.count + self.num_identity

    def _score_bias(self, name: str, weights: WeightSource) -> Tensor | None:
        if not self.has_score_bias:
            return None
        shape = (1, self.num_choices) if self.has_bias_row else (self.num_choices,)
        return weights.tensor(name, shape, is_wide=True).view(-1)

    def _experts(
        self, name: str, weights: WeightSource, hidden: int, gated: Activation
    ) -> GatedExperts:
        names, count = self.names, self.count
        parts = dict.fromkeys(self._inner_names, self.size)
        gate_up = weights.stacked(name, parts, count=count, in_features=hidden)
        down = weights.stacked(name, {names.down: hidden}, count=count, in_features=self.size)
        return GatedExperts(weights.grouped(gate_up), weights.grouped(down), gated)

    @property
    def _inner_names(self) -> tuple[str, ...]:
        """Returns the names of the layers into the inner elements of an MLP."""
        names = self.names
        return (names.gate, names.up) if self.plain_activation is None else (names.up,)

    def _shared(
        self, prefix: str, weights: WeightSource, hidden: int, gated: Activation
    ) -> SharedMlp | None:
        if not self.shared_size:
            return None
        names, gate = self.names, None
        below = f"{prefix}.{names.shared}"
        parts = {f"{below}.{name}": self.shared_size for name in self._inner_names}
        if self.has_joined_shared:
            parts = {f"{below}.gate_up_proj": 2 * self.shared_size}
        gate_up = weights.linear(parts, in_features=hidden, bias=False)
        down = {f"{below}.{names.down}": hidden}
        out = weights.linear(down, in_features=self.shared_size, bias=False)
        mlp: SharedOp = GatedMlp(gate_up, out, gated)
        if self.plain_activation is not None:
            mlp = PlainMlp(gate_up, out, self.plain_activation)
        if self.has_shared_gate:
            name = {f"{prefix}.{names.shared_gate}": 1}
            gate = weights.linear(name, in_features=hidden, bias=False)
        return SharedMlp(mlp, gate)


class GatedExperts:
    """The MLPs of a rank's experts. Of MLPs without gates `gate_up` is up alone, and `gated` their
    activation."""

    __slots__ = ("down", "gate_up", "gated")

    def __init__(self, gate_up: GroupedLinearOp, down: GroupedLinearOp, gated: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gated = gated

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]. Rows outside of the groups are undefined."""
        return self.down(self.gated(self.gate_up(x, groups)), groups)


class SharedMlp:
    """The MLP of all tokens beside the experts."""

    __slots__ = ("gate", "mlp")

    def __init__(self, mlp: SharedOp, gate: LinearOp | None) -> None:
        self.mlp = mlp
        self.gate = gate

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        y = self.mlp(x)
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y


class Started(NamedTuple):
    """A layer between `start` and `compute`."""

    sent: Sent
    beside: Tensor | None  # the result of the shared MLP, or of identity experts


class Computed(NamedTuple):
    """A layer between `compute` and `finish`."""

    combining: Combining
    beside: Tensor | None


class ExpertMlp:
    """A `Mlp`. Its three stages may be called one by one, with other work between them. Where this
    device has some of the experts alone, `dispatcher` is replaced before the first call."""

    __slots__ = ("bias", "dispatcher", "experts", "router", "shared", "spec")

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        router: LinearOp,
        bias: Tensor | None,
        experts: Callable[[Tensor, Groups], Tensor],
        shared: SharedMlp | None,
    ) -> None:
        self.spec = spec
        self.bias = bias  # [experts], added to the scores for the choice
        self.dispatcher: Dispatcher = LocalDispatcher(spec.count)
        self.router = router
        self.experts = experts
        self.shared = shared

    @property
    def num_experts(self) -> int:
        """The experts of all ranks."""
        return self.spec.count

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.finish(self.compute(self.start(x)))

    def start(self, x: Tensor) -> Started:
        """x [tokens, hidden]. The shared MLP runs while rows travel."""
        routed = route(self.router(x), self.bias, self.spec.routing)
        beside = None
        if self.spec.num_identity:
            routed, weights = without_identity(routed, self.spec.count)
            beside = (x * weights).to(x.dtype)
        sent = self.dispatcher.start(x, routed)
        if self.shared is not None:
            beside = self.shared(x) if beside is None else beside + self.shared(x)
        return Started(sent, beside)

    def compute(self, started: Started) -> Computed:
        arrived = started.sent.finish()
        y = self.experts(arrived.x, arrived.groups)
        if self.spec.num_identity:  # rows without an expert come last, and are undefined
            rows = torch.arange(len(y), device=y.device)
            y = y.masked_fill((rows >= arrived.groups.ends[-1])[:, None], 0.0)
        return Computed(arrived.combine(y), started.beside)

    def finish(self, computed: Computed) -> Tensor:
        y = computed.combining.finish()
        return y if computed.beside is None else y + computed.beside
