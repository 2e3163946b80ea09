"""Writes a model directory as a GGUF file, as llama.cpp's converter does: names are by the package
gguf, and values are changed in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file

Values = npt.NDArray[np.float32]
Tensors = Iterator[tuple[str, Values]]
SUFFIXES = (".weight", ".bias")
NEIGHBOURS = ("llama", "granite", "granitehybrid", "granitemoe", "mistral3", "smollm3")
ADDS_ONE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
INDEXER = {"wk": "attn_k", "wq_b": "attn_q_b", "k_norm": "k_norm", "weights_proj": "proj"}
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Tensors that have a name each in GGUF, by their ends, in order of their rows.
HALVES = {
    ".block_sparse_moe.input_linear.weight": (".mlp.experts.gate_proj", ".mlp.experts.up_proj"),
    ".block_sparse_moe.output_linear.weight": (".mlp.experts.down_proj",),
    ".shared_mlp.input_linear.weight": (
        ".mlp.shared_experts.gate_proj",
        ".mlp.shared_experts.up_proj",
    ),
    ".shared_mlp.output_linear.weight": (".mlp.shared_experts.down_proj",),
    ".block_sparse_moe.router.layer.weight": (".mlp.gate",),
}
JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def write_gguf(
    directory: Path,
    path: Path,
    arch: str,
    *,
    kind: str = "F32",
    max_tensors: int = 0,
    changed: Mapping[str, Callable[[Values], Values]] | None = None,
    others: Mapping[str, object] | None = None,
) -> Path:
    """Writes matrices in a format of gguf.GGMLQuantizationType, and returns the (first) path. With
    `max_tensors` there are several files. `changed` are values by their names in GGUF. `others` are
    fields of config.json that the directory does not have."""
    config = json.loads((directory / "config.json").read_text()) | (others or {})
    writer = GGUFWriter(path, arch, split_max_tensors=max_tensors)
    _add_sizes(writer, config, arch)
    _add_tokenizer(writer, directory, config)
    stored = GGMLQuantizationType[kind]
    for name, values in _tensors(directory, config, arch):
        values = (changed or {}).get(name, np.asarray)(values)
        is_matrix = values.ndim > 1 and "conv" not in name and "ffn_gate_inp" not in name
        is_matrix &= not name.endswith(("ssm_alpha.weight", "ssm_beta.weight", ".bias"))
        if is_matrix and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(path.parent.glob(f"{path.stem}*.gguf"))
    return found[0]


def _add_sizes(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    num_layers, num_heads = _num_layers(config), config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    num_drafting = config.get("num_nextn_predict_layers", 0)
    writer.add_block_count(num_layers + num_drafting)
    if num_drafting:
        writer.add_nextn_predict_layers(num_drafting)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    eps = (config.get(name) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    writer.add_layer_norm_rms_eps(next(filter(None, eps)))
    writer.add_rope_freq_base(full.get("rope_theta", 10_000.0))
    if arch == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for name, add in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
    ):
        if full.get(name):
            add(full[name])
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    trained_len = full.get("original_max_position_embeddings")
    trained_len = config.get("original_max_position_embeddings") or trained_len
    if trained_len and rope.get("rope_type") != "llama3":
        writer.add_rope_scaling_orig_ctx_len(trained_len)
    if "attention_multiplier" in config:  # Granite
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    _add_own(writer, config, arch)


def _add_mamba(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    num_heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    head_dim = config.get("mamba_d_head") or config["mamba_head_dim"]
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config["conv_kernel"])
    writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
    writer.add_ssm_group_count(config.get("mamba_n_groups") or config["n_groups"])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * head_dim)
    if arch.startswith("nemotron_h"):
        writer.kv_data[0].pop(f"{arch}.attention.layer_norm_rms_epsilon")
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    if arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _add_latents(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """Has the sizes of latents, or those of heads, as older files have them."""
    q_rank, kv_rank, nope_dim, rope_dim, value_dim = (config[name] for name in LATENT_SIZES)
    for key in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        writer.kv_data[0].pop(f"{arch}.{key}")
    if config.get("is_old"):
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(nope_dim + rope_dim)
        writer.add_value_length(value_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(kv_rank + rope_dim)
        writer.add_value_length(kv_rank)
        writer.add_key_length_mla(nope_dim + rope_dim)
        writer.add_value_length_mla(value_dim)
    if q_rank:
        writer.add_q_lora_rank(q_rank)
    writer.add_kv_lora_rank(kv_rank)
    for key, size in (
        ("head_count", "index_n_heads"),
        ("key_length", "index_head_dim"),
        ("top_k", "index_topk"),
    ):
        if size in config:
            writer.add_uint32(f"{arch}.attention.indexer.{key}", config[size])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config.get("scoring_func") == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if (mscale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _add_own(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    match arch:
        case "gemma2":
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        case "granitehybrid" | "falcon-h1" | "nemotron_h" | "nemotron_h_moe":
            _add_mamba(writer, config, arch)
        case "dots1" | "glm4moe":
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_leading_dense_block_count(config["first_k_dense_replace"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            part = config["rope_parameters"].get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(int(part * config["head_dim"]))
        case "ernie4_5-moe":
            writer.add_expert_count(config["moe_num_experts"])
            writer.add_expert_used_count(config["moe_k"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_count(config["moe_num_shared_experts"])
            writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
            writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        case "mistral3" if config["model_type"] == "ministral3":
            rope = config["rope_parameters"]
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        case "glm4" | "minimax-m2":
            part = config["rope_parameters"]["partial_rotary_factor"]
            writer.add_rope_dimension_count(int(part * config["head_dim"]))
        case "exaone4" | "olmo2" if config.get("sliding_window"):
            kinds = [each == "sliding_attention" for each in config["layer_types"]]
            writer.add_sliding_window_pattern(kinds)
        case "deepseek2" | "deepseek32":
            _add_latents(writer, config, arch)
        case "granitemoe":
            writer.add_expert_shared_feed_forward_length(config.get("shared_intermediate_size", 0))
        case "qwen35" | "qwen35moe" | "qwen3next":
            num_values, kinds = config["linear_num_value_heads"], config["layer_types"]
            writer.add_full_attention_interval(kinds.index("full_attention") + 1)
            if arch != "qwen35":
                is_linear = [each == "linear_attention" for each in kinds]
                writer.add_array(f"{arch}.attention.recurrent_layers", is_linear)
            writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
            writer.add_ssm_state_size(config["linear_key_head_dim"])
            writer.add_ssm_group_count(config["linear_num_key_heads"])
            writer.add_ssm_time_step_rank(num_values)
            writer.add_ssm_inner_size(num_values * config["linear_value_head_dim"])
            head_dim = config["head_dim"]
            part = config["rope_parameters"]["partial_rotary_factor"]
            writer.add_rope_dimension_count(int(part * head_dim))
        case "lfm2" | "lfm2moe":
            count = config["num_key_value_heads"]
            kinds = config["layer_types"]
            by_layer = [count if each == "full_attention" else 0 for each in kinds]
            writer.kv_data[0].pop(f"{arch}.attention.head_count_kv")
            writer.add_head_count_kv(by_layer)
            writer.add_shortconv_l_cache(config["conv_L_cache"])
            writer.add_leading_dense_block_count(config.get("num_dense_layers", 0))
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    if (count := next(filter(None, map(config.get, counts)), None)) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        size = config.get("moe_intermediate_size") or config["intermediate_size"]
        writer.add_expert_feed_forward_length(size)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    path = directory / "tokenizer.json"
    if not path.exists():
        writer.add_tokenizer_model("none")
        return
    tokenizer = json.loads(path.read_text())
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    texts = {number: text for text, number in tokenizer["model"]["vocab"].items()} | special
    numbers = range(config["vocab_size"])
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(config.get("tokenizer_pre", "qwen2"))
    writer.add_token_list([texts[number] for number in numbers])
    writer.add_token_types([3 if number in special else 1 for number in numbers])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    ends = config["eos_token_id"]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[0])
    writer.add_eot_token_id(ends[1])
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())


def _tensors(directory: Path, config: dict[str, Any], arch: str) -> Tensors:
    own = "deepseek2" if arch == "deepseek32" else arch  # which the package does not have
    number = {name: number for number, name in MODEL_ARCH_NAMES.items()}[own]
    names = get_tensor_name_map(number, 2 * _num_layers(config))
    stored = _parts(_joined(directory, in_turns=arch == "gpt-oss"), config)
    for name, values in _with_drafters(stored, config):
        values = _changed(name, values, config, arch)
        dotted = name.replace(".dt_bias", ".dt_proj.bias")
        if ".mixer.experts." in name:
            dotted = name.replace("backbone", "model").replace("mixer", "mlp")
        dotted = dotted.replace("score_correction_bias", "score_correction.bias")
        dotted = dotted.replace(".expert_bias", ".expert_bias.bias")
        dotted = f"{name}.weight" if name.endswith("sinks") else dotted
        if "experts.w" in name:
            dotted = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        found = names.get_name(dotted, try_suffixes=SUFFIXES)
        found = name if name.startswith("blk.") else found
        assert found is not None, name
        yield found, np.ascontiguousarray(values)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope, config["head_dim"])
    if rope.get("rope_type") == "longrope":
        for kind in ("short", "long"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)


def _joined(directory: Path, *, in_turns: bool) -> Tensors:
    """Yields the tensors, and those of all experts of a layer as one. `in_turns`: they are one, and
    have gates and ups in turns of columns."""
    stored = load_file(directory / "model.safetensors")
    experts: dict[str, list[Values]] = {}
    for name in sorted(
        stored, key=lambda each: [int(p) if p.isdigit() else 0 for p in each.split(".")]
    ):
        values = stored[name].float().numpy()
        before, found, after = name.partition(".experts.")
        layer = ".".join(name.split(".")[:3])
        if (ending := name.removeprefix(layer)) in HALVES:
            for part, own in zip(
                HALVES[ending], np.split(values, len(HALVES[ending]), -2), strict=True
            ):
                yield f"{layer}{part}.weight", own
        elif in_turns and found:
            yield from _parted(f"{before}.experts", after, values)
        elif after in JOINED:
            for part, own in zip(
                JOINED[after], np.split(values, len(JOINED[after]), 1), strict=True
            ):
                yield f"{before}.experts.{part}.weight", own
        elif found:
            _number, _, part = after.partition(".")
            experts.setdefault(f"{before}.experts.{part}", []).append(values)
        else:
            yield name, values
    for name, parts in experts.items():
        yield name, np.stack(parts)


def _parts(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Yields the projections of latent attention and of Qwen3-Next as the file has them."""
    for name, values in tensors:
        layer, is_index, rest = name.partition(".self_attn.indexer.")
        if is_index:
            module, _, suffix = rest.partition(".")
            yield f"blk.{layer.rpartition('.')[2]}.indexer.{INDEXER[module]}.{suffix}", values
        elif name.endswith("in_proj_qkvz.weight"):
            num_keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
            value_size = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            sizes = np.cumsum([dim, dim, value_size // num_keys])
            by_head = values.reshape(num_keys, -1, values.shape[-1])
            *qkv, z = (each.reshape(-1, values.shape[-1]) for each in np.split(by_head, sizes, 1))
            yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
            yield name.replace("qkvz", "z"), z
        elif name.endswith("kv_b_proj.weight") and not config.get("is_old"):
            by_head = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            key, value = np.split(by_head, [config["qk_nope_head_dim"]], 1)
            yield name.replace("kv_b", "k_b"), key.swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), value
        else:
            yield name, values


def _with_drafters(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Yields the tensors, and layers of multi-token prediction that have those of the first."""
    num_layers, prefix = _num_layers(config), "model.layers.0."
    for name, values in tensors:
        yield name, values
        if not name.startswith(prefix):
            continue
        for number in range(num_layers, num_layers + config.get("num_nextn_predict_layers", 0)):
            yield name.replace(prefix, f"model.layers.{number}."), values
            if name.endswith("input_layernorm.weight"):
                yield f"blk.{number}.nextn.enorm.weight", values


def _parted(prefix: str, name: str, values: Values) -> Tensors:
    """Experts of gpt-oss: [experts, in, out], and biases [experts, out]."""
    module, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    parts = JOINED[module]
    suffix = "bias" if is_bias else "weight"
    for first, part in enumerate(parts):
        own = values[..., first :: len(parts)]
        yield f"{prefix}.{part}.{suffix}", own if is_bias else own.swapaxes(1, 2)


def _num_layers(config: dict[str, Any]) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def _changed(name: str, values: Values, config: dict[str, Any], arch: str) -> Values:
    if arch in ADDS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if "linear_attn" in name and arch != "qwen3next":
        return _changed_delta(name, values, config)
    if name.endswith(("A_log", ".D")):
        own: Values = -np.exp(values) if name.endswith("A_log") else values
        return own if "linear_attn" in name else own[:, np.newaxis]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if arch in NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values.squeeze(1) if name.endswith(("conv.conv.weight", "conv1d.weight")) else values


def _changed_delta(name: str, values: Values, config: dict[str, Any]) -> Values:
    """Puts value heads that share a key head apart."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first, axis, size = 0, 0, config["linear_value_head_dim"]
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        size = 1
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = 2 * num_keys * config["linear_key_head_dim"]
    elif name.endswith("out_proj.weight"):
        axis = 1
    elif name.endswith("norm.weight"):
        return values
    columns = values.squeeze(1) if values.ndim == 3 else values
    head, tail = np.split(columns.swapaxes(0, axis), [first])
    shape = (num_keys, num_values // num_keys, size, *tail.shape[1:])
    tiled = tail.reshape(shape).swapaxes(0, 1).reshape(tail.shape)
    return np.concatenate([head, tiled]).swapaxes(0, axis)


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> Values:
    """What Llama 3.1 divides each frequency by."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    trained_len = rope["original_max_position_embeddings"]
    divisors = []
    for pair in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (pair / head_dim)
        share = min(max((trained_len / length - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return np.array(divisors, np.float32)
