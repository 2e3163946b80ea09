"""The records of models and layers that the compiled forwards of the CPU read: addresses of
weights, pools and tables, and sizes. The kernels are aserve_kernels.cpu.decoder_forward and
draft_forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from aserve.gpu.device.cpu.expert_records import (
    are_experts_covered,
    expert_buffer_sizes,
    mixture_of,
)
from aserve.gpu.device.cpu.ops import CompiledNorm
from aserve.gpu.device.cpu.product_records import (
    Values,
    are_packed,
    filled,
    is_packed,
    own_part,
    packed_of,
    product_of,
)
from aserve.gpu.kv.layer_groups import LayerSpec, Mask
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.norm import AddNorm, Norm, RmsNorm, SumAndNorm
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Attention, Block, Decoder
from aserve.gpu.models.decoder_spec import Mixer, Mlp
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs, ScaledSum
from aserve.gpu.models.gated_attention import GatedAttention
from aserve.gpu.models.gated_delta import GatedDeltaNet
from aserve.gpu.models.mamba2 import Mamba2
from aserve.gpu.models.short_conv import ShortConv
from aserve.gpu.moe.layer import ExpertMlp
from aserve.gpu.moe.two_batches import experts_of
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import SummedLinear
from aserve.gpu.parallel.stages import StagedDecoder
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, FutureMap
from aserve.gpu.step.resolve import DRAFTS, DeviceState
from aserve_kernels.cpu.callback import Callback
from aserve_kernels.cpu.conv_layer import SHORT_CONV, conv_buffer_sizes, conv_layer_function
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    LORA,
    LORA_LAYERS,
    MODEL,
    NO_LAYERS,
    NO_LORAS,
    Records,
    Tables,
)
from aserve_kernels.cpu.delta_layer import RECURRENT, buffer_sizes, delta_layer_function
from aserve_kernels.cpu.expert_mlp import expert_mlp_function
from aserve_kernels.cpu.gated_mul import KINDS
from aserve_kernels.cpu.host_rows import NO_WINDOW
from aserve_kernels.cpu.mamba_layer import MAMBA, mamba_buffer_sizes, mamba_layer_function
from aserve_kernels.cpu.online_softmax import fold_log2
from aserve_kernels.cpu.product import NO_PRODUCT
from aserve_kernels.draft_chain import DRAFT_PROBS
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

PLAIN_INPUTS = JoinedInputs()
LayerStack: TypeAlias = Decoder | StagedDecoder | DraftDecoder
CoveredMixer: TypeAlias = Attention | GatedAttention | GatedDeltaNet | Mamba2 | ShortConv
# The fields of LAYER that layers of the other kind do not have.
NOT_RECURRENT = {"advance": 0, "recurrent": 0}
NO_MIXTURE = {"mlp": 0, "experts": 0}
NO_ATTENTION = dict.fromkeys(
    (
        *("head_norms", "cos_sin", "keys", "values", "num_slots", "page_table", "window"),
        *("factor", "cap", "head_eps", "key_scale", "value_scale"),
    ),
    0,
)


@dataclass(frozen=True, slots=True)
class Head:
    """The layers that turn a model's output into logits."""

    product: LinearOp
    norm: Norm | None = None
    divisor: float = 1.0
    softcap: float = 0.0


def head_of(model: CausalModel | DraftDecoder) -> Head | None:
    """Returns None if the logits are not those of a decoder's head."""
    if isinstance(model, StagedDecoder):
        model = model.decoder
    if isinstance(model, Decoder):
        spec = model.spec
        return Head(model.head, None, spec.logit_divisor, spec.logit_softcap or 0.0)
    if not isinstance(model, DraftDecoder):
        return None
    if model.head is not None:
        return Head(model.head, model.head_norm)
    own = head_of(model.target)
    return own and Head(own.product, model.head_norm, own.divisor, own.softcap)


def whole_of(model: LayerStack) -> Decoder | DraftDecoder:
    """Returns the decoder that a stage has a part of."""
    return model.decoder if isinstance(model, StagedDecoder) else model


def has_packed_head(model: CausalModel | DraftDecoder) -> bool:
    """Whether the kernels can compute the logits."""
    head = head_of(model)
    return head is not None and is_packed(head.product)


def are_layers_covered(model: CausalModel | DraftDecoder, *, masks: tuple[Mask, ...]) -> bool:
    """Whether the kernels can run the layers. `masks`: those that their attention may have."""
    if not isinstance(model, LayerStack):
        return False
    products: list[LinearOp] = []
    if isinstance(model, DraftDecoder):
        inputs = model.inputs or PLAIN_INPUTS
        products += [p for p in (inputs.projection, model.next_hidden) if p is not None]
    if not are_packed(products) or not all(map(_is_block_covered, model.blocks)):
        return False
    attentions = _attentions(model)
    layers = [attention.layer for attention in attentions]
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    is_uniform = len(shapes) == len({layer.mask for layer in layers}) == 1
    has_masks = all(_has_mask(layer, masks) for layer in layers)
    return is_uniform and has_masks and len(set(map(type, attentions))) == 1


def ranks_of(model: LayerStack) -> SharedCollectives | None:
    """Returns the ranks among which the layers are divided."""
    for product in _products(model.blocks[0]):
        if isinstance(product, SummedLinear) and isinstance(product.ranks, SharedCollectives):
            return product.ranks
    return None


def num_workers_of(model: LayerStack) -> int:
    """Returns how many threads share the products of a model that the kernels can run."""
    return packed_of(_products(model.blocks[0])[0]).num_workers


def _has_mask(layer: LayerSpec, masks: tuple[Mask, ...]) -> bool:
    """A window is that of a causal layer."""
    return layer.mask in masks and (layer.mask is Mask.CAUSAL or layer.window is None)


def _is_block_covered(block: Block) -> bool:
    mixer, mlp = block.mixer, block.mlp
    if not isinstance(mixer, CoveredMixer) or not _is_mlp_covered(mlp):
        return False
    if isinstance(mixer, Attention) and not (mixer.joint_norm is None and mixer.sinks is None):
        return False
    products = _products(block)
    if isinstance(mixer, GatedDeltaNet):
        products = (*products, mixer.project.narrow)
    if isinstance(mixer, Mamba2) and not (mixer.has_plain_gate and _is_whole(mlp)):
        return False
    # Adapters are not known beside recurrent layers and experts.
    may_be_adapted = isinstance(mixer, Attention) and isinstance(mlp, GatedMlp)
    is_adapted = any(isinstance(own_part(product), LoraLinear) for product in products)
    return are_packed(products) and (may_be_adapted or not is_adapted)


def _is_whole(mlp: Mlp) -> bool:
    """Whether no ranks divide the layers. Mamba-2 layers are whole on each of several ranks, which
    must not add up their outputs."""
    return not (isinstance(mlp, GatedMlp) and isinstance(mlp.down, SummedLinear))


def _is_mlp_covered(mlp: Mlp) -> bool:
    return isinstance(mlp, GatedMlp) or (isinstance(mlp, ExpertMlp) and are_experts_covered(mlp))


def _attentions(model: LayerStack) -> list[Attention | GatedAttention]:
    mixers = [block.mixer for block in model.blocks]
    return [mixer for mixer in mixers if isinstance(mixer, Attention | GatedAttention)]


def _most_of(blocks: Sequence[Block]) -> tuple[int, int]:
    """Returns sizes that suffice for the buffers of all these layers, as `_buffer_sizes` does."""
    sizes = [_buffer_sizes(block.mixer) for block in blocks]
    sizes += [expert_buffer_sizes(mlp) for mlp in experts_of(blocks)]
    mixed, attended = map(max, zip(*sizes, strict=True))
    return mixed, attended


def _buffer_sizes(mixer: Mixer) -> tuple[int, int]:
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
    num_heads = layer.num_heads + layer.num_stored_heads + _num_gates(mixer)
    return num_heads * layer.head_dim, layer.num_heads * layer.head_dim


def _num_gates(attention: Mixer) -> int:
    return attention.layer.num_heads if isinstance(attention, GatedAttention) else 0


class ModelRecords:
    """Describes a model to the kernels. It keeps alive the tensors that only the records point to;
    the model keeps the others."""

    __slots__ = ("_dtype", "_kept", "_state", "tables")

    def __init__(self, model: LayerStack, state: DeviceState) -> None:
        """The KV pools of `state` are those of the model."""
        self._dtype = model.dtype
        self._state = state
        self._kept: list[Tensor | Records] = []
        layers = np.zeros(len(model.blocks), LAYER)
        for index, block in enumerate(model.blocks):
            values = self._layer(block, whole_of(model).rotaries[block.rotary].table)
            filled(layers[index : index + 1], values)
        ranks = ranks_of(model)
        values = {
            **self._model(model),
            **self._draft_inputs(model),
            **_step_tables(state),
            "ranks": 0 if ranks is None else ranks.address,
        }
        record = filled(np.zeros(1, MODEL), values)
        kv_dtype = state.pools.dtype
        self.tables = Tables(record, layers, model.dtype, kv_dtype, NO_LORAS, NO_LAYERS)

    def _model(self, model: LayerStack) -> Values:
        whole = whole_of(model)
        spec = whole.spec if isinstance(whole, Decoder) else None
        config = whole.config if isinstance(whole, DraftDecoder) else whole.spec.config
        head = head_of(model) if has_packed_head(model) else None
        attention, table = _attentions(model)[0], whole.rotaries[0].table
        layer, (mixed, attended) = attention.layer, _most_of(model.blocks)
        begins = not isinstance(model, StagedDecoder) or model.is_first
        return {
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "vocab": 0 if head is None else packed_of(head.product).num_out,
            "num_embeddings": len(whole.embeddings),
            "max_len": table.shape[0],
            "heads": layer.num_heads,
            "kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "rotary_dim": table.shape[1],
            "gates": _num_gates(attention),
            "mixed": mixed,
            "attended": attended,
            "activation": KINDS[config.activation],
            "embeddings": whole.embeddings.data_ptr() if begins else 0,
            "first_norm": self._norm(model.first_norm),
            "head": product_of(self._dtype, None if head is None else head.product),
            "head_norm": 0 if head is None or head.norm is None else self._norm(head.norm),
            "stores_kv": layer.num_stored_heads > 0,
            "is_causal": layer.mask is Mask.CAUSAL,
            "eps": config.rms_norm_eps,
            "residual_scale": 1.0 if spec is None else spec.residual_scale,
            "embedding_factor": whole.embedding_factor,
            "logit_divisor": 1.0 if head is None else head.divisor,
            "logit_softcap": 0.0 if head is None else head.softcap,
        }

    def _draft_inputs(self, model: LayerStack) -> Values:
        own = model if isinstance(model, DraftDecoder) else None
        joined = None if own is None else own.inputs
        inputs = joined or PLAIN_INPUTS
        token_ids = None if own is None else own.token_ids
        return {
            "joined": 0 if own is None or joined is None else own.embeddings.shape[1],
            "is_hidden_first": inputs.is_hidden_first,
            "keeps_normed": inputs.keeps_normed,
            "embedding_norm": self._norm(inputs.embedding_norm),
            "hidden_norm": self._norm(inputs.hidden_norm),
            "projection": product_of(self._dtype, inputs.projection),
            "next_hidden": product_of(self._dtype, None if own is None else own.next_hidden),
            "token_ids": 0 if token_ids is None else token_ids.data_ptr(),
        }

    def _layer(self, block: Block, cos_sin: Tensor) -> Values:
        mixer, after = block.mixer, block.before_next
        products = [product_of(self._dtype, product) for product in _products(block)]
        products += [NO_PRODUCT] * (len(LORA_LAYERS) - len(products))
        if isinstance(mixer, GatedDeltaNet):
            own = {**NO_ATTENTION, **self._delta(mixer)}
        elif isinstance(mixer, ShortConv):
            own = {**NO_ATTENTION, **self._conv(mixer)}
        elif isinstance(mixer, Mamba2):
            own = {**NO_ATTENTION, **self._mamba(mixer)}
        else:
            assert isinstance(mixer, Attention | GatedAttention)
            own = {**self._attention(mixer), "cos_sin": cos_sin.data_ptr(), **NOT_RECURRENT}
        return {
            **own,
            **dict(zip(LORA_LAYERS, products, strict=True)),
            **(self._mixture(block.mlp) if isinstance(block.mlp, ExpertMlp) else NO_MIXTURE),
            "after_attention": self._norm(block.after_attention),
            "before_mlp": self._norm_of_sum(block.before_mlp),
            "after_mlp": self._norm(block.after_mlp),
            "before_next": self._norm_of_sum(after),
            "out_scale": float(after.factor) if isinstance(after, ScaledSum) else 1.0,
        }

    def _attention(self, attention: Attention | GatedAttention) -> Values:
        layer, pools, head_norms = attention.layer, self._state.pools, attention.head_norms
        kv = pools.layers[layer.index]
        key_scale, value_scale = kv.scales
        factor, cap = fold_log2(layer.scale * key_scale, layer.softcap)
        return {
            "head_norms": 0 if head_norms is None else head_norms.weight.data_ptr(),
            "keys": kv.keys.data_ptr(),
            "values": kv.values.data_ptr(),
            "num_slots": len(kv.keys),
            "page_table": pools.page_tables[kv.group].data_ptr(),
            "window": NO_WINDOW if layer.window is None else layer.window,
            "factor": factor,
            "cap": cap,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "head_eps": 0.0 if head_norms is None else head_norms.eps,
        }

    def _delta(self, mixer: GatedDeltaNet) -> Values:
        shape = mixer.shape
        values: Values = {
            **self._inputs(mixer),
            **self._matrices(mixer),
            "narrow": product_of(self._dtype, mixer.project.narrow),
            "key_heads": shape.linear_num_key_heads,
            "value_heads": shape.linear_num_value_heads,
            "key_dim": shape.linear_key_head_dim,
            "value_dim": shape.linear_value_head_dim,
            "width": shape.linear_conv_kernel_dim,
            "groups": mixer.project.num_groups,
            "conv": self._keep(mixer.conv),
            "decay": self._keep(mixer.decay),
            "dt_bias": self._keep(mixer.dt_bias),
            "norm": self._keep(mixer.norm),
            "eps": mixer.eps,
        }
        record = filled(np.zeros(1, RECURRENT), values)
        return self._recurrent(delta_layer_function(self._dtype), record)

    def _conv(self, mixer: ShortConv) -> Values:
        shape = mixer.spec.shape
        values: Values = {
            **self._inputs(mixer),
            "channels": shape.num_channels,
            "taps": shape.num_taps,
            "conv": self._keep(mixer.conv),
            "bias": 0 if mixer.bias is None else self._keep(mixer.bias),
        }
        record = filled(np.zeros(1, SHORT_CONV), values)
        return self._recurrent(conv_layer_function(self._dtype), record)

    def _mamba(self, mixer: Mamba2) -> Values:
        shape = mixer.shape
        low, high = mixer.limits
        assert mixer.norm is not None
        values: Values = {
            **self._inputs(mixer),
            **self._matrices(mixer),
            "heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "groups": shape.num_groups,
            "state_dim": shape.state_dim,
            "width": shape.num_taps,
            "norm_groups": mixer.num_norm_groups,
            "conv": self._keep(mixer.conv),
            "bias": self._keep(mixer.bias),
            "decay": self._keep(mixer.decay),
            "dt_bias": self._keep(mixer.dt_bias),
            "skip": self._keep(mixer.skip),
            "norm": self._keep(mixer.norm),
            "eps": mixer.eps,
            "low": low,
            "high": high,
        }
        record = filled(np.zeros(1, MAMBA), values)
        return self._recurrent(mamba_layer_function(self._dtype), record)

    def _inputs(self, mixer: GatedDeltaNet | Mamba2 | ShortConv) -> Values:
        """Returns the sizes of a layer's buffers, and where rows keep the inputs of its conv."""
        mixed, attended = _buffer_sizes(mixer)
        inputs = self._state.recurrent[mixer.spec.index].inputs
        return {
            "mixed": mixed,
            "attended": attended,
            "table_rows": len(inputs),
            "num_inputs": inputs.shape[1],
            "inputs": inputs.data_ptr(),
        }

    def _matrices(self, mixer: GatedDeltaNet | Mamba2) -> Values:
        """Returns where rows keep the matrices of a layer."""
        matrices = self._state.recurrent[mixer.spec.index].matrices
        return {"num_places": matrices.shape[1], "matrices": matrices.data_ptr()}

    def _recurrent(self, function: Callback, record: Records) -> Values:
        """`function` advances a layer of this record."""
        self._kept.append(record)
        return {"advance": function.address, "recurrent": record.ctypes.data}

    def _mixture(self, mlp: ExpertMlp) -> Values:
        record, *own = mixture_of(mlp, self._dtype)
        self._kept += [record, *own]
        function = expert_mlp_function(self._dtype)
        return {"mlp": function.address, "experts": record.ctypes.data}

    def _norm(self, norm: Norm) -> int:
        """The address of a norm's weight in float32; 0 for no norm."""
        return self._keep(norm.weight) if isinstance(norm, CompiledNorm | RmsNorm) else 0

    def _keep(self, weight: Tensor) -> int:
        """The address of a weight in float32."""
        wide = weight.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()

    def _norm_of_sum(self, norm: SumAndNorm) -> int:
        assert isinstance(norm, AddNorm | ScaledSum)  # all that the CPU's operators make
        return self._norm(norm.norm)


def _step_tables(state: DeviceState) -> Values:
    """The engine's tables, which all models of an engine share."""
    pools, tables, relay = state.pools, state.tables, state.relay
    table_rows, table_columns = pools.page_tables[0].shape
    return {
        "page_size": pools.page_size,
        "table_rows": table_rows,
        "table_columns": table_columns,
        "token_pool": pools.token_pool.data_ptr(),
        "num_slots": len(pools.token_pool),
        "token_pages": pools.page_tables[0].data_ptr(),
        "last_token": relay.table(LAST_TOKEN).data_ptr(),
        "written_iter": relay.written_iter.data_ptr(),
        "seq_len": relay.table(SEQ_LEN).data_ptr() if SEQ_LEN in relay else 0,
        "drafts": relay.table(DRAFTS).data_ptr() if DRAFTS in relay else 0,
        "max_drafts": relay.table(DRAFTS).shape[1] if DRAFTS in relay else 0,
        **_probs(relay),
        **_column("seed", tables.int_table, INT_COLUMNS),
        **_column("temperature", tables.float_table, FLOAT_COLUMNS),
    }


def _probs(relay: FutureMap) -> Values:
    if DRAFT_PROBS not in relay:
        return {"draft_probs": 0, "probs_drafts": 0, "probs_vocab": 0}
    table = relay.table(DRAFT_PROBS)
    num_drafts, vocab = table.shape[1:]
    return {"draft_probs": table.data_ptr(), "probs_drafts": num_drafts, "probs_vocab": vocab}


def describe_loras(decoder: Decoder | StagedDecoder) -> Records:
    """Returns the records of all layers' adapters, in the order of LORA_LAYERS."""
    stacks = [
        product.stack
        for block in decoder.blocks
        for product in map(own_part, _products(block))
        if isinstance(product, LoraLinear)
    ]
    records = np.zeros(len(stacks), LORA)
    for index, stack in enumerate(stacks):
        slots, parts, rank, _ = stack.a.shape
        values = {
            "slots": slots,
            "parts": parts,
            "rank": rank,
            "a": stack.a.data_ptr(),
            "b": stack.b.data_ptr(),
            "ranks": stack.ranks.ctypes.data,
            "bounds": stack.bounds.ctypes.data,
        }
        filled(records[index : index + 1], values)
    return records


def _products(block: Block) -> tuple[LinearOp, ...]:
    """Returns the linear layers, in the order of LORA_LAYERS, without those of a mixture."""
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, CoveredMixer)
    if isinstance(mixer, GatedDeltaNet):
        first = mixer.project.wide
    else:
        first = mixer.into if isinstance(mixer, Mamba2 | ShortConv) else mixer.qkv
    return first, mixer.out, *((mlp.gate_up, mlp.down) if isinstance(mlp, GatedMlp) else ())


def _column(name: str, table: Tensor, columns: tuple[str, ...]) -> dict[str, int]:
    return {
        f"{name}s": table[:, columns.index(name)].data_ptr(),
        f"{name}_columns": table.shape[1],
    }
