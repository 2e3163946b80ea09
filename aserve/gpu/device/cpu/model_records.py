"""The records of models and layers that the compiled forwards of the CPU read: addresses of
weights, pools and tables, and sizes. The kernels are aserve_kernels.cpu.decoder_forward and
draft_forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from aserve.gpu.device.cpu.expert_records import mixture_of
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
from aserve.gpu.device.cpu.sublayers import (
    CoveredAttention,
    Sublayers,
    are_covered,
    attentions_of,
    mixer_buffer_sizes,
    mixer_products,
    mlp_products,
    most_of,
    num_gates,
    products_of,
    sublayers_of,
    sublayers_of_all,
)
from aserve.gpu.kv.layer_groups import LayerSpec, Mask
from aserve.gpu.layers.joint_norm import DividedJointNorm, JointNorm
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.norm import AddNorm, HeadNorms, Norm, RmsNorm, SumAndNorm
from aserve.gpu.layers.plain_mlp import PlainMlp
from aserve.gpu.layers.scaled_mlp import ScaledMlp
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Attention, Block, Decoder
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs, ScaledSum
from aserve.gpu.models.gated_delta import GatedDeltaNet
from aserve.gpu.models.mamba2 import Mamba2
from aserve.gpu.models.short_conv import ShortConv
from aserve.gpu.moe.layer import ExpertMlp
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import SummedLinear
from aserve.gpu.parallel.stages import StagedDecoder
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, FutureMap
from aserve.gpu.step.resolve import DRAFTS, DeviceState
from aserve_kernels.cpu.callback import Callback
from aserve_kernels.cpu.conv_layer import SHORT_CONV, conv_layer_function
from aserve_kernels.cpu.decoder_layers import (
    LAYER,
    LORA,
    LORA_LAYERS,
    MODEL,
    NO_LAYERS,
    NO_LORAS,
    SAME_INPUT,
    Records,
    Tables,
)
from aserve_kernels.cpu.delta_layer import RECURRENT, delta_layer_function
from aserve_kernels.cpu.expert_mlp import expert_mlp_function
from aserve_kernels.cpu.gated_mul import KINDS, RELU2
from aserve_kernels.cpu.host_rows import NO_WINDOW
from aserve_kernels.cpu.mamba_layer import MAMBA, mamba_layer_function
from aserve_kernels.cpu.online_softmax import fold_log2
from aserve_kernels.draft_chain import DRAFT_PROBS
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

PLAIN_INPUTS = JoinedInputs()
LayerStack: TypeAlias = Decoder | StagedDecoder | DraftDecoder
# The fields of LAYER that layers of the other kind do not have.
NOT_RECURRENT = {"advance": 0, "recurrent": 0}
NO_MIXTURE = {"mlp": 0, "experts": 0}
NO_ATTENTION = dict.fromkeys(
    (
        *("head_norms", "key_norm", "cos_sin", "keys", "values", "num_slots", "page_table"),
        *("window", "sinks", "factor", "cap", "head_eps", "key_scale", "value_scale"),
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
    if not are_packed(products) or not are_covered(model.blocks):
        return False
    attentions = attentions_of(model.blocks)
    layers = [attention.layer for attention in attentions]
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    is_uniform = len(shapes) == len({layer.mask for layer in layers}) == 1
    has_masks = all(_has_mask(layer, masks) for layer in layers)
    return is_uniform and has_masks and len(set(map(type, attentions))) == 1


def ranks_of(model: LayerStack) -> SharedCollectives | None:
    """Returns the ranks among which the layers are divided."""
    for product in products_of(sublayers_of(model.blocks[0])[0]):
        if isinstance(product, SummedLinear) and isinstance(product.ranks, SharedCollectives):
            return product.ranks
    return None


def num_workers_of(model: LayerStack) -> int:
    """Returns how many threads share the products of a model that the kernels can run."""
    return packed_of(_products_of_all(model)[0]).num_workers


def _products_of_all(model: LayerStack) -> list[LinearOp]:
    return [product for part in sublayers_of_all(model.blocks) for product in products_of(part)]


def _has_mask(layer: LayerSpec, masks: tuple[Mask, ...]) -> bool:
    """A window is that of a causal layer."""
    return layer.mask in masks and (layer.mask is Mask.CAUSAL or layer.window is None)


class ModelRecords:
    """Describes a model to the kernels. It keeps alive the tensors that only the records point to;
    the model keeps the others."""

    __slots__ = ("_dtype", "_kept", "_state", "last_records", "tables")

    def __init__(self, model: LayerStack, state: DeviceState) -> None:
        """The KV pools of `state` are those of the model."""
        self._dtype = model.dtype
        self._state = state
        self._kept: list[Tensor | Records] = []
        own = [values for block in model.blocks for values in self._layers(block, whole_of(model))]
        layers = np.zeros(len(own), LAYER)
        for index, values in enumerate(own):
            filled(layers[index : index + 1], values)
        counts = [len(sublayers_of(block)) for block in model.blocks]
        self.last_records = np.cumsum(counts) - 1  # [blocks], the last record of each
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
        config = whole.config if isinstance(whole, DraftDecoder) else whole.spec.config
        head = head_of(model) if has_packed_head(model) else None
        attention, table = attentions_of(model.blocks)[0], whole.rotaries[0].table
        layer, (mixed, attended) = attention.layer, most_of(model.blocks)
        begins = not isinstance(model, StagedDecoder) or model.is_first
        factors = whole.rotaries[0].query_factors
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
            "query_factors": 0 if factors is None else self._keep(factors),
            "gates": num_gates(attention),
            "mixed": mixed,
            "attended": attended,
            "embeddings": whole.embeddings.data_ptr() if begins else 0,
            "first_norm": self._norm(model.first_norm),
            "head": product_of(self._dtype, None if head is None else head.product),
            "head_norm": 0 if head is None or head.norm is None else self._norm(head.norm),
            "stores_kv": layer.num_stored_heads > 0,
            "is_causal": layer.mask is Mask.CAUSAL,
            "eps": config.rms_norm_eps,
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

    def _layers(self, block: Block, whole: Decoder | DraftDecoder) -> list[Values]:
        """Returns a record for each of the block's sublayers that run together."""
        parts, after = sublayers_of(block), block.before_next
        layers = [self._layer(part, block, whole) for part in parts]
        first_norms = [SAME_INPUT] * (len(parts) - 1)
        last = after if parts[-1].mlp is None else block.before_mlp
        norms = [*first_norms, self._norm_of_sum(last)]
        return [{**layer, "before_mlp": norm} for layer, norm in zip(layers, norms, strict=True)]

    def _layer(self, part: Sublayers, block: Block, whole: Decoder | DraftDecoder) -> Values:
        """Returns all but the norm of the sum behind the mixer."""
        after, products = block.before_next, mixer_products(part) + mlp_products(part)
        own = [product_of(self._dtype, product) for product in products]
        return {
            **self._mixer(part, whole.rotaries[block.rotary].table),
            **dict(zip(LORA_LAYERS, own, strict=True)),
            **self._mlp(part, whole),
            "input_factor": part.input_factor,
            "after_attention": self._norm(block.after_attention),
            "after_mlp": self._norm(block.after_mlp),
            "before_next": self._norm_of_sum(after),
            "out_scale": float(after.factor) if isinstance(after, ScaledSum) else 1.0,
        }

    def _mixer(self, part: Sublayers, cos_sin: Tensor) -> Values:
        match part.mixer:
            case None:
                return {**NO_ATTENTION, **NOT_RECURRENT}
            case GatedDeltaNet() as mixer:
                return {**NO_ATTENTION, **self._delta(mixer)}
            case ShortConv() as mixer:
                return {**NO_ATTENTION, **self._conv(mixer)}
            case Mamba2() as mixer:
                return {**NO_ATTENTION, **self._mamba(mixer)}
            case mixer:
                assert isinstance(mixer, CoveredAttention)
                own = {"cos_sin": cos_sin.data_ptr(), **NOT_RECURRENT}
                return {**self._attention(mixer), **own}

    def _mlp(self, part: Sublayers, whole: Decoder | DraftDecoder) -> Values:
        """Also returns the factors of both outputs."""
        mlp = part.mlp
        config = whole.spec.config if isinstance(whole, Decoder) else whole.config
        scale = whole.spec.residual_scale if isinstance(whole, Decoder) else 1.0
        gate_factor, factor = (1.0, 1.0)
        if isinstance(mlp, ScaledMlp):
            gate_factor, factor = mlp.gate_factor, mlp.factor
        return {
            **(self._mixture(mlp) if isinstance(mlp, ExpertMlp) else NO_MIXTURE),
            "activation": RELU2 if isinstance(mlp, PlainMlp) else KINDS[config.activation],
            "gate_factor": gate_factor,
            "mlp_scale": scale * factor,
            "mixer_scale": scale * part.mixer_scale,
        }

    def _attention(self, attention: CoveredAttention) -> Values:
        layer, pools, head_norms = attention.layer, self._state.pools, attention.head_norms
        sinks = joint_norm = None
        if isinstance(attention, Attention):
            assert not isinstance(attention.joint_norm, DividedJointNorm)
            sinks, joint_norm = attention.sinks, attention.joint_norm
        kv = pools.layers[layer.index]
        key_scale, value_scale = kv.scales
        factor, cap = fold_log2(layer.scale * key_scale, layer.softcap)
        return {
            **self._head_norms(head_norms, joint_norm),
            "keys": kv.keys.data_ptr(),
            "values": kv.values.data_ptr(),
            "num_slots": len(kv.keys),
            "page_table": pools.page_tables[kv.group].data_ptr(),
            "window": NO_WINDOW if layer.window is None else layer.window,
            "sinks": 0 if sinks is None else self._keep(sinks),
            "factor": factor,
            "cap": cap,
            "key_scale": key_scale,
            "value_scale": value_scale,
        }

    def _head_norms(self, head_norms: HeadNorms | None, joint_norm: JointNorm | None) -> Values:
        if joint_norm is not None:
            query, key = self._norm(joint_norm.q_norm), self._norm(joint_norm.k_norm)
            return {"head_norms": query, "key_norm": key, "head_eps": 0.0}
        if head_norms is None:
            return {"head_norms": 0, "key_norm": 0, "head_eps": 0.0}
        return {
            "head_norms": head_norms.weight.data_ptr(),
            "key_norm": 0,
            "head_eps": head_norms.eps,
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
        values: Values = {
            **self._inputs(mixer),
            **self._matrices(mixer),
            "heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "groups": shape.num_groups,
            "state_dim": shape.state_dim,
            "width": shape.num_taps,
            "norm_groups": mixer.num_norm_groups,
            "is_norm_first": mixer.is_norm_first,
            "factors": 0 if mixer.factors is None else self._keep(mixer.factors),
            "conv": self._keep(mixer.conv),
            "bias": self._keep(mixer.bias),
            "decay": self._keep(mixer.decay),
            "dt_bias": self._keep(mixer.dt_bias),
            "skip": self._keep(mixer.skip),
            "norm": 0 if mixer.norm is None else self._keep(mixer.norm),
            "eps": mixer.eps,
            "low": low,
            "high": high,
        }
        record = filled(np.zeros(1, MAMBA), values)
        return self._recurrent(mamba_layer_function(self._dtype), record)

    def _inputs(self, mixer: GatedDeltaNet | Mamba2 | ShortConv) -> Values:
        """Returns the sizes of a layer's buffers, and where rows keep the inputs of its conv."""
        mixed, attended = mixer_buffer_sizes(mixer)
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
        for product in map(own_part, _products_of_all(decoder))
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


def _column(name: str, table: Tensor, columns: tuple[str, ...]) -> dict[str, int]:
    return {
        f"{name}s": table[:, columns.index(name)].data_ptr(),
        f"{name}_columns": table.shape[1],
    }
