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

import msgspec
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.norm import AddNorm, Norm
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Block
from aserve.gpu.models.decoder_spec import NORMS_BEFORE, Biases, DecoderSpec, LayerNorms, QkNorm
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs, unchanged
from aserve.gpu.models.gated_delta import is_gated_delta
from aserve.gpu.spec.base import HiddenInputs
from aserve.gpu.spec.checkpoint import (
    DRAFT_PATH,
    DraftWeights,
    decoder_of,
    embedding_factor_of,
    target_embeddings,
)
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


def find_modules(source: str, names: Iterable[str], *, has_layer: bool = False) -> StoredModules:
    """`source` names the checkpoint, whose tensors are `names`. Raises ConfigError if it has no
    modules, or such as are not supported. `has_layer`: the model's family knows their layers."""
    names = list(names)
    for kind in KINDS:
        marker = re.compile(f"({kind.prefix}){re.escape(kind.projection)}[.]weight")
        prefixes = [match[1] for match in map(marker.fullmatch, names) if match]
        if not prefixes:
            continue
        prefixes.sort(key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)])
        found = StoredModules(kind, tuple(prefixes))
        own = (name for name in names if found.rename(name))
        if not has_layer and any(map(UNSUPPORTED.search, own)):
            raise ConfigError(
                f"{source}: its modules of multi-token prediction have latent attention, linear "
                "attention or experts, which are not supported for this architecture; use another "
                "drafter",
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
    """`layer` is the spec of the model's family where its layers have mixers or MLPs of their own;
    the modules' layers are as its last one that keeps KV."""

    decoder: ModelConfig
    num_modules: int
    hidden_first: bool
    returns_normed: bool  # what a module returns has passed its norm
    inputs: HiddenInputs
    layer: DecoderSpec | None = None


class Module:
    """Module `index` as a `DraftModel`."""

    __slots__ = (*("decoder", "dtype", "forward", "layers", "logits"),)

    def __init__(
        self, index: int, weights: DraftWeights, *, config: ModuleConfig, target: CausalModel
    ) -> None:
        source, decoder = weights.source, config.decoder
        own = decoder_of(target)
        offset = 0.0 if own is None else own.spec.norm_offset
        size = decoder.hidden_size

        def norm(name: str) -> Norm:
            weight = source.tensor(f"{name}.weight", (size,), offset=offset)
            return source.elementwise.norm(weight, eps=decoder.rms_norm_eps)

        prefix = f"modules.{index}"
        self.dtype = source.dtype
        parts = {f"{prefix}.projection": size}
        inputs = JoinedInputs(
            norm(f"{prefix}.embedding_norm"),
            norm(f"{prefix}.hidden_norm"),
            is_hidden_first=config.hidden_first,
            projection=source.linear(parts, in_features=2 * size, bias=False),
        )
        first_norm = norm(f"model.layers.{index}.input_layernorm")
        spec = _layer_spec(index, weights, config, offset=offset)
        block = Block(index, spec, source, rotary=0)
        last_norm = norm(f"{prefix}.norm")
        if config.returns_normed:
            block.before_next = AddNorm(last_norm, scale=1.0)
        self.decoder = DraftDecoder(
            decoder,
            target,
            source.dtype,
            target_embeddings(target, decoder),
            (block,),
            (draft_rotary(decoder, source, target),),
            inputs,
            embedding_factor=embedding_factor_of(target),
            first_norm=first_norm,
            head_norm=unchanged if config.returns_normed else last_norm,
        )
        self.layers = self.decoder.layers
        self.forward = self.decoder.forward
        self.logits = self.decoder.logits


class Modules:
    """All modules as one `DraftModel`, whose forward is that of the first. A single module is a
    `RecurrentModel`."""

    __slots__ = (
        *("decoder", "dtype", "forward", "hidden_size", "layers", "logits", "modules"),
        *("token_ids", "inputs"),
    )

    def __init__(self, modules: Sequence[Module], config: ModuleConfig) -> None:
        self.modules = tuple(modules)
        self.hidden_size = config.decoder.hidden_size
        self.inputs = config.inputs
        self.token_ids: Tensor | None = None
        self.layers = tuple(layer for module in modules for layer in module.layers)
        self.dtype = modules[0].dtype
        self.decoder = modules[0].decoder
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
    windows = (None,) * (config.num_modules + 1)
    norms = LayerNorms(before_mlp=NORMS_BEFORE.before_mlp)
    if (layer := config.layer) is not None:
        mixers = tuple(mixer for mixer in layer.mixers if not is_gated_delta(mixer))
        return msgspec.structs.replace(
            layer,
            windows=windows,
            norms=norms,
            mixers=mixers[-1:] * len(windows),
            mlps=layer.mlps[-1:] * len(windows),
        )
    return DecoderSpec(
        config.decoder,
        windows=windows,
        norms=norms,
        norm_offset=offset,
        biases=Biases(
            qkv=weights.has_bias(f"{attention}.q_proj"),
            attention_out=weights.has_bias(f"{attention}.o_proj"),
            mlp=weights.has_bias(f"model.layers.{index}.mlp.gate_proj"),
        ),
        qk_norm=QkNorm() if weights.has(f"{attention}.q_norm") else None,
    )
