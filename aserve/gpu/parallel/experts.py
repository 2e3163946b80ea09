"""Expert-parallel ranks: which experts a rank has, and by which dispatcher rows get there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from aserve.errors import ConfigError
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.models.base import CausalModel
from aserve.gpu.moe.deepep import LowLatencyDispatcher, NormalDispatcher
from aserve.gpu.moe.dispatch import Dispatcher
from aserve.gpu.moe.layer import ExpertMlp, GatedExperts
from aserve.gpu.moe.two_batches import expert_layers, experts_of
from aserve.gpu.parallel.balancer import BalancedDispatcher, ExpertMoves
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.parallel.deepep_kernels import DeepEpKernels, ExpertLayout, deepep_kernels
from aserve.gpu.parallel.device_collectives import DeviceCollectives, DeviceGroup
from aserve.gpu.parallel.exchange import GroupExchange, all_to_all_of
from aserve.gpu.parallel.replicated_tokens import SlicedDispatcher, SummedDispatcher
from aserve.gpu.parallel.source import PlacedExperts
from aserve.gpu.parallel.stages import StagedDecoder
from aserve.gpu.weights.source import ExpertPart
from aserve.parallel.topology import Coordinates

# Of --all2all-backend, those in which rows travel.
HIGH_THROUGHPUT, LOW_LATENCY = EXCHANGING = ("deepep_high_throughput", "deepep_low_latency")
# Tokens of a rank in the largest forward of the low-latency mode, as in DeepEP's examples.
MAX_LOW_LATENCY_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks among which the experts are divided."""

    ranks: Collectives
    dense: Collectives  # among which the other layers are divided
    part: ExpertPart
    backend: str
    interval: int | None  # forwards between two placements of the experts; None: they stay
    group: DeviceGroup | None  # where rows travel
    # of the layers, in order
    balanced_dispatchers: list[BalancedDispatcher] = field(default_factory=list)
    kernels: list[DeepEpKernels] = field(default_factory=list)  # at most one, of all layers

    def graph_tokens(self, most: int) -> int:
        """Returns the tokens of the largest of forwards up to `most` that may be captured: with
        rows that travel, those of the low-latency mode."""
        if self.backend not in EXCHANGING:
            return most
        is_fixed = self.backend == LOW_LATENCY
        return min(most, MAX_LOW_LATENCY_TOKENS * self.ranks.num_ranks if is_fixed else 0)

    def place_experts(self, model: CausalModel) -> Sequence[BalancedDispatcher]:
        """Connects the experts of a model that was built for `part`, and returns the dispatchers
        that move them. Raises ConfigError for a model of which no expert, or not all experts, can
        be placed."""
        every = layers = expert_layers(model)
        if isinstance(model, StagedDecoder):
            every, layers = expert_layers(model.decoder), experts_of(model.blocks)
        if not every or not all(len(_placed(mlp)) == 2 for mlp in layers):
            raise ConfigError(
                "--expert-parallel-size is for models with experts that have native code, and a "
                "tensor for each expert in the checkpoint; leave it out",
                param="expert_parallel_size",
            )
        self._find_kernels(model, layers)
        for mlp in layers:
            mlp.dispatcher = self._dispatcher(mlp)
            if isinstance(mlp.dispatcher, BalancedDispatcher):
                self.balanced_dispatchers.append(mlp.dispatcher)
        return self.balanced_dispatchers

    def before_replay(self) -> None:
        """A graph of a forward is about to be replayed."""
        self._prepare_kernels()
        for dispatcher in self.balanced_dispatchers:
            dispatcher.count_replay()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within it, forwards are captured, and move no experts."""
        self._prepare_kernels()
        for dispatcher in self.balanced_dispatchers:
            dispatcher.counts_forwards = False
        try:
            yield
        finally:
            for dispatcher in self.balanced_dispatchers:
                dispatcher.counts_forwards = True

    def _prepare_kernels(self) -> None:
        for kernels in self.kernels:
            kernels.prepare_low_latency()

    def _find_kernels(self, model: CausalModel, layers: Sequence[ExpertMlp]) -> None:
        """All layers of a model have as many experts, so one buffer serves them."""
        ranks = self.ranks
        if self.backend not in EXCHANGING or not isinstance(ranks, DeviceCollectives):
            return
        layout = ExpertLayout(
            self.part.num_slots(layers[0].num_experts),
            model.hidden_size,
            model.dtype,
            MAX_LOW_LATENCY_TOKENS if self.backend == LOW_LATENCY else 0,
        )
        kernels = deepep_kernels(ranks, layout, _placed(layers[0])[0].device)
        if kernels is not None:
            self.kernels.append(kernels)

    def _dispatcher(self, mlp: ExpertMlp) -> Dispatcher:
        num_slots = self.part.num_slots(mlp.num_experts)
        inner = self._dispatcher_of_slots(num_slots)
        if self.interval is None or self.group is None:
            return inner
        placed = _placed(mlp)
        return BalancedDispatcher(
            inner,
            [slot % mlp.num_experts for slot in range(num_slots)],
            num_experts=mlp.num_experts,
            interval=self.interval,
            moves=ExpertMoves(self._exchange(self.group, has_fixed_shapes=False), placed),
            device=placed[0].device,
        )

    def _exchange(self, group: DeviceGroup, *, has_fixed_shapes: bool) -> GroupExchange:
        return GroupExchange(group, self.ranks, has_fixed_shapes)

    def _dispatcher_of_slots(self, num_slots: int) -> Dispatcher:
        if self.group is None or self.backend not in EXCHANGING:
            return SummedDispatcher(num_slots, self.ranks)
        if self.kernels:
            [kernels] = self.kernels
            return SlicedDispatcher(kernels.dispatcher, self.ranks)
        rows = self._exchange(self.group, has_fixed_shapes=True)
        normal = NormalDispatcher(num_slots, self._exchange(self.group, has_fixed_shapes=False))
        most = MAX_LOW_LATENCY_TOKENS if self.backend == LOW_LATENCY else 0

        def make(num_tokens: int) -> Dispatcher:
            if num_tokens > most:
                return normal
            return LowLatencyDispatcher(num_slots, rows, max_tokens=num_tokens)

        return SlicedDispatcher(make, self.ranks)


def graph_rows(experts: ExpertRanks | None, mode: DecodeMode, max_rows: int) -> int:
    """Returns the rows of the largest step that may be captured."""
    if experts is None:
        return max_rows
    width = max(1, *mode.graph_widths, mode.caps.max_predicted + 1)
    return experts.graph_tokens(max_rows * width) // width


def expert_ranks(
    place: Coordinates,
    ranks: Collectives,
    part: ExpertPart,
    *,
    backend: str,
    is_divided: bool,
    interval: int | None = None,
) -> ExpertRanks:
    """Meets the other ranks where rows or experts travel. `is_divided`: the other layers are
    divided too."""
    travels = backend in EXCHANGING or interval is not None
    group = all_to_all_of(place, ranks) if travels else None
    dense = ranks if is_divided else ALONE
    part = replace(part, are_moved=interval is not None)
    return ExpertRanks(ranks, dense, part, backend, interval, group)


def _placed(mlp: ExpertMlp) -> tuple[PlacedExperts, ...]:
    """Returns the layers of this rank's experts; none if they were not built for it."""
    experts = mlp.experts
    layers = (experts.gate_up, experts.down) if isinstance(experts, GatedExperts) else ()
    return tuple(layer for layer in layers if isinstance(layer, PlacedExperts))
