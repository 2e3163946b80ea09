"""The sublayers of decoder blocks as the compiled forwards of the CPU run them: which they can run,
their linear layers, and the buffers that they need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from aserve.gpu.device.cpu.expert_records import are_experts_covered, expert_buffer_sizes
from aserve.gpu.device.cpu.product_records import are_packed, own_part
from aserve.gpu.layers.joint_norm import DividedJointNorm
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.no_sublayer import NO_SUBLAYER
from aserve.gpu.layers.plain_mlp import RELU2, PlainMlp
from aserve.gpu.layers.scaled_mlp import ScaledMlp
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.decoder import Attention, Block
from aserve.gpu.models.decoder_spec import Mixer, Mlp
from aserve.gpu.models.gated_attention import GatedAttention
from aserve.gpu.models.gated_delta import GatedDeltaNet
from aserve.gpu.models.mamba2 import Mamba2, MambaBeside
from aserve.gpu.models.short_conv import ShortConv
from aserve.gpu.moe.layer import ExpertMlp
from aserve.gpu.parallel.source import SummedLinear
from aserve_kernels.cpu.conv_layer import conv_buffer_sizes
from aserve_kernels.cpu.delta_layer import buffer_sizes
from aserve_kernels.cpu.mamba_layer import mamba_buffer_sizes

CoveredAttention: TypeAlias = Attention | GatedAttention
CoveredMixer: TypeAlias = CoveredAttention | GatedDeltaNet | Mamba2 | ShortConv
DenseMlp: TypeAlias = GatedMlp | PlainMlp | ScaledMlp


@dataclass(frozen=True, slots=True)
class Sublayers:
    """One LAYER of the kernels computes a mixer and an MLP, or one of the two."""

    mixer: Mixer | None
    mlp: Mlp | None
    input_factor: float = 1.0  # of the mixer's input, beside the factors of those before it
    mixer_scale: float = 1.0  # of the mixer's output


def sublayers_of(block: Block) -> tuple[Sublayers, ...]:
    """Returns several where mixers are beside each other. All of these read the same input."""
    mixer, mlp = block.mixer, None if block.mlp is NO_SUBLAYER else block.mlp
    if not isinstance(mixer, MambaBeside):
        return (Sublayers(None if mixer is NO_SUBLAYER else mixer, mlp),)
    factors = mixer.factors
    second = factors.other_in / factors.mamba_in if factors.mamba_in else 0.0
    return (
        Sublayers(mixer.mamba, None, factors.mamba_in, factors.mamba_out),
        Sublayers(mixer.other, mlp, second, factors.other_out),
    )


def sublayers_of_all(blocks: Iterable[Block]) -> list[Sublayers]:
    return [part for block in blocks for part in sublayers_of(block)]


def attentions_of(blocks: Iterable[Block]) -> list[CoveredAttention]:
    mixers = [part.mixer for part in sublayers_of_all(blocks)]
    return [mixer for mixer in mixers if isinstance(mixer, CoveredAttention)]


def are_covered(blocks: Iterable[Block]) -> bool:
    """Whether the kernels can run all sublayers."""
    parts = sublayers_of_all(blocks)
    if not all(map(_is_covered, parts)):
        return False
    # Mamba-2 layers are whole on each of several ranks, which must not add up their outputs.
    products = [product for part in parts for product in products_of(part)]
    has_sums = any(isinstance(product, SummedLinear) for product in products)
    return not (has_sums and any(isinstance(part.mixer, Mamba2) for part in parts))


def _is_covered(part: Sublayers) -> bool:
    mixer, mlp = part.mixer, part.mlp
    if not (mixer is None or isinstance(mixer, CoveredMixer)) or not part.input_factor:
        return False
    if not _is_mlp_covered(mlp):
        return False
    if isinstance(mixer, Attention) and isinstance(mixer.joint_norm, DividedJointNorm):
        return False  # the kernels have no means over ranks
    products = products_of(part)
    if isinstance(mixer, GatedDeltaNet):
        products = (*products, mixer.project.narrow)
    # Adapters are not known beside recurrent layers, experts and MLPs of other kinds.
    may_be_adapted = isinstance(mixer, Attention) and isinstance(mlp, GatedMlp)
    is_adapted = any(isinstance(own_part(product), LoraLinear) for product in products)
    return are_packed(products) and (may_be_adapted or not is_adapted)


def _is_mlp_covered(mlp: Mlp | None) -> bool:
    match mlp:
        case None | GatedMlp() | ScaledMlp():
            return True
        case PlainMlp():
            return mlp.activation == RELU2
        case ExpertMlp():
            return are_experts_covered(mlp)
    return False


def products_of(part: Sublayers) -> tuple[LinearOp, ...]:
    """Returns the linear layers of the mixer, and of an MLP that is no mixture."""
    return tuple(product for product in mixer_products(part) + mlp_products(part) if product)


def mixer_products(part: Sublayers) -> tuple[LinearOp | None, LinearOp | None]:
    """Returns the first and the last linear layer of the mixer, if there is one."""
    mixer = part.mixer
    if mixer is None:
        return None, None
    assert isinstance(mixer, CoveredMixer)
    if isinstance(mixer, GatedDeltaNet):
        return mixer.project.wide, mixer.out
    return (mixer.into if isinstance(mixer, Mamba2 | ShortConv) else mixer.qkv), mixer.out


def mlp_products(part: Sublayers) -> tuple[LinearOp | None, LinearOp | None]:
    """Returns the linear layers into and out of the inner elements of the MLP, if there is one that
    is no mixture."""
    mlp = part.mlp.mlp if isinstance(part.mlp, ScaledMlp) else part.mlp
    if isinstance(mlp, GatedMlp):
        return mlp.gate_up, mlp.down
    return (mlp.up, mlp.down) if isinstance(mlp, PlainMlp) else (None, None)


def most_of(blocks: Iterable[Block]) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype suffice for each token in
    the buffers of all sublayers."""
    parts = sublayers_of_all(blocks)
    sizes = [mixer_buffer_sizes(part.mixer) for part in parts if part.mixer is not None]
    sizes += [expert_buffer_sizes(part.mlp) for part in parts if isinstance(part.mlp, ExpertMlp)]
    mixed, attended = map(max, zip(*sizes, strict=True))
    return mixed, attended


def mixer_buffer_sizes(mixer: Mixer) -> tuple[int, int]:
    """Returns how many float32 and how many elements of the model's dtype each token needs."""
    if isinstance(mixer, GatedDeltaNet):
        shape = mixer.shape
        num_heads = shape.linear_num_value_heads
        return buffer_sizes(shape.num_channels, shape.value_size, num_heads)
    if isinstance(mixer, ShortConv):
        return conv_buffer_sizes(mixer.spec.shape.num_channels)
    if isinstance(mixer, Mamba2):
        space = mixer.shape
        return mamba_buffer_sizes(space.inner_size, space.num_channels, space.num_heads)
    layer = mixer.layer
    assert layer is not None
    num_heads = layer.num_heads + layer.num_stored_heads + num_gates(mixer)
    return num_heads * layer.head_dim, layer.num_heads * layer.head_dim


def num_gates(attention: Mixer) -> int:
    return attention.layer.num_heads if isinstance(attention, GatedAttention) else 0
