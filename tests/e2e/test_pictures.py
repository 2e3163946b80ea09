"""Captions of pictures over HTTP, by the small trained model: in one process, in two, and with two
frontends."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from random import Random
from typing import Any, cast

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from PIL import Image

from tests.e2e.server_process import ServerProcess
from tools.train_models.folder import MODELS_DIR, complete_folder
from tools.train_models.pictures import Picture, picture
from tools.train_models.vl import QUESTIONS
from tools.train_tiny.corpus.split import Split

pytestmark = pytest.mark.slow

NUM_PICTURES = 8

# Pictures are fetched from this machine, too, though not by frontends after the first.
PROGRAM = """
from aserve import program
from aserve.pictures import fetch
fetch.is_public = lambda address: True
program.main()
"""
OPTIONS = (
    *("--port", "0", "--grammar-workers", "0", "--seed", "0", "--dtype", "float32"),
    *("--page-size", "4", "--max-num-batched-tokens", "24", "--allowed-media-domains", "localhost"),
)


@pytest.fixture(scope="module", params=["--processes=1", "--processes=2", "--frontends=2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = complete_folder(MODELS_DIR / "vl", tmp_path_factory.mktemp("vl") / "vl")
    arguments = [sys.executable, "-c", PROGRAM, "serve", str(folder), request.param, *OPTIONS]
    with ServerProcess(arguments=arguments) as process:
        assert process.address, process.text
        yield process


def drawn() -> list[Picture]:
    rng = Random("captions")
    return [picture(rng, Split.HELD_OUT) for _ in range(NUM_PICTURES)]


def base64_of(shown: Picture, kind: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(shown.pixels).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def url_of(shown: Picture) -> str:
    return f"data:image/png;base64,{base64_of(shown)}"


def messages_of(url: str) -> list[Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTIONS[0]},
    ]
    return [{"role": "user", "content": parts}]


async def test_captions_are_right_and_pictures_are_cached(server: ServerProcess) -> None:
    async with server.client() as client:

        async def caption(shown: Picture) -> tuple[str | None, int, int]:
            answer = await client.chat.completions.create(
                model="vl", messages=messages_of(url_of(shown)), temperature=0
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            return answer.choices[0].message.content, usage.prompt_tokens, cached

        pictures = drawn()
        answers = [await caption(shown) for shown in pictures]
        right = [text == p.caption for (text, _, _), p in zip(answers, pictures, strict=True)]
        assert sum(right) >= NUM_PICTURES - 1
        text, num_tokens, _ = answers[0]
        assert num_tokens > 16, "the tokens of the picture count"
        # All full pages but the last token's come from the cache, the picture's among them.
        assert await caption(pictures[0]) == (text, num_tokens, (num_tokens - 1) // 4 * 4)
        assert max(cached for _, _, cached in answers) < 4, "no other picture is hit"


async def test_the_other_endpoints_read_pictures_too(server: ServerProcess) -> None:
    shown = drawn()[0]
    async with server.client() as client:
        chat = await client.chat.completions.create(
            model="vl", messages=messages_of(url_of(shown)), temperature=0
        )
        caption = chat.choices[0].message.content
        response = await client.responses.create(
            model="vl",
            temperature=0,
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url_of(shown), "detail": "auto"},
                        {"type": "input_text", "text": QUESTIONS[0]},
                    ],
                }
            ],
        )
        assert response.output_text == caption
        items = await client.responses.input_items.list(response.id)
        content: Any = items.data[0]
        assert content.content[0].image_url == url_of(shown)
        body = {
            "model": "vl",
            "max_tokens": 40,
            "temperature": 0,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/jpeg",
                                "data": base64_of(shown),
                            },
                        },
                        {"type": "text", "text": QUESTIONS[0]},
                    ],
                }
            ],
        }
        message: Any = await client.post("/messages", body=body, cast_to=object)
        assert message["content"][0]["text"] == caption
        with pytest.raises(openai.BadRequestError, match="is not a domain") as caught:
            await client.chat.completions.create(
                model="vl", messages=messages_of("http://127.0.0.1/cat.png")
            )
        assert caught.value.param == "messages[0].content[0]"


async def test_pictures_are_fetched_from_named_domains_only(server: ServerProcess) -> None:
    """A further frontend refuses the address of this machine, as every server does."""
    shown = drawn()[0]
    png = base64.b64decode(base64_of(shown))

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=png, content_type="image/png")

    async with RawTestServer(answer) as host, server.client() as client:

        async def caption(url: str) -> str | None:
            """Its refusal is returned as a text, too."""
            try:
                answer = await client.chat.completions.create(
                    model="vl", messages=messages_of(url), temperature=0
                )
            except openai.BadRequestError as error:
                return str(error)
            return answer.choices[0].message.content

        expected = await caption(url_of(shown))
        found = await caption(f"http://localhost:{host.port}/a.png") or ""
        is_guarded = "--frontends=2" in cast(list[str], server.process.args)
        refusal = "its host 'localhost' has no public address"
        assert found == expected or (is_guarded and refusal in found)
        other = await caption(f"http://127.0.0.1:{host.port}/a.png") or ""
        assert "is not a domain that this server fetches from (localhost)" in other
