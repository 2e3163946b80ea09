"""Expert-parallel ranks: which experts a rank has, and by which dispatcher rows get there."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.gpu.models.base import CausalModel
from aserve.gpu.moe.deepep import LowLatencyDispatcher, NormalDispatcher
from aserve.gpu.moe.dispatch import Dispatcher
from aserve.gpu.moe.layer import ExpertMlp, GatedExperts
from aserve.gpu.moe.two_batches import expert_layers
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.exchange import AllToAll, GroupExchange, all_to_all_of
from aserve.gpu.parallel.replicated_tokens import SlicedDispatcher, SummedDispatcher
from aserve.gpu.parallel.source import PlacedExperts
from aserve.gpu.weights.source import ExpertPart
from aserve.parallel.topology import Coordinates

# Of --all2all-backend, those in which rows travel.
HIGH_THROUGHPUT, LOW_LATENCY = EXCHANGING = ("deepep_high_throughput", "deepep_low_latency")
# Tokens of a rank in the largest forward of the low-latency mode, as in DeepEP's examples.
MAX_LOW_LATENCY_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks among which the experts are divided."""

    place: Coordinates
    ranks: Collectives
    dense: Collectives  # among which the other layers are divided
    part: ExpertPart
    backend: str
    group: AllToAll | None  # where rows travel

    def place_experts(self, model: CausalModel) -> None:
        """Connects the experts of a model that was built for `part`. Raises ConfigError for a
        model of which no expert, or not all experts, can be placed."""
        layers = expert_layers(model)
        if not layers or not all(_is_placed(mlp) for mlp in layers):
            raise ConfigError(
                "--expert-parallel-size is for models with experts that have native code, and a "
                "tensor for each expert in the checkpoint; leave it out",
                param="expert_parallel_size",
            )
        for mlp in layers:
            mlp.dispatcher = self._dispatcher(self.part.num_slots(mlp.num_experts))

    def _dispatcher(self, num_slots: int) -> Dispatcher:
        if self.group is None:
            return SummedDispatcher(num_slots, self.ranks)
        rows = GroupExchange(self.group, self.place, has_fixed_shapes=True)
        normal = NormalDispatcher(
            num_slots, GroupExchange(self.group, self.place, has_fixed_shapes=False)
        )
        most = MAX_LOW_LATENCY_TOKENS if self.backend == LOW_LATENCY else 0

        def make(num_tokens: int) -> Dispatcher:
            if num_tokens > most:
                return normal
            return LowLatencyDispatcher(num_slots, rows, max_tokens=num_tokens)

        return SlicedDispatcher(make, self.ranks)


def expert_ranks(
    place: Coordinates, ranks: Collectives, part: ExpertPart, *, backend: str, is_divided: bool
) -> ExpertRanks:
    """Meets the other ranks where rows travel. `is_divided`: the other layers are divided too."""
    group = all_to_all_of(place) if backend in EXCHANGING else None
    return ExpertRanks(place, ranks, ranks if is_divided else ALONE, part, backend, group)


def _is_placed(mlp: ExpertMlp) -> bool:
    experts = mlp.experts
    return isinstance(experts, GatedExperts) and all(
        isinstance(op, PlacedExperts) for op in (experts.gate_up, experts.down)
    )
