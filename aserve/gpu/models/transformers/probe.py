"""Checks whether a model in transformers' code can run on paged KV, and reads the `LayerSpec` of
each of its attention layers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.models.transformers.attention import PAGED, PROBED, UnmadeMask, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Theory of operation.
#
# No list of architectures is kept. Instead the model runs on eight tokens, and its behaviour
# decides. It can run here if
#   1. each layer calls attention once, with keys and values of its own,
#   2. the arguments of these calls are ones that paged attention implements (scale, softcap),
#   3. the mask is causal or a sliding window,
#   4. apart from attention, a token depends on its id and its position alone,
#   5. the logits follow from the last hidden states alone.
#
# The first run records the calls of attention (1, 2). Transformers is given a name under which it
# passes the rule of the mask instead of a mask tensor; asking the rule at sample positions shows
# whether it is causal with some window (3). In place of attention each layer gets `_alone`, a
# function of the token's own q, k and v. So a second run with the same tokens in another order, and
# with one token exchanged, must give the other tokens the same hidden states (4): recurrent,
# convolutional and order-dependent layers fail here. Finally the model is split: its body makes
# hidden states, and the rest makes logits. The logits of the split model for the recorded hidden
# states must be those of the whole (5). The rest is the whole model with a module in the body's
# place that returns given hidden states, so that it scales, caps and projects as it always does.

NUM_TOKENS = 8
NUM_MASK_ROWS = 16
IMPLEMENTED = frozenset({"scaling", "softcap"})
# Arguments that repeat what the mask, q and k contain, or that matter in training alone.
REDUNDANT = frozenset({"sliding_window", "is_causal", "position_ids", "dropout"})


class NotSupported(Exception):
    """The reason why a model cannot run here, as the rest of a sentence that begins with "it"."""


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A causal model in two parts: `body` makes hidden states, `head` makes logits of them."""

    body: PreTrainedModel
    head: PreTrainedModel

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        answer = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: Tensor = answer.logits[0]
        return logits


@dataclass(frozen=True, slots=True)
class Probed:
    """A model that has passed the probe, split into body and head."""

    split: SplitModel
    specs: Mapping[nn.Module, LayerSpec]  # by attention module, in the order of the layers
    blocks: tuple[nn.Module, ...]  # the decoder layers
    hidden_size: int
    vocab_size: int


@torch.no_grad()
def probe(model: PreTrainedModel, *, max_model_len: int) -> Probed:
    """Splits `model`, which must not be used afterwards. Raises NotSupported; other exceptions come
    from the model's own code, and the caller treats them as refusals as well."""
    body = _body_of(model)
    if body is None:
        raise NotSupported("has no submodule that makes the hidden states")
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
    split = _split(model, body, type(answer))
    if not _is_close(split.logits(hidden), logits):
        raise NotSupported("makes its logits from more than the last hidden states")
    return Probed(split, specs, _blocks(body, specs), hidden.shape[1], logits.shape[1])


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    q: Tensor
    k: Tensor
    mask: object
    arguments: Mapping[str, object]


class _Recorder:
    """Records each layer's call of attention, and returns `_alone` in its place."""

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
    """Replaces attention by a function of all of a token's own q, k and v, and of no other
    token."""
    repeats = q.shape[1] // k.shape[1]
    own = (normalize(k, dim=-1) + v).repeat_interleave(repeats, dim=1)
    return normalize(q, dim=-1) + own


def _specs(calls: list[_Call], *, max_model_len: int) -> dict[nn.Module, LayerSpec]:
    if not calls:
        raise NotSupported("never calls the attention function")
    ((module, times),) = Counter(call.module for call in calls).most_common(1)
    if times > 1:
        raise NotSupported(f"calls attention {times} times in one {type(module).__name__}")
    # PERF: layers share few masks, and asking the rule of one takes milliseconds at long contexts.
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
    """Refuses arguments that paged attention does not implement, because they would be ignored."""
    for name, value in call.arguments.items():
        if name not in IMPLEMENTED | REDUNDANT and value is not None and value is not False:
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
    """Returns the window of a mask: how many positions a query sees, itself included; None: all.

    The mask's rule is evaluated at sample positions up to the last one.
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
    """Checks that the same tokens in reverse order, with one of them replaced, have the same hidden
    states."""
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
    """Compares rows [n, width] up to the square root of the dtype's precision, because products of
    other shapes (in a mixture of experts) round differently."""
    limit = expected.norm(dim=-1) * torch.finfo(states.dtype).eps ** 0.5
    return bool(((states - expected).norm(dim=-1) <= limit).all())


def _blocks(body: nn.Module, attentions: Mapping[nn.Module, LayerSpec]) -> tuple[nn.Module, ...]:
    """The decoder layers: the module list whose members have one attention module each, in
    order."""
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            pairs = zip(module, attentions, strict=True)
            if all(attention in [*block.modules()] for block, attention in pairs):
                return tuple(module)
    raise NotSupported("doesn't attend once in each of its layers")


def _body_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The submodule that makes the hidden states; None where there is none."""
    from transformers import PreTrainedModel

    for body in (model.get_decoder(), model.base_model):
        # WHY: two candidates, because some families call their last layer the decoder.
        if isinstance(body, PreTrainedModel) and body is not model:
            return body
    return None


def _split(
    model: PreTrainedModel, body: PreTrainedModel, answer: Callable[..., object]
) -> SplitModel:
    """Splits `model`, which makes no hidden states any more. `answer` is the class of the body's
    output."""
    path = next(name for name, module in model.named_modules() if module is body)
    model.set_submodule(path, _GivenHidden(answer))
    return SplitModel(body, model)


class _GivenHidden(nn.Module):
    """Takes the body's place and returns the hidden states that it is given."""

    def __init__(self, answer: Callable[..., object]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> object:
        return self._answer(last_hidden_state=inputs_embeds)
