"""The CPU's fused step: a decoder's forward for few tokens as one compiled call, or a whole step.

A forward writes keys and values of its own slots. A step also writes what `resolve` and the stash
write: token ids in the token pool, and the drawn tokens and stamps in the relay. Both run on the
executor's thread. The kernel is aserve_kernels.cpu.decoder_forward; this module fills in its
records, which hold addresses of weights, pools and tables, and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.cpu.kernel_linear import TiledLinear
from aserve.gpu.device.cpu.ops import CompiledNorm
from aserve.gpu.device.fused_step import FusedWindows
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.norm import AddNorm, Norm, RmsNorm, SumAndNorm
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Attention, Block, Decoder
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceState
from aserve.gpu.step.results import Layout, Packed
from aserve.messages.requests import stamp_of
from aserve_kernels.cpu.decoder_forward import (
    GELU,
    GELU_TANH,
    LAYER,
    LORA,
    MODEL,
    NO_LORAS,
    SILU,
    Records,
    StepRows,
    Tables,
    compile_decoder_forward,
    decoder_forward,
    decoder_step,
    draft_chain,
)
from aserve_kernels.cpu.host_rows import NO_WINDOW, Int64s
from aserve_kernels.cpu.online_softmax import fold_log2
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

ACTIVATIONS: Mapping[str, int] = {"silu": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH}
FEW_TOKENS = 256  # per row; above this, torch's attention within a prompt is faster


class CompiledForward:
    """A `FusedDecoder`."""

    __slots__ = ("_adapted", "_decoder", "_kept", "_plain", "_state")

    def __init__(self, decoder: Decoder, state: DeviceState) -> None:
        self._decoder = decoder
        self._state = state
        self._kept: list[Tensor] = []  # keeps alive the tensors that only the records point to
        layers = np.zeros(len(decoder.blocks), LAYER)
        for index, block in enumerate(decoder.blocks):
            self._describe_layer(layers[index : index + 1], block)
        self._plain = Tables(self._describe_model(), layers, decoder.dtype, NO_LORAS)
        self._adapted = replace(self._plain, loras=_describe_loras(decoder))

    def can_run(self, batch: ForwardBatch) -> bool:
        is_plain = batch.capture is None and batch.rope_override is None and batch.tree_mask is None
        return bool(is_plain and batch.query_lens_cpu.max(initial=0) <= FEW_TOKENS)

    def run(self, batch: ForwardBatch) -> Tensor:
        rows, none = batch.rows.numpy(), np.zeros(batch.num_rows, np.int64)
        own = StepRows(
            rows=rows,
            kv_lens=batch.kv_lens.numpy(),
            is_bound=none,
            query_lens=batch.query_lens_cpu.astype(np.int64),
            num_drafts=none,
            is_sampled=none,
        )
        slots = self._slots_of(rows, own.query_lens)
        return decoder_forward(batch.input_ids.numpy(), own, slots, self._tables_for(slots))

    def can_step(self, plan: StepPlan) -> bool:
        """Whether each sampled row needs at most noise: no filters, penalties, masks, logprobs or
        prompt results."""
        return (
            plan.prompts is None
            and not len(plan.held_rows)
            and plan.query_lens.max(initial=0) <= FEW_TOKENS
            and all(part.is_plain and not part.needs_filter for part in plan.logits.slices)
        )

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        return self.verify(plan).packed

    def verify(self, plan: StepPlan) -> FusedWindows:
        own = _rows_of(plan)
        slots = self._slots_of(own.rows, own.query_lens)
        ids = plan.input_ids.astype(np.int64)
        iteration = stamp_of(plan.iteration)
        done = decoder_step(ids, own, slots, iteration, self._tables_for(slots))
        num, width = len(plan.logits.rows), int(plan.logits.windows.max(initial=1))
        layout = Layout(num, width, len(plan.logits.tokens), 0, 0, num_prompt_words=0)
        packed = Packed(done.words, layout)
        return FusedWindows(packed, done.counts, done.token_ids, done.kv_lens, done.hidden)

    def draft_chain(self, plan: StepPlan) -> None:
        own = _rows_of(plan)
        order = np.argsort(-own.num_drafts, kind="stable")[: np.count_nonzero(own.num_drafts)]
        ones = np.ones(len(order), np.int64)
        rows = StepRows(
            rows=own.rows[order],
            kv_lens=own.kv_lens[order],
            is_bound=own.is_bound[order],
            query_lens=ones,
            num_drafts=own.num_drafts[order],
            is_sampled=np.zeros_like(ones),
        )
        slots = self._slots_of(rows.rows, ones)
        draft_chain(rows, slots, self._tables_for(slots))

    def extend(self, plan: StepPlan, windows: FusedWindows) -> None:
        """A chain lacks the KV of its last draft, which matters if all drafts were accepted."""
        query_lens, num_drafts = plan.query_lens.astype(np.int64), plan.num_drafts
        starts, query_lens = query_lens.cumsum() - query_lens, query_lens.copy()
        is_whole = windows.counts == 1 + num_drafts
        num_new = np.where(num_drafts == 0, query_lens, is_whole.astype(np.int64))
        has_new = np.flatnonzero(num_new)
        if not len(has_new):
            return
        kept, lens = query_lens[has_new], num_new[has_new]
        none = np.zeros_like(lens)
        rows = StepRows(
            rows=plan.rows[has_new].astype(np.int64),
            kv_lens=windows.kv_lens[has_new] + kept - lens,
            is_bound=none,
            query_lens=lens,
            num_drafts=none,
            is_sampled=none,
        )
        firsts = np.repeat(starts[has_new] + kept - lens - (lens.cumsum() - lens), lens)
        ids = windows.token_ids[firsts + np.arange(len(firsts))]
        slots = self._slots_of(rows.rows, lens)
        decoder_forward(ids, rows, slots, self._tables_for(slots))

    def _slots_of(self, rows: Int64s, query_lens: Int64s) -> Int64s:
        """Returns the adapter slot of each token, [tokens]."""
        slots = self._state.tables.int_table.numpy()[rows, INT_COLUMNS.index("lora_slot")]
        return np.repeat(slots, query_lens)

    def _tables_for(self, slots: Int64s) -> Tables:
        return self._adapted if slots.any() else self._plain

    def _describe_model(self) -> Records:
        decoder, pools = self._decoder, self._state.pools
        tables, relay = self._state.tables, self._state.relay
        config = decoder.spec.config
        table_rows, table_columns = pools.page_tables[0].shape
        values = {
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "vocab": config.vocab_size,
            "max_len": decoder.max_model_len,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rotary_dim": config.rotary_dim,
            "page_size": pools.page_size,
            "table_rows": table_rows,
            "table_columns": table_columns,
            "activation": ACTIVATIONS[config.activation],
            "embeddings": decoder.embeddings.data_ptr(),
            "first_norm": self._norm(decoder.first_norm),
            **_product("head", decoder.head),
            "token_pool": pools.token_pool.data_ptr(),
            "num_slots": len(pools.token_pool),
            "token_pages": pools.page_tables[0].data_ptr(),
            "last_token": relay.table(LAST_TOKEN).data_ptr(),
            "written_iter": relay.written_iter.data_ptr(),
            "seq_len": relay.table(SEQ_LEN).data_ptr() if SEQ_LEN in relay else 0,
            "drafts": relay.table(DRAFTS).data_ptr() if DRAFTS in relay else 0,
            "max_drafts": relay.table(DRAFTS).shape[1] if DRAFTS in relay else 0,
            **_column("seed", tables.int_table, INT_COLUMNS),
            **_column("temperature", tables.float_table, FLOAT_COLUMNS),
            "eps": config.rms_norm_eps,
            "residual_scale": decoder.spec.residual_scale,
            "embedding_factor": decoder.embedding_factor,
            "logit_divisor": decoder.spec.logit_divisor,
            "logit_softcap": decoder.spec.logit_softcap or 0.0,
        }
        return _record(np.zeros(1, MODEL), values)

    def _describe_layer(self, record: Records, block: Block) -> None:
        attention, mlp = block.mixer, block.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GatedMlp)
        layer = attention.layer
        kv = self._state.pools.layers[layer.index]
        factor, cap = fold_log2(layer.scale, layer.softcap)
        head_norms = attention.head_norms
        values = {
            **_product("qkv", attention.qkv),
            **_product("out", attention.out),
            **_product("gate_up", mlp.gate_up),
            **_product("down", mlp.down),
            "head_norms": 0 if head_norms is None else head_norms.weight.data_ptr(),
            "after_attention": self._norm(block.after_attention),
            "before_mlp": self._norm_of_sum(block.before_mlp),
            "after_mlp": self._norm(block.after_mlp),
            "before_next": self._norm_of_sum(block.before_next),
            "cos_sin": self._decoder.rotaries[block.rotary].table.data_ptr(),
            "keys": kv.keys.data_ptr(),
            "values": kv.values.data_ptr(),
            "num_slots": len(kv.keys),
            "page_table": self._state.pools.page_tables[kv.group].data_ptr(),
            "window": NO_WINDOW if layer.window is None else layer.window,
            "factor": factor,
            "cap": cap,
            "head_eps": 0.0 if head_norms is None else head_norms.eps,
        }
        _record(record, values)

    def _norm(self, norm: Norm) -> int:
        """The address of a norm's weight in float32; 0 for no norm."""
        if not isinstance(norm, CompiledNorm | RmsNorm):
            return 0
        self._kept.append(norm.weight.float().contiguous())
        return self._kept[-1].data_ptr()

    def _norm_of_sum(self, norm: SumAndNorm) -> int:
        assert isinstance(norm, AddNorm)  # all that the CPU's operators make
        return self._norm(norm.norm)


def _rows_of(plan: StepPlan) -> StepRows:
    return StepRows(
        rows=plan.rows.astype(np.int64),
        kv_lens=plan.kv_lens.astype(np.int64),
        is_bound=plan.is_bound.astype(np.int64),
        query_lens=plan.query_lens.astype(np.int64),
        num_drafts=plan.num_drafts.astype(np.int64),
        is_sampled=np.isin(plan.rows, plan.logits.rows).astype(np.int64),
    )


def _describe_loras(decoder: Decoder) -> Records:
    """Returns the records of all layers' adapters, in the order of LORA_LAYERS."""
    stacks = [
        product.stack
        for block in decoder.blocks
        for product in _products(block)
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
        _record(records[index : index + 1], values)
    return records


def make_compiled_forward(model: CausalModel, state: DeviceState) -> CompiledForward | None:
    if not isinstance(model, Decoder) or state.pools.dtype != model.dtype:
        return None
    if not all(map(_is_covered, model.blocks)) or not isinstance(model.head, TiledLinear):
        return None
    compile_decoder_forward(model.dtype)
    return CompiledForward(model, state)


def _is_covered(block: Block) -> bool:
    attention, mlp = block.mixer, block.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMlp):
        return False
    are_tiled = all(isinstance(_plain(product), TiledLinear) for product in _products(block))
    return are_tiled and attention.joint_norm is None


def _products(block: Block) -> tuple[LinearOp, LinearOp, LinearOp, LinearOp]:
    """Returns the linear layers, in the order of LORA_LAYERS."""
    attention, mlp = block.mixer, block.mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GatedMlp)
    return attention.qkv, attention.out, mlp.gate_up, mlp.down


def _plain(product: LinearOp) -> LinearOp:
    """Returns the layer without its adapters."""
    return product.base if isinstance(product, LoraLinear) else product


def _product(name: str, product: LinearOp) -> dict[str, int]:
    product = _plain(product)
    assert isinstance(product, TiledLinear)
    return {name: product.packed.ctypes.data, f"{name}_bias": product.bias.ctypes.data}


def _column(name: str, table: Tensor, columns: tuple[str, ...]) -> dict[str, int]:
    return {
        f"{name}s": table[:, columns.index(name)].data_ptr(),
        f"{name}_columns": table.shape[1],
    }


def _record(record: Records, values: Mapping[str, float]) -> Records:
    assert record.dtype.names is not None
    assert set(values) == set(record.dtype.names)
    for name, value in values.items():
        record[name] = value
    return record
