"""A model directory's files, as checkpoints of different ages have them, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.config import ModelOptions
from aserve.errors import ConfigError
from aserve.parsers.registry import ParserNames
from aserve.receipts.digest import Digests
from aserve.text.defaults import NEUTRAL, GenerationDefaults, load_defaults, overridden
from aserve.text.load import load_text, load_tokenizer
from aserve.text.model_files import load_template
from aserve.tiny import MODEL_DIR
from tests.text.vocabularies import EOS, byte_level_backend

TOOLS: list[dict[str, Any]] = [{"type": "function"}]


def write(folder: Path, **files: object) -> Path:
    """`tokenizer_config={...}` becomes tokenizer_config.json."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def rendered(folder: Path, given: str | None = None, **variables: Any) -> str:
    template = load_template(folder, given)
    assert template is not None
    return template.render([], **variables)


def refusal_of(folder: Path, given: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_template(folder, given)
    return caught.value.message


def test_a_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "old"})
    assert rendered(folder) == "old"
    write(tmp_path, chat_template={"chat_template": "newer"})
    assert rendered(folder) == "newer"
    (folder / "chat_template.jinja").write_text("newest")
    assert rendered(folder) == "newest"


def test_named_templates_are_for_chats_and_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert (rendered(tmp_path), rendered(tmp_path, tools=TOOLS)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert (rendered(tmp_path), rendered(tmp_path, tools=TOOLS)) == ("newer", "newer")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("in a file")
    assert (rendered(tmp_path), rendered(tmp_path, tools=TOOLS)) == ("newer", "in a file")


def test_a_template_sees_the_special_tokens(tmp_path: Path) -> None:
    settings = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
    }
    assert rendered(write(tmp_path, tokenizer_config=settings)) == "<s></s>"
    assert rendered(tmp_path, "[{{ eos_token }}]") == "[</s>]"


@pytest.mark.parametrize("named", [[], [{"name": "rag", "template": "documents"}]])
def test_a_model_without_a_default_template_has_none(tmp_path: Path, named: object) -> None:
    assert load_template(tmp_path) is None
    assert load_template(write(tmp_path, tokenizer_config={"chat_template": named})) is None


def test_a_given_template_has_priority_as_a_file_or_as_text(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "own"})
    file = tmp_path / "mine.txt"
    file.write_text("from a file")
    assert rendered(folder, str(file)) == "from a file"
    assert rendered(folder, "inline{# nothing #}") == "inline"


def test_an_error_in_a_template_names_its_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "{% if %}"})
    where = tmp_path / "tokenizer_config.json"
    assert refusal_of(tmp_path).startswith(f"the chat template of {where} has an error in line 1: ")
    where = tmp_path / "chat_template.jinja"
    where.write_text("fine\n{{ broken")
    assert refusal_of(tmp_path).startswith(f"the chat template of {where} has an error in line 2: ")
    assert "template of --chat-template has an error in line 1" in refusal_of(tmp_path, "{{")
    assert refusal_of(tmp_path, "no/such.jinja").startswith("--chat-template no/such.jinja: there")
    where.write_bytes(b"\xff\xfe")
    assert refusal_of(tmp_path).startswith(f"the chat template {where} cannot be read: ")


@pytest.mark.parametrize("value", [7, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_the_error_of_a_malformed_template_field_names_its_file(
    tmp_path: Path, value: object
) -> None:
    write(tmp_path, tokenizer_config={"chat_template": value})
    assert "tokenizer_config.json: chat_template must be a text or" in refusal_of(tmp_path)


def with_tokenizer(folder: Path, **files: object) -> Path:
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return write(folder, **files)


def test_end_tokens_are_read_from_every_file(tmp_path: Path) -> None:
    assert load_tokenizer(with_tokenizer(tmp_path)).eos_ids == ()
    folder = with_tokenizer(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 8, "text_config": {"eos_token_id": 9}},
        tokenizer_config={"eos_token": {"content": EOS}},
    )
    assert load_tokenizer(folder).eos_ids == (7, 8, 9, 0)


def test_end_tokens_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = with_tokenizer(
        tmp_path,
        generation_config={"eos_token_id": [7, -1, 300, 2**40]},
        config={"text_config": {"vocab_size": 300, "eos_token_id": 299}},
    )
    assert load_tokenizer(folder).eos_ids == (7, 299)
    write(tmp_path, config={})
    assert load_tokenizer(folder).eos_ids == (7, 300)


@pytest.mark.parametrize("config", [{"text_config": None}, {"type_vocab_size": None}])
def test_null_counts_as_absent_in_the_configuration(
    tmp_path: Path, config: dict[str, object]
) -> None:
    folder = with_tokenizer(tmp_path, config={"vocab_size": 300, "eos_token_id": 7} | config)
    assert load_text(folder, ModelOptions()).tokenizer.eos_ids == (7,)


@pytest.mark.parametrize("has_bos", [True, False])
def test_bos_is_added_when_the_settings_say_so(tmp_path: Path, has_bos: bool) -> None:
    folder = with_tokenizer(tmp_path, tokenizer_config={"bos_token": EOS, "add_bos_token": has_bos})
    assert (load_tokenizer(folder).encode("ab", with_special=True)[0] == 0) is has_bos


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000])
def test_an_invalid_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (with_tokenizer(tmp_path) / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json holds no JSON object"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: Input/output error"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "vocab.json"])
def test_a_vocabulary_that_cannot_be_decoded_is_named_and_no_traceback(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes("né".encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{name} .*utf-8"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ({}, "a b\nab\n", r"merges\.txt, line 2: 'ab' is no merge"),
        ({}, "#version: 0.2\na b c\n", r"merges\.txt, line 2: 'a b c' is no merge"),
        ({}, "a b\n\n", r"merges\.txt, line 2: '' is no merge"),
        ({}, "a b\na c\n", r"merges\.txt, line 2: the token 'c' .* not in vocab\.json"),
        ({}, "b a\n", r"merges\.txt, line 1: the token 'ba' .* not in vocab\.json"),
        (None, "a b\n", r"merges\.txt, line 1: the token 'a' .* not in vocab\.json"),
        ({"b": "x"}, "a b\n", r"vocab\.json: the id of the token 'b' is 'x'; expected"),
        ({"b": -1}, "a b\n", r"vocab\.json: the id of the token 'b' is -1; expected"),
        ({"b": 2**40}, "a b\n", r"vocab\.json: the id of the token 'b' is 1099511627776"),
    ],
)
def test_a_malformed_vocabulary_is_named_with_its_line_or_value(
    tmp_path: Path, vocab: dict[str, object] | None, merges: str, message: str
) -> None:
    write_vocabulary(tmp_path, vocab or {}, merges)
    if vocab is None:
        write(tmp_path, vocab={})
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("added_tokens", [], r"added_tokens\.json holds no JSON object"),
        ("added_tokens", {"<x>": None}, r"added_tokens\.json: the id of the token '<x>' is None"),
        ("special_tokens_map", ["x"], r"special_tokens_map\.json holds no JSON object"),
        ("special_tokens_map", {"pad_token": 5}, r"map\.json: pad_token is 5; expected a text, or"),
        ("tokenizer_config", {"bos_token": ["x"]}, r"config\.json: bos_token is \['x'\]; expected"),
        ("tokenizer_config", {"eos_token": {"content": 5}}, r"eos_token is \{'content': 5\}"),
        ("tokenizer_config", {"tokenizer_class": 5}, "tokenizer_class is 5; expected a text"),
        ("tokenizer_config", {"auto_map": []}, r"auto_map is \[\]; expected an object"),
        ("tokenizer_config", {"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]"),
        ("tokenizer_config", {"added_tokens_decoder": {"5": "x"}}, r"decoder is \{'5': 'x'\}"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "x"}}}, "an integer as"),
        ("tokenizer_config", {"extra_special_tokens": {"a": None}}, "a list whose items are"),
        (
            "tokenizer_config",
            {"additional_special_tokens": [5]},
            r"tokens is \[5\]; expected a list",
        ),
    ],
)
def test_special_tokens_of_a_wrong_type_are_named_with_their_file_and_value(
    tmp_path: Path, file: str, content: object, message: str
) -> None:
    write_vocabulary(tmp_path, {}, "a b\n")
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config", {"extra_special_tokens": {"a": "<a>"}, "pad_token": None}),
        ("special_tokens_map", {"additional_special_tokens": ["<a>", "<b>"]}),
    ],
)
def test_special_tokens_in_their_usual_forms_are_read(
    tmp_path: Path, file: str, content: dict[str, object]
) -> None:
    write_vocabulary(tmp_path, {}, "a b\n")
    write(tmp_path, **{file: {"tokenizer_class": "Qwen2Tokenizer"} | content})
    assert "<a>" in load_tokenizer(tmp_path).special_texts


@pytest.mark.slow
def test_what_transformers_cannot_use_of_a_tokenizer_is_no_traceback(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, {}, "a b\n")
    write(tmp_path, config={"model_type": "qwen2", "vocab_size": "x"})
    with pytest.raises(ConfigError, match=r"(?s)transformers cannot read the tokenizer, .*'x'"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_vocabulary_with_windows_line_ends_is_read(tmp_path: Path) -> None:
    """Slow: it imports transformers, which converts the two files."""
    write_vocabulary(tmp_path, {}, "#version: 0.2\r\na b\r\n")
    assert load_tokenizer(tmp_path).encode("ab", with_special=False) == [2]


def write_vocabulary(folder: Path, vocab: dict[str, object], merges: str) -> None:
    write(folder, vocab={"a": 0, "b": 1, "ab": 2} | vocab)
    write(folder, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    write(folder, config={"model_type": "qwen2", "vocab_size": 10})
    (folder / "merges.txt").write_bytes(merges.encode())


def test_a_tokenizer_that_the_library_does_not_know_is_a_clear_error(tmp_path: Path) -> None:
    content = json.loads(byte_level_backend().to_str())
    content["model"]["type"] = "Newer"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read by tokenizers \d"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_directory_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    """Slow: transformers is asked whether it can make one."""
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: it imports transformers, which would ask the terminal."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    write(tmp_path, tokenizer_config={"auto_map": {"AutoTokenizer": ["own.Own", None]}})
    questions: list[str] = []

    def consent(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", consent)
    with pytest.raises(
        ConfigError, match=r"no usable tokenizer: its code is .* Save the tokenizer as"
    ):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert questions == []


@pytest.mark.slow
def test_the_bundled_model_reads_text_and_chats_as_transformers_does() -> None:
    """Slow: it imports transformers."""
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    tokenizer = load_tokenizer(MODEL_DIR)
    template = load_template(MODEL_DIR)
    assert template is not None
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is 27 plus 15? größer 日本 🚀"},
    ]
    prompt = template.render(messages)
    assert prompt == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    for text, with_special in (("Once upon a time 1234", True), (prompt, False)):
        token_ids = tokenizer.encode(text, with_special=with_special)
        assert token_ids == reference.encode(text, add_special_tokens=with_special)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.token_bytes(tokenizer.eos_ids[0]).decode() == reference.eos_token


def test_the_files_values_are_read_and_the_others_are_neutral(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 256, "top_p": None}
    directory = write(tmp_path, generation_config=said | {"eos_token_id": [1, 2]})
    found = load_defaults(directory)
    assert found == GenerationDefaults(temperature=0.6, top_k=20, max_new_tokens=256)
    assert str(found) == "temperature=0.6 top_k=20 max_new_tokens=256"


def test_without_the_file_or_with_do_sample_alone_the_defaults_are_neutral(tmp_path: Path) -> None:
    assert load_defaults(tmp_path) == NEUTRAL
    assert load_defaults(write(tmp_path, generation_config={"do_sample": False})) == NEUTRAL


def test_integers_with_a_fraction_of_zero_are_integers(tmp_path: Path) -> None:
    """transformers and vLLM read them."""
    said = {"top_k": 50.0, "max_new_tokens": 9.0, "temperature": 1}
    found = load_defaults(write(tmp_path, generation_config=said))
    assert str(found) == "top_k=50 max_new_tokens=9"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", float("inf")),
        ("top_k", 10**30),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_the_way_around(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_defaults(write(tmp_path, generation_config={name: value}))
    message = caught.value.message
    assert "generation_config.json: " in message
    assert f"`$.{name}`" in message
    assert "--generation-config none" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ParserNames("aserve_tiny", "aserve_tiny")),
        ({"tool_call_parser": "none"}, ParserNames("aserve_tiny", None)),
        (
            {"tool_call_parser": "qwen25", "reasoning_parser": "deepseek-r1"},
            ParserNames("deepseek_r1", "hermes"),
        ),
    ],
)
def test_the_parsers_are_those_that_fit_the_template_or_are_named(
    given: dict[str, Any], expected: ParserNames
) -> None:
    parsers = load_text(MODEL_DIR, ModelOptions(**given)).parsers
    assert parsers[:2] == expected[:2]
    assert parsers.prompt_end({}).endswith("<|assistant|>")


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser is 'hermos'"):
        load_text(MODEL_DIR, ModelOptions(tool_call_parser="hermos"))


def test_an_option_overrides_the_defaults_by_name(tmp_path: Path) -> None:
    own = load_defaults(write(tmp_path, generation_config={"temperature": 0.6, "top_k": 20}))
    found = overridden(own, '{"top_k": 5, "max_new_tokens": 9}')
    assert found == GenerationDefaults(temperature=0.6, top_k=5, max_new_tokens=9)
    for wrong in ('{"topk": 5}', '{"top_p": 2}', '{"top_p": null}', "[]", "{"):
        with pytest.raises(ConfigError, match=r"--override-generation-config: .+"):
            overridden(NEUTRAL, wrong)


def test_default_variables_of_the_template_yield_to_those_of_a_request(tmp_path: Path) -> None:
    variables = '{"enable_thinking": false}'
    template = load_template(tmp_path, "{{ enable_thinking }}", variables=variables)
    assert template is not None
    assert template.render([]) == "False"
    assert template.render([], variables={"enable_thinking": True}) == "True"
    for wrong in ('{"messages": []}', "1"):
        with pytest.raises(ConfigError, match=r"--default-chat-template-kwargs: .+"):
            load_template(tmp_path, "{{ 1 }}", variables=wrong)


def test_the_tokenizer_and_the_template_may_be_in_another_directory(tmp_path: Path) -> None:
    model_dir = write(tmp_path, config={"eos_token_id": 5})
    with pytest.raises(ConfigError, match="is expected"):
        load_text(model_dir, ModelOptions(tokenizer=str(tmp_path)))
    text = load_text(model_dir, ModelOptions(tokenizer=str(MODEL_DIR)))
    own = load_text(MODEL_DIR, ModelOptions())
    assert text.template is not None
    assert own.template is not None
    assert text.template.source == own.template.source
    assert text.tokenizer.encode("Once", with_special=False) == own.tokenizer.encode(
        "Once", with_special=False
    )
    assert 5 in text.tokenizer.eos_ids
    digests = [Digests().of(model_dir, tokenizer=folder) for folder in (None, str(MODEL_DIR))]
    assert digests[0].tokenizer == ""
    assert digests[1].tokenizer == Digests().of(MODEL_DIR).tokenizer
