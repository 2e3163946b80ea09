"""Accepts the drafts that equal the tokens which the target sampled.

The sampler draws a token for every node of every window, with the noise of that node's position.
From the root on, the child that holds the token sampled at its parent is accepted. As the noise
does not depend on the window, the emitted tokens are those of plain decoding: this is greedy
verification at temperature 0, and coupled verification above it.

All shapes follow from host values (the windows' sizes), so nothing here waits for the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.resolve import DeviceStep


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of the n sampled rows as tables [n, width]. The root has place 0."""

    firsts: Tensor  # int64 [n], index of the root among the logits rows
    starts: Tensor  # int64 [n], index of the root among the step's tokens
    is_real: Tensor  # bool [n, width], whether the place is part of the window, and may be accepted
    node_ids: Tensor  # int64 [n, width], the token of each node
    drawn: Tensor  # int64 [n, width], the token sampled at each node
    parents: Tensor | None  # int64 [n, width - 1] of a tree, in the order of DraftTree

    @property
    def width(self) -> int:
        return self.node_ids.shape[1]


def windows_of(
    step: DeviceStep, tokens: Tensor, parents: Tensor | None, is_open: Tensor | None = None
) -> Windows:
    """tokens int64 [logits], the sampled token of each logits row. is_open bool [logits]: whether
    the output may go on behind the node; None: it always may."""
    plan = step.plan.logits
    width = int(plan.windows.max(initial=1))
    logits_tokens, sizes = step.arrays.ints("logits_tokens"), step.arrays.ints("windows")
    firsts = sizes.cumsum(0) - sizes
    indices = torch.arange(width, device=tokens.device)
    index = (firsts[:, None] + indices).clamp_(max=max(len(tokens) - 1, 0))
    input_ids = step.batch.input_ids.index_select(0, logits_tokens)
    is_real = indices < sizes[:, None]
    if is_open is not None:
        is_real = is_real & is_open[index]
    return Windows(
        firsts=firsts,
        starts=logits_tokens.index_select(0, firsts),
        is_real=is_real,
        node_ids=input_ids[index],
        drawn=tokens[index],
        # A held row, which is not sampled here, may have more drafts than all of these.
        parents=None if parents is None else parents[:, : width - 1],
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted paths, with the fields of `Verified`."""

    paths: Tensor
    tokens: Tensor
    counts: Tensor

    @property
    def last(self) -> Tensor:
        return self.tokens.gather(1, self.counts[:, None] - 1)[:, 0]


def accept_chain(windows: Windows) -> Accepted:
    """A draft is accepted if it and all before it equal what was drawn in their places."""
    is_right = (windows.node_ids[:, 1:] == windows.drawn[:, :-1]) & windows.is_real[:, 1:]
    counts = 1 + is_right.to(torch.int64).cumprod(dim=1).sum(dim=1)
    indices = torch.arange(windows.width, device=counts.device)
    return Accepted(indices.expand(len(counts), -1), windows.drawn, counts)


def accept_tree(windows: Windows, max_depth: int) -> Accepted:
    """Walks from the root to the child that holds the drawn token, as long as there is one."""
    assert windows.parents is not None
    node = torch.zeros_like(windows.firsts)
    counts = torch.ones_like(node)
    is_on = torch.ones_like(node, dtype=torch.bool)
    paths, tokens = [node], [windows.drawn[:, 0]]
    for _ in range(min(max_depth, windows.width - 1)):
        is_child = (windows.parents == node[:, None]) & windows.is_real[:, 1:]
        is_next = is_child & (windows.node_ids[:, 1:] == tokens[-1][:, None])
        is_on = is_on & is_next.any(dim=1)
        node = torch.where(is_on, is_next.to(torch.int8).argmax(dim=1) + 1, node)
        counts = counts + is_on
        paths.append(node)
        tokens.append(windows.drawn.gather(1, node[:, None])[:, 0])
    return Accepted(torch.stack(paths, dim=1), torch.stack(tokens, dim=1), counts)


def path_results(sampled: Sampled, windows: Windows, accepted: Accepted, scored: Tensor) -> Sampled:
    """Returns the sampling result as its reader expects it: a node that was not accepted is valid
    even if no token could be drawn there, and in each window the logprobs of the accepted path come
    first. `scored` int64 [m] are the logits rows with logprobs.
    """
    depths = torch.arange(accepted.paths.shape[1], device=scored.device)
    is_used = depths < accepted.counts[:, None]
    firsts = windows.firsts[:, None]
    nodes = (firsts + torch.where(is_used, accepted.paths, 0)).flatten()
    is_path = torch.zeros_like(sampled.is_valid).index_fill_(0, nodes, True)
    sampled = dataclasses.replace(sampled, is_valid=sampled.is_valid | ~is_path)
    if windows.parents is None or not len(scored):
        return sampled
    order = torch.arange(len(sampled.tokens), device=scored.device)
    order.index_copy_(0, (firsts + torch.where(is_used, depths, 0)).flatten(), nodes)
    place = torch.zeros_like(order)
    place.index_copy_(0, scored, torch.arange(len(scored), device=scored.device))
    pick = place.index_select(0, order.index_select(0, scored))
    return dataclasses.replace(
        sampled,
        chosen=sampled.chosen.index_select(0, pick),
        top_ids=sampled.top_ids.index_select(0, pick),
        top_logprobs=sampled.top_logprobs.index_select(0, pick),
    )


Slots: TypeAlias = tuple[Tensor, ...]  # int64 [n], one per layer group


def compact(pools: KvPools, batch: ForwardBatch, starts: Tensor, accepted: Accepted) -> None:
    """Moves the KV and token ids of the accepted paths to the places right behind their roots."""
    pools.move(*path_moves(batch, starts, accepted.paths, accepted.counts))


def path_moves(
    batch: ForwardBatch, starts: Tensor, paths: Tensor, counts: Tensor
) -> tuple[Slots, Slots]:
    """Returns the slots from which, and to which, accepted paths are moved."""
    depths = torch.arange(paths.shape[1], device=starts.device)
    is_used = depths < counts[:, None]
    sources, targets = (
        (starts[:, None] + torch.where(is_used, indices, 0)).reshape(-1)
        for indices in (paths, depths.expand_as(paths))
    )
    return (
        tuple(slots.index_select(0, sources) for slots in batch.slots),
        tuple(slots.index_select(0, targets) for slots in batch.slots),
    )
