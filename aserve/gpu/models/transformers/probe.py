"""Whether a model in transformers' code can run here, and what its attention layers are like.

It knows no architecture: the model runs on a few tokens, and what it does decides. It fits if each
layer attends once, to keys and values of its own, by a rule that paged attention has, and if apart
from that a token depends on its id and its position alone, not on what stands beside it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.models.transformers.attention import PAGED, PROBED, UnmadeMask, run
from aserve.gpu.models.transformers.halves import Halves, body_of, split

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS = 8
NUM_MASK_ROWS = 16
OBEYED = frozenset({"scaling", "softcap"})
# What the mask says, what q and k hold, and what has no meaning outside of training.
REDUNDANT = frozenset({"sliding_window", "is_causal", "position_ids", "dropout"})


class NotSupported(Exception):
    """Why a model cannot run here: the rest of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Probed:
    """`specs`: by attention module, in the order of the layers. `blocks`: the layers themselves."""

    halves: Halves
    specs: Mapping[nn.Module, LayerSpec]
    blocks: tuple[nn.Module, ...]
    hidden_size: int
    vocab_size: int


@torch.no_grad()
def probe(model: PreTrainedModel, *, max_model_len: int) -> Probed:
    """Takes `model` apart. Raises NotSupported; any error of its own code is a reason, too."""
    body = body_of(model)
    if body is None:
        raise NotSupported("has no part of its own that makes the hidden states")
    positions = torch.arange(min(NUM_TOKENS, max_model_len), device=model.device)
    ids = (positions * 37 + 11) % model.config.get_text_config().vocab_size
    recorder = _Recorder()
    model.set_attn_implementation(PROBED)
    answer = run(body, ids, positions, recorder)
    hidden = answer.last_hidden_state[0]
    specs = _specs(recorder.calls, max_model_len=max_model_len)
    model.set_attn_implementation(PAGED)
    _check_order(body, ids, positions, hidden=hidden, max_model_len=max_model_len)
    logits = run(model, ids, positions, _alone).logits[0]
    halves = split(model, body, type(answer))
    if not _is_close(halves.logits(hidden), logits):
        raise NotSupported("makes its logits of more than the last hidden states")
    return Probed(halves, specs, _blocks(body, specs), hidden.shape[1], logits.shape[1])


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    q: Tensor
    k: Tensor
    mask: object
    arguments: Mapping[str, object]


class _Recorder:
    """Notes each layer's call, and keeps each token to itself."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: object,
        arguments: Mapping[str, object],
    ) -> Tensor:
        if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            shapes = ", ".join(str(tuple(states.shape[1:])) for states in (q, k, v))
            raise NotSupported(f"has queries, keys and values of shapes that don't fit: {shapes}")
        self.calls.append(_Call(module, q, k, mask, arguments))
        return _alone(module, q, k, v)


def _alone(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """In attention's place: depends on all that a token brings, and on no other token."""
    repeats = q.shape[1] // k.shape[1]
    own = (normalize(k, dim=-1) + v).repeat_interleave(repeats, dim=1)
    return normalize(q, dim=-1) + own


def _specs(calls: list[_Call], *, max_model_len: int) -> dict[nn.Module, LayerSpec]:
    if not calls:
        raise NotSupported("never calls the attention function")
    ((module, times),) = Counter(call.module for call in calls).most_common(1)
    if times > 1:
        raise NotSupported(f"calls attention {times} times in one {type(module).__name__}")
    # PERF: layers share few masks, and a long context's takes milliseconds to ask.
    window_of = functools.cache(functools.partial(_window, max_model_len=max_model_len))
    return {
        call.module: _spec(call, index, window=window_of(_rule_of(call.mask)))
        for index, call in enumerate(calls)
    }


def _rule_of(mask: object) -> UnmadeMask:
    if isinstance(mask, UnmadeMask):
        return mask
    made = "no mask" if mask is None else f"a mask of its own making ({type(mask).__name__})"
    raise NotSupported(f"gives attention {made}")


def _spec(call: _Call, index: int, *, window: int | None) -> LayerSpec:
    """Paged attention obeys what is in the spec; every other argument would be lost."""
    for name, value in call.arguments.items():
        if name not in OBEYED | REDUNDANT and value is not None and value is not False:
            raise NotSupported(f"gives attention {name}, which paged attention doesn't know")
    head_dim = call.q.shape[2]
    scale, softcap = (call.arguments.get(name) for name in ("scaling", "softcap"))
    return LayerSpec(
        index=index,
        num_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else _number("scaling", scale),
        window=window,
        softcap=None if softcap is None else _number("softcap", softcap),
    )


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise NotSupported(f"has a {name} of attention that is no number: {type(value).__name__}")
    return float(value)


def _window(mask: UnmadeMask, *, max_model_len: int) -> int | None:
    """How many positions a query sees back, itself included; None is all of them.

    The rule of the mask is asked itself, for positions up to the last.
    """
    last = torch.tensor([max_model_len - 1])
    window = int(mask.rows(last, num_keys=max_model_len).sum())
    rows = torch.linspace(0, max_model_len - 1, NUM_MASK_ROWS).long()
    distance = rows[:, None] - torch.arange(max_model_len)
    expected = (distance >= 0) & (distance < window)
    if not torch.equal(mask.rows(rows, num_keys=max_model_len), expected):
        raise NotSupported("masks neither causally nor by a sliding window")
    return window if window < max_model_len else None


def _check_order(
    body: PreTrainedModel, ids: Tensor, positions: Tensor, *, hidden: Tensor, max_model_len: int
) -> None:
    """The same tokens in reverse, one of them replaced, must have the same hidden states."""
    other_ids, other_positions = ids.flip(0), positions.flip(0)
    other_ids[-1:] = ids[-1:]
    other_positions[-1] = max_model_len - 1
    other = run(body, other_ids, other_positions, _alone).last_hidden_state[0].flip(0)
    if not _is_close(other[1:], hidden[1:]):
        raise NotSupported(
            "mixes tokens outside of attention (by recurrence or convolution), or takes their "
            "positions from their order"
        )


def _is_close(states: Tensor, expected: Tensor) -> bool:
    """[n, width]. Products of another shape (a mixture's) round differently."""
    limit = expected.norm(dim=-1) * torch.finfo(states.dtype).eps ** 0.5
    return bool(((states - expected).norm(dim=-1) <= limit).all())


def _blocks(body: nn.Module, attentions: Mapping[nn.Module, LayerSpec]) -> tuple[nn.Module, ...]:
    """The list that has one attention module in each of its members, in the same order."""
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            pairs = zip(module, attentions, strict=True)
            if all(attention in [*block.modules()] for block, attention in pairs):
                return tuple(module)
    raise NotSupported("doesn't attend once in each of its layers")
