"""What a server tells about itself and its model, and the prompt that a chat becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.config import Facts, Raw, resolve, shown_settings
from aserve.http.control.info import version
from aserve.pictures.reader import PictureReader
from aserve.pictures.settings import picture_settings
from aserve.text.lengths import PromptLimits
from aserve.text.load import load_tokenizer
from aserve.text.prompt import PromptEncoder
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import MAX_MODEL_LEN, EchoEngine
from tests.fakes.executor import SPEC
from tests.http.asking import ask, told

MESSAGES = [{"role": "user", "content": "hi <|eot|> there"}]


async def test_each_description_names_what_clients_look_for(echo: EchoEngine) -> None:
    expected: dict[str, dict[str, Any]] = {
        "/version": {"version": version()},
        "/ping": {"status": "ready"},
        "/health_generate": {"status": "ready"},
        "/weight_info": {"weight_version": "default"},
        "/server_info": {"served_model_name": "echo", "max_model_len": MAX_MODEL_LEN},
        "/get_server_info": {"served_model_name": "echo"},
        "/model_info": {"model_path": "echo", "is_generation": True},
        "/get_model_info": {"tokenizer_path": "echo"},
        "/tokenizer_info": {"vocab_size": echo.tokenizer.vocab_size, "bos_token": None},
    }
    for path, fields in expected.items():
        answer = await ask(echo, path)
        assert answer.status == 200, path
        assert answer.json | fields == answer.json, path


async def test_model_info_says_what_the_model_is_for(echo: EchoEngine) -> None:
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 7}
    settings = picture_settings(config, {}, where="model", token_id=lambda _name: None)
    limits = PromptLimits(MAX_MODEL_LEN, echo.tokenizer.vocab_size)
    for pictures, task in ((None, "generate"), (PictureReader(settings), "embed")):
        echo.state.settings.spec = msgspec.structs.replace(SPEC, task=task)
        encoder = PromptEncoder(echo.tokenizer, template=None, limits=limits, pictures=pictures)
        echo.tokenize_service.open(encoder)
        info = (await ask(echo, "/model_info")).json
        assert info["is_generation"] == (task == "generate")
        assert info["has_image_understanding"] == (pictures is not None)


def test_settings_show_neither_keys_nor_files() -> None:
    given = {"api_key": "sesame", "admin_api_key": "root", "record": "/tmp/events", "port": 1}
    shown = shown_settings(resolve(Raw(command_line=given), Facts("bundled")))
    assert shown["port"] == 1
    assert not {"api_key", "admin_api_key", "record", "api_key_file"} & set(shown)
    assert "sesame" not in repr(shown)


@pytest.mark.parametrize("path", ["/render", "/v1/chat/completions/render"])
async def test_a_rendered_chat_is_the_prompt_that_the_engine_gets(path: str) -> None:
    """A special token in a message stays text, in the shown prompt and in its ids."""
    tokenizer = load_tokenizer(MODEL_DIR)
    template = "<|user|>{{ messages[0].content }}<|assistant|>"
    async with EchoEngine(tokenizer=tokenizer, template=template) as echo:
        body: dict[str, Any] = {"messages": MESSAGES}
        rendered = await told(echo, path, body)
        text = "<|user|>hi <|eot|> there<|assistant|>"
        assert (rendered["prompt"], rendered["count"]) == (text, len(rendered["token_ids"]))
        answer = await told(echo, "/v1/chat/completions", body, return_token_ids=True, max_tokens=1)
        assert rendered["token_ids"] == answer["prompt_token_ids"]
        assert await told(echo, "/apply-template", body) == {"prompt": text}
        assert tokenizer.encode(text, with_special=False) != rendered["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/render", {"prompt": "a"}, "unsupported_parameter"),
        ("/render", {}, "missing_required_parameter"),
        ("/apply-template", {"messages": []}, "empty_array"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "n": 0}, "integer_below_min_value"),
    ],
)
async def test_a_chat_that_cannot_be_rendered_is_refused(
    echo: EchoEngine, path: str, body: dict[str, Any], code: str
) -> None:
    assert (await ask(echo, path, body)).error["code"] == code
