"""What a GGUF file says beside its tensors: the tokenizer, the chat template and the ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from aserve.engine import Engine
from aserve.errors import ConfigError
from aserve.gguf.metadata import Metadata, StoredBlocks
from aserve.gguf.model_dir import gguf_model_dir
from aserve.gguf.settings import config_of, generation_config_of, tokenizer_config_of
from aserve.text.load import load_tokenizer
from aserve.text.model_files import load_template
from aserve.tiny import MODEL_DIR
from tests.gguf_files.files import write_gguf

PROMPTS = [[5, 6, 7, 800, 901, 44], [1, 77, 1200]]
SIZES = {
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NOTHING: Mapping[str, Any] = MappingProxyType({})
EMBEDDING = {"token_embd.weight": StoredBlocks(0, 0, (20, 32), 0, 2560)}


def metadata(*, own: Mapping[str, Any] = NOTHING, general: Mapping[str, Any] = NOTHING) -> Metadata:
    values = {f"llama.{name}": value for name, value in {**SIZES, **own}.items()}
    values |= {"general.architecture": "llama", **general}
    return Metadata((Path("m.gguf"),), values, EMBEDDING)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MODEL_DIR, tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_bundled_model_answers_from_a_file_as_from_its_directory(tiny_file: Path) -> None:
    texts = []
    for model in (str(tiny_file), str(MODEL_DIR)):
        with Engine(model=model, max_model_len=128) as engine:
            answers = engine.generate_sync(PROMPTS, max_tokens=16, temperature=0.0)
            texts.append([answer.text for answer in answers])
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_the_tokenizer_is_made_of_the_file(tiny_file: Path) -> None:
    tokenizer, own = load_tokenizer(gguf_model_dir(tiny_file)), load_tokenizer(MODEL_DIR)
    assert tokenizer.eos_ids == own.eos_ids
    text = "<|user|> What does f(x) = x² mean in 2026?\n"
    ids = tokenizer.encode(text, with_special=False)
    assert b"".join(map(own.token_bytes, ids)).decode() == text
    assert ids[0] == own.encode("<|user|>", with_special=False)[0]


# The words that llama.cpp and the models' own tokenizers cut these texts into.
WORDS = [
    ("qwen2", "x 12;\n", ["x", "Ġ", "1", "2", ";Ċ"]),
    ("seed-coder", "x 12;\n", ["x", "Ġ", "1", "2", ";", "Ċ"]),
    ("llama-bpe", "It'S 12345", ["It", "'S", "Ġ", "123", "45"]),
    ("glm4", "It'S 12345", ["It", "'S", "Ġ", "123", "45"]),
    ("gpt-2", "It'S 12345", ["It", "'", "S", "Ġ12345"]),
    ("smollm", "It's 123", ["It", "'s", "Ġ", "1", "2", "3"]),
    ("tekken", "aBc 12", ["a", "Bc", "Ġ", "1", "2"]),
    ("gpt-4o", "aBc's 1234", ["a", "Bc's", "Ġ", "123", "4"]),
    ("deepseek-v3", "a=b 1234", ["a", "=b", "Ġ", "123", "4"]),
    ("deepseek-llm", "a=b 1234\n", ["a", "=", "b", "Ġ", "1234", "Ċ"]),
    ("default", "a$=b 1234", ["a", "$=", "b", "Ġ", "123", "4"]),
]


@pytest.mark.parametrize(("name", "text", "words"), WORDS, ids=[name for name, _, _ in WORDS])
def test_texts_are_cut_into_words_as_the_file_names_it(
    name: str, text: str, words: list[str], tmp_path: Path
) -> None:
    others = {"tokenizer_pre": name}
    directory = gguf_model_dir(write_gguf(MODEL_DIR, tmp_path / "m.gguf", "llama", others=others))
    load_tokenizer(directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words
    assert backend.model.ignore_merges == (name in ("llama-bpe", "glm4", "tekken"))


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    others = {"tokenizer_pre": "words-of-tomorrow"}
    directory = gguf_model_dir(write_gguf(MODEL_DIR, tmp_path / "m.gguf", "llama", others=others))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre is 'words-of-tomorrow'.*--tokenizer"
    ):
        load_tokenizer(directory)


def test_the_tokenizer_is_made_once(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = gguf_model_dir(tiny_file)
    first = load_tokenizer(directory)
    monkeypatch.setattr("aserve.text.load._convert_backend", None)
    second = load_tokenizer(directory)
    text = "<|user|> Once upon a time"
    assert second.encode(text, with_special=True) == first.encode(text, with_special=True)
    assert not [path.name for path in directory.iterdir() if path.name.startswith("tmp")]


def test_the_chat_template_is_that_of_the_file(tiny_file: Path) -> None:
    found, own = load_template(gguf_model_dir(tiny_file)), load_template(MODEL_DIR)
    assert found is not None
    assert own is not None
    assert found.source == own.source


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_texts_begin_with_a_token_as_llama_cpp_does_it(said: dict[str, Any], begins: bool) -> None:
    assert tokenizer_config_of(metadata(general=said))["add_bos_token"] is begins


def test_known_ends_of_turns_end_an_answer_beside_the_named_ones() -> None:
    said = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 1],
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert generation_config_of(metadata(general=said)) == {"eos_token_id": [1, 3]}


def test_rope_may_rotate_a_part_of_each_head() -> None:
    config = config_of(
        metadata(own={"rope.dimension_count": 4}), dtype="float32", is_quantized=False
    )
    assert (config["head_dim"], config["partial_rotary_factor"]) == (8, 0.5)


def test_the_bounds_of_yarn_are_those_of_the_file() -> None:
    scaling = {"factor": 8.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    own: dict[str, Any] = {"rope.scaling.type": "yarn"}
    own |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    config = config_of(metadata(own=own), dtype="float32", is_quantized=False)
    bounds = {"beta_fast": 16.0, "beta_slow": 2.0}
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 8.0, **bounds}


@pytest.mark.parametrize("log_multiplier", [0.0, 1.0])
def test_queries_that_positions_scale_are_those_of_ministral_3(log_multiplier: float) -> None:
    """Mistral Small has none. Without a multiplier yarn scales attention."""
    yarn = {"type": "yarn", "factor": 16.0, "yarn_log_multiplier": log_multiplier}
    own = {"attention.temperature_scale": 0.1} | {f"rope.scaling.{n}": v for n, v in yarn.items()}
    values: dict[str, Any] = {f"mistral3.{name}": value for name, value in (SIZES | own).items()}
    values |= {"general.architecture": "mistral3"}
    file = Metadata((Path("m.gguf"),), values, EMBEDDING)
    config = config_of(file, dtype="float32", is_quantized=False)
    scales = {"mscale": 10.0, "mscale_all_dim": 10.0} if log_multiplier else {}
    assert config["architectures"] == ["Ministral3ForCausalLM"]
    expected = {"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1, **scales}
    assert config["rope_scaling"] == expected


def test_a_missing_size_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match="block_count is missing; expected an integer"):
        config_of(metadata(own={"block_count": None}), dtype="float32", is_quantized=False)


@pytest.mark.parametrize("counts", [[4, 8], 0, [0, 0]])
def test_a_size_that_differs_by_layer_or_is_0_is_refused(counts: object) -> None:
    message = rf"head_count is '{re.escape(str(counts))}'; expected the same integer .* not 0"
    with pytest.raises(ConfigError, match=message):
        config_of(
            metadata(own={"attention.head_count": counts}), dtype="float32", is_quantized=False
        )


def test_the_rows_of_layers_are_those_of_the_first_that_has_the_tensor() -> None:
    stored = {f"blk.1.{name}.weight": StoredBlocks(0, 0, (6, 32), 0, 768) for name in ("up", "a.b")}
    values = {"general.architecture": "llama", "llama.block_count": 2}
    file = Metadata((Path("m.gguf"),), values, stored)
    assert file.rows_in_layers("up.weight") == 6
    assert file.rows_in_layers("down.weight") is None
    assert file.is_in_layers("a.b.weight")


def test_layers_without_attention_have_no_heads_of_keys() -> None:
    own = {"attention.head_count_kv": [0, 2]}
    config = config_of(metadata(own=own), dtype="float32", is_quantized=False)
    assert config["num_key_value_heads"] == 2


def test_a_tied_head_in_blocks_is_multiplied_in_blocks(tmp_path: Path) -> None:
    file = write_gguf(MODEL_DIR, tmp_path / "tiny.gguf", "llama", kind="Q4_0")
    directory = gguf_model_dir(file)
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"] == {"quant_method": "gguf"}
    table = msgspec.json.decode((directory / "gguf.json").read_bytes())
    assert table["tensors"]["lm_head.weight"] == table["tensors"]["model.embed_tokens.weight"]
    with Engine(model=str(file), max_model_len=128) as engine:
        (answer,) = engine.generate_sync(["Once upon a time"], max_tokens=16, temperature=0.0)
    assert answer.text.strip()
