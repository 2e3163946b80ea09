"""The modules of multi-token prediction: the names of their weights, and what they compute.

    x      = W [norm_e(emb(t_{i+k})) ; norm_h(h^{k-1}_i)]    or with the hidden state first
    h^k_i  = layer_k(x)                                      a decoder layer with norms before
    logits = the target's head(norm_k(h^k_i))

Checkpoints differ in names and in the order of the two inputs of W:

    DeepSeek     model.layers.{n + k}.   enorm, hnorm, eh_proj, shared_head.norm
    MiMo         model.mtp_layers.{k}.   token_layernorm, hidden_layernorm, input_proj,
                                         final_layernorm; the hidden state comes first
    Qwen3-Next   mtp.                    pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm

The copies of the embeddings and the head that DeepSeek's modules have are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.norm import Norm
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Block, Decoder
from aserve.gpu.models.decoder_spec import NORMS_BEFORE, Biases, DecoderSpec, LayerNorms, QkNorm
from aserve.gpu.spec.base import HiddenWants
from aserve.gpu.spec.checkpoint import DRAFT_PATH, DraftWeights, target_embeddings
from aserve.gpu.spec.recurrent_model import draft_rotary

COPIES = ("embed_tokens", "shared_head.head")
UNSUPPORTED = re.compile(r"\.(experts|shared_experts|kv_a_proj_with_mqa|linear_attn|mlp\.gate)\.")


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one kind of checkpoint. `prefix` is a regular expression."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False

    @property
    def parts(self) -> dict[str, str]:
        own = (self.embedding_norm, self.hidden_norm, self.projection, self.norm)
        return dict(zip(own, ("embedding_norm", "hidden_norm", "projection", "norm"), strict=True))


KINDS = (
    Names(r"model\.layers\.\d+\.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    Names(
        r"model\.mtp_layers\.\d+\.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
    ),
    Names(r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
)


@dataclass(frozen=True, slots=True)
class StoredModules:
    """The modules that a checkpoint has, by the prefixes of their names."""

    names: Names
    prefixes: tuple[str, ...]

    def rename(self, name: str) -> str | None:
        """Returns `modules.{k}.{part}` or, for a tensor of its layer, `model.layers.{k}.{part}`;
        None for a tensor of no module."""
        for number, prefix in enumerate(self.prefixes):
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix).removeprefix("layers.0.")
            part, _, kind = rest.rpartition(".")
            if part in COPIES:
                return None
            if part in self.names.parts:
                return f"modules.{number}.{self.names.parts[part]}.{kind}"
            return f"model.layers.{number}.{rest}"
        return None

    def first(self, num: int) -> StoredModules:
        return StoredModules(self.names, self.prefixes[:num])


def find_modules(source: str, names: Iterable[str]) -> StoredModules:
    """`source` names the checkpoint, whose tensors are `names`. Raises ConfigError if it has no
    modules, or such as are not supported."""
    names = list(names)
    for kind in KINDS:
        marker = re.compile(f"({kind.prefix}){re.escape(kind.projection)}[.]weight")
        prefixes = [match[1] for match in map(marker.fullmatch, names) if match]
        if not prefixes:
            continue
        prefixes.sort(key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)])
        found = StoredModules(kind, tuple(prefixes))
        if any(UNSUPPORTED.search(name) for name in names if found.rename(name)):
            raise ConfigError(
                f"{source}: its modules of multi-token prediction have latent attention, linear "
                "attention or experts, which are not supported yet; use another drafter",
                param=DRAFT_PATH,
            )
        return found
    raise ConfigError(
        f"{source} has no modules of multi-token prediction; name the directory of a drafter with "
        "--speculative-draft-model-path",
        param=DRAFT_PATH,
    )


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    decoder: ModelConfig
    num_modules: int
    hidden_first: bool
    returns_normed: bool  # what a module returns has passed its norm
    wants: HiddenWants


class Module:
    """Module `index` as a `DraftModel`."""

    __slots__ = (
        *("_block", "_config", "_embeddings", "_entry_norm", "_factor", "_head", "_norm"),
        *("_norms", "_projection", "_rotary", "dtype", "layers"),
    )

    def __init__(
        self, index: int, weights: DraftWeights, *, config: ModuleConfig, target: CausalModel
    ) -> None:
        source, decoder = weights.source, config.decoder
        offset = target.spec.norm_offset if isinstance(target, Decoder) else 0.0
        size = decoder.hidden_size

        def norm(name: str) -> Norm:
            weight = source.tensor(f"{name}.weight", (size,), offset=offset)
            return source.elementwise.norm(weight, eps=decoder.rms_norm_eps)

        prefix = f"modules.{index}"
        self.dtype = source.dtype
        self._config = config
        self._embeddings = target_embeddings(target, decoder)
        self._factor = target.embedding_factor if isinstance(target, Decoder) else 1.0
        self._norms = (norm(f"{prefix}.embedding_norm"), norm(f"{prefix}.hidden_norm"))
        parts = {f"{prefix}.projection": size}
        self._projection = source.linear(parts, in_features=2 * size, bias=False)
        self._entry_norm = norm(f"model.layers.{index}.input_layernorm")
        spec = _layer_spec(index, weights, config, offset=offset)
        self._block = Block(index, spec, source, rotary=0)
        self._norm = norm(f"{prefix}.norm")
        self._head = target.logits
        self._rotary = draft_rotary(decoder, source, target)
        layer = self._block.mixer.layer
        self.layers: tuple[LayerSpec, ...] = () if layer is None else (layer,)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        assert hidden is not None
        embedded = functional.embedding(input_ids, self._embeddings)
        if self._factor != 1.0:
            embedded = embedded * self._factor
        inputs = [norm(x) for norm, x in zip(self._norms, (embedded, hidden), strict=True)]
        if self._config.hidden_first:
            inputs.reverse()
        hidden = self._projection(torch.cat(inputs, dim=1))
        normed = self._entry_norm(hidden)
        hidden, _ = self._block(hidden, normed, self._rotary.at(positions), attend)
        return self._norm(hidden) if self._config.returns_normed else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden if self._config.returns_normed else self._norm(hidden))


class Modules:
    """All modules as one `DraftModel`, whose forward is that of the first. A single module is a
    `RecurrentModel`."""

    __slots__ = (
        *("dtype", "forward", "hidden_size", "layers", "logits", "modules", "token_ids", "wants"),
    )

    def __init__(self, modules: Sequence[Module], config: ModuleConfig) -> None:
        self.modules = tuple(modules)
        self.hidden_size = config.decoder.hidden_size
        self.wants = config.wants
        self.token_ids: Tensor | None = None
        self.layers = tuple(layer for module in modules for layer in module.layers)
        self.dtype = modules[0].dtype
        self.forward = modules[0].forward
        self.logits = modules[0].logits

    def fuse(self, features: tuple[Tensor, ...]) -> Tensor:
        (hidden,) = features
        return hidden


def _layer_spec(
    index: int, weights: DraftWeights, config: ModuleConfig, *, offset: float
) -> DecoderSpec:
    """NOTE: a block owns the norm that follows it, which here is none of a next layer. So the spec
    has one layer more than there are, and names no norm before attention."""
    attention = f"model.layers.{index}.self_attn"
    return DecoderSpec(
        config.decoder,
        windows=(None,) * (config.num_modules + 1),
        norms=LayerNorms(before_mlp=NORMS_BEFORE.before_mlp),
        norm_offset=offset,
        biases=Biases(
            qkv=weights.has_bias(f"{attention}.q_proj"),
            attention_out=weights.has_bias(f"{attention}.o_proj"),
            mlp=weights.has_bias(f"model.layers.{index}.mlp.gate_proj"),
        ),
        qk_norm=QkNorm() if weights.has(f"{attention}.q_norm") else None,
    )
