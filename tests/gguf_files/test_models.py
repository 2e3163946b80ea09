"""Each family in a GGUF file, against the model directory that it was made of."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gguf import model_dir
from aserve.gguf.families import FAMILIES
from aserve.gguf.metadata import Metadata, read_metadata
from aserve.gguf.model_dir import gguf_model_dir
from aserve.host.hub import resolve_model_dir
from tests.gguf_files.files import Values, write_gguf
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of
from tests.parity.references import STRETCHED, VOCAB_SIZE, YARN_MSCALE, new_model

MAX_MODEL_LEN = 64
MXFP4 = GGMLQuantizationType.MXFP4
SAME_WIDTH: dict[str, Any] = {"hidden_size": 64}  # as GGUF has it: that of all heads together
# As the file has them, whose weights have the factors in them.
NO_FACTORS: dict[str, Any] = {
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "ssm_in_multiplier"), 1.0),
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
    "ssm_out_multiplier": 1.0,
}
ONE_GROUP: dict[str, Any] = {"n_group": 1, "topk_group": 1}
# Files have one factor for both.
NO_RATIO: dict[str, Any] = {
    "rope_parameters": {**YARN_MSCALE, "mscale": 0.7, "mscale_all_dim": 0.7, **STRETCHED}
}
NO_RULE: dict[str, Any] = {"query_pre_attn_scalar": 16}  # that of all but the largest Gemma

# (kind of tests/parity/references.py, what differs from it, architecture of GGUF)
KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "llama"),
    ("llama-tied", {}, "llama"),
    ("llama-linear", {}, "llama"),
    ("llama-yarn", {}, "llama"),
    ("llama-llama3", {}, "llama"),
    ("deepseek2", {}, "deepseek2"),
    ("deepseek2-lite", ONE_GROUP, "deepseek2"),
    ("deepseek3", NO_RATIO, "deepseek2"),
    ("deepseek32-yarn", NO_RATIO, "deepseek32"),
    ("dots1", {}, "dots1"),
    ("ernie4.5", {}, "ernie4_5"),
    ("ernie4.5-moe", {"moe_layer_interval": 2, "moe_layer_start_index": 0}, "ernie4_5-moe"),
    ("exaone4", {}, "exaone4"),
    ("exaone4-mixed", {}, "exaone4"),
    ("falcon-h1", NO_FACTORS, "falcon-h1"),
    ("falcon-h1-late-norm", NO_FACTORS, "falcon-h1"),
    ("gemma", {}, "gemma"),
    ("gemma2", NO_RULE, "gemma2"),
    ("gemma3", {**NO_RULE, "num_hidden_layers": 7, "sliding_window_pattern": 6}, "gemma3"),
    ("glm4", {"attention_bias": True}, "glm4"),
    ("glm4-lite", {}, "deepseek2"),
    ("glm4-moe", {}, "glm4moe"),
    ("gpt-oss", {}, "gpt-oss"),
    ("granite", SAME_WIDTH, "granite"),
    ("granite-hybrid", {**SAME_WIDTH, "mamba_n_heads": 4}, "granitehybrid"),
    ("granite-hybrid-dense", {**SAME_WIDTH, "mamba_n_heads": 4}, "granitehybrid"),
    ("granite-moe", SAME_WIDTH, "granitemoe"),
    ("granite-moe-shared", SAME_WIDTH, "granitemoe"),
    ("lfm2", {"block_auto_adjust_ff_dim": False}, "lfm2"),
    ("lfm2-moe", {}, "lfm2moe"),
    ("minimax-m2", {}, "minimax-m2"),
    ("ministral3", {}, "mistral3"),
    ("mistral-full", {}, "mistral3"),
    ("mixtral", {"sliding_window": None}, "llama"),
    ("nemotron-h", {}, "nemotron_h_moe"),
    ("nemotron-h-dense", {}, "nemotron_h"),
    ("olmo2", {}, "olmo2"),
    ("olmo3-yarn", {}, "olmo2"),
    ("olmoe", {}, "olmoe"),
    ("phi3", {}, "phi3"),
    ("phi3-longrope", {}, "phi3"),
    ("qwen2", {}, "qwen2"),
    ("qwen2-moe", {"norm_topk_prob": False}, "qwen2moe"),
    ("qwen2", {}, "qwen2vl"),
    ("qwen3-tied", {}, "qwen3"),
    ("qwen3", {}, "qwen3vl"),
    ("qwen3.5-interval", {"attention_bias": False}, "qwen35"),
    ("qwen3.5-moe", {}, "qwen35moe"),
    ("qwen3-moe", {"mlp_only_layers": []}, "qwen3moe"),
    ("qwen3-moe", {"mlp_only_layers": []}, "qwen3vlmoe"),
    ("qwen3-next", {"mlp_only_layers": []}, "qwen3next"),
    ("seed-oss", {}, "seed_oss"),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}, "smollm3"),
]

# Sizes that are whole blocks of 32.
WHOLE_BLOCKS = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32)
WHOLE_KEYS: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
IN_BLOCKS: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek2", {**SAME_WIDTH, **WHOLE_BLOCKS, "intermediate_size": 96}, "deepseek2"),
    (
        "qwen3-next",
        {
            **SAME_WIDTH,
            **WHOLE_KEYS,
            "mlp_only_layers": [],
            "shared_expert_intermediate_size": 32,
        },
        "qwen3next",
    ),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(kind: str, folder: Path, **sizes: Any) -> Path:
    new_model(kind, **sizes).save_pretrained(folder)
    return folder


def logits_in(directory: Path) -> Tensor:
    tokens = torch.arange(MAX_MODEL_LEN) * 37 % VOCAB_SIZE
    return logits_of(load_model(directory, max_model_len=MAX_MODEL_LEN), tokens)


def assert_alike(left: Path, right: Path) -> None:
    torch.testing.assert_close(logits_in(left), logits_in(right), atol=1e-4, rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "arch"), KINDS, ids=[f"{arch}-{kind}" for kind, _, arch in KINDS]
)
def test_a_file_has_the_model_that_it_was_made_of(
    kind: str, sizes: dict[str, Any], arch: str, tmp_path: Path
) -> None:
    directory = saved(kind, tmp_path / "model", **sizes)
    file = write_gguf(directory, tmp_path / "model.gguf", arch)
    assert_alike(gguf_model_dir(file), directory)


def test_matrices_in_mxfp4_are_what_their_blocks_stand_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    directory = saved("gpt-oss", tmp_path / "model", **sizes)
    own = write_gguf(directory, tmp_path / "own.gguf", "gpt-oss", kind="MXFP4")
    names = [name for name, each in read_metadata(own).tensors.items() if each.kind == MXFP4]
    changed = dict.fromkeys(names, partial(as_blocks, kind=MXFP4))
    wide = write_gguf(directory, tmp_path / "wide.gguf", "gpt-oss", changed=changed)
    assert sum("exps" in name for name in names) == 9
    assert_alike(gguf_model_dir(own), gguf_model_dir(wide))


def as_blocks(values: Values, *, kind: GGMLQuantizationType) -> Values:
    stored = gguf.quants.quantize(values, kind)
    widened: Values = gguf.dequantize(stored, kind)
    return widened.reshape(values.shape)


@pytest.mark.parametrize(("kind", "sizes", "arch"), IN_BLOCKS, ids=[each for *_, each in IN_BLOCKS])
def test_what_lies_otherwise_in_a_file_may_be_in_blocks(
    kind: str, sizes: dict[str, Any], arch: str, tmp_path: Path
) -> None:
    directory = saved(kind, tmp_path / "model", **sizes)
    own = write_gguf(directory, tmp_path / "own.gguf", arch, kind="Q4_0")
    stored = GGMLQuantizationType.Q4_0
    names = [name for name, each in read_metadata(own).tensors.items() if each.kind == stored]
    changed = dict.fromkeys(names, partial(as_blocks, kind=stored))
    wide = write_gguf(directory, tmp_path / "wide.gguf", arch, changed=changed)
    assert {"blk.1.attn_k_b.weight", "blk.0.ssm_ba.weight"} & {*names}
    assert_alike(gguf_model_dir(own), gguf_model_dir(wide))


@pytest.mark.parametrize("kind", ["deepseek2", "deepseek3"])
def test_older_files_of_latent_attention_have_one_projection(kind: str, tmp_path: Path) -> None:
    """Their sizes of heads are not those of latents."""
    sizes = NO_RATIO if kind == "deepseek3" else {}
    directory = saved(kind, tmp_path / "model", **sizes)
    old = {"is_old": True, "scoring_func": "sigmoid" if kind == "deepseek3" else "softmax"}
    file = write_gguf(directory, tmp_path / "model.gguf", "deepseek2", others=old)
    assert_alike(gguf_model_dir(file), directory)


@pytest.mark.parametrize("kind", ["deepseek2", "qwen3-next", "glm4-moe"])
def test_layers_of_multi_token_prediction_are_not_read(kind: str, tmp_path: Path) -> None:
    sizes, arch = {each: (own, arch) for each, own, arch in KINDS}[kind]
    directory = saved(kind, tmp_path / "model", **sizes)
    more = {"num_nextn_predict_layers": 2}
    file = write_gguf(directory, tmp_path / "model.gguf", arch, others=more)
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    assert f"blk.{num_layers + 1}.nextn.enorm.weight" in read_metadata(file).tensors
    assert_alike(gguf_model_dir(file), directory)


def test_the_gate_of_a_shared_expert_may_be_a_vector(tmp_path: Path) -> None:
    """Older converters drop dimensions of 1."""
    directory = saved("qwen2-moe", tmp_path / "model", norm_topk_prob=False)
    gates = {f"blk.{layer}.ffn_gate_inp_shexp.weight": np.squeeze for layer in range(3)}
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2moe", changed=gates)
    assert_alike(gguf_model_dir(file), directory)


def test_every_family_is_compared() -> None:
    assert {arch for *_, arch in KINDS} == FAMILIES.keys()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_weights_of_16_bits_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    model = new_model("llama")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    model.to(dtype).float().save_pretrained(tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "llama", kind=kind)
    directory = gguf_model_dir(file)
    assert_alike(directory, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    directory = saved("qwen3", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen3", max_tensors=10)
    assert file.name == "model-00001-of-00004.gguf"
    assert_alike(gguf_model_dir(file), directory)


def test_a_missing_one_of_several_files_is_named(tmp_path: Path) -> None:
    directory = saved("qwen3", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen3", max_tensors=10)
    (tmp_path / "model-00003-of-00004.gguf").unlink()
    with pytest.raises(ConfigError, match="one of 00004 files, of which model-00003-of-00004"):
        gguf_model_dir(file)


def test_a_directory_is_made_once_for_each_state_of_a_file(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2")
    first = gguf_model_dir(file)
    assert gguf_model_dir(file) == first

    def doubled(values: Values) -> Values:
        return 2 * values

    write_gguf(directory, file, "qwen2", changed={"output_norm.weight": doubled})
    second = gguf_model_dir(file)
    assert second != first
    assert not torch.equal(logits_in(second), logits_in(directory))


def test_an_unknown_architecture_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "internlm2")
    with pytest.raises(
        ConfigError, match=r"'internlm2' are not read, only those of deepseek2, deepseek32"
    ):
        gguf_model_dir(file)


def test_a_process_that_was_faster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved("qwen2", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2")
    found: list[Path] = []

    def read_later(path: Path) -> Metadata:
        monkeypatch.setattr(model_dir, "read_metadata", read_metadata)
        found.append(gguf_model_dir(path))
        return read_metadata(path)

    monkeypatch.setattr(model_dir, "read_metadata", read_later)
    assert [gguf_model_dir(file)] == found
    assert [each.name for each in found[0].parent.iterdir()] == [found[0].name]
    assert_alike(found[0], directory)


def test_a_type_that_is_not_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2")
    made = gguf_model_dir(file)
    table = msgspec.json.decode((made / "gguf.json").read_bytes())
    table["tensors"]["model.norm.weight"] |= {"kind": int(GGMLQuantizationType.I32)}
    (made / "gguf.json").write_bytes(msgspec.json.encode(table))
    with pytest.raises(ConfigError, match=r"model.norm.weight cannot be read: .* type I32"):
        load_model(made, max_model_len=MAX_MODEL_LEN)


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path: Path) -> None:
    directory = saved("qwen3", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen3")
    renamed = file.read_bytes().replace(b"blk.0.attn_q_norm", b"blk.x.attn_q_norm")
    file.write_bytes(renamed)
    with pytest.raises(ConfigError, match=r"tensor blk.x.attn_q_norm.weight is unknown in .*qwen3"):
        gguf_model_dir(file)


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "model")
    (directory / "gguf.json").write_text('{"num_files": "one"}')
    with pytest.raises(ConfigError, match=r"gguf.json is no table of a GGUF file: "):
        load_model(directory, max_model_len=MAX_MODEL_LEN)


def test_a_directory_of_a_file_says_how_to_serve_it(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_0.gguf").touch()
    with pytest.raises(ConfigError, match=r"no config.json; to serve model-Q4_0.gguf, name that"):
        resolve_model_dir(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is not a readable GGUF file"), (b"GGUF" + bytes(3), "is not a readable GGUF file")],
)
def test_what_is_no_gguf_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        gguf_model_dir(tmp_path / "model.gguf")


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2")
    made = gguf_model_dir(file)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cut off"):
        load_model(made, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(ConfigError, match="is not a readable GGUF file"):
        gguf_model_dir(file)
