"""Adapters that are loaded and unloaded while a server with the bundled model streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from aserve.gpu.models.base import CausalModel
from aserve.tiny import MODEL_DIR
from tests.e2e.served import ADMIN_KEY, served
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged
from tests.gpu.drive import request
from tests.gpu.plain_engine import plain_outputs
from tests.load_model import load_model
from tests.parity.real_model import options

PROMPT = [11, 40, 300, 7, 9, 512, 77, 1033, 61, 40, 300, 7, 9, 512, 77, 1033, 61, 8]
RECIPES = {"a": Recipe(1), "b": Recipe(2, rank=4), "a-new": Recipe(3)}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name, recipe in RECIPES.items():
        adapter = write_adapter(folder / name, recipe)
        write_merged(folder / f"{name}-merged", adapter, recipe)
    return folder


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[ClientSession]:
    resolved = options(
        port=0,
        served_model_name="base",
        admin_api_key=ADMIN_KEY,
        lora_modules=f"a={folder / 'a'}",
        max_loras=2,
        overlap_depth=2,
    )
    async with served(resolved) as session:
        yield session


def expected(folder: Path, name: str) -> list[int]:
    directory = MODEL_DIR if name == "base" else folder / f"{name}-merged"
    model: CausalModel = load_model(directory, dtype="float64")
    return plain_outputs(model, request("r", PROMPT, max_tokens=NUM_TOKENS))


class Stream:
    """One streamed completion: its tokens, and how many of its prompt's were cached."""

    def __init__(self, client: ClientSession, model: str) -> None:
        self.tokens: list[int] = []
        self.cached = -1
        self.has_begun = asyncio.Event()
        self._body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        self.done = asyncio.ensure_future(self._run(client))

    async def _run(self, client: ClientSession) -> list[int]:
        async with client.post("/v1/completions", json=self._body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self._read(json.loads(line.removeprefix(b"data: ")))
        return self.tokens

    def _read(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.has_begun.set()
        if event.get("usage"):
            self.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]


async def post(client: ClientSession, path: str, **body: Any) -> tuple[int, str]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.text()


async def names(client: ClientSession) -> dict[str, tuple[str, str | None]]:
    async with client.get("/v1/models") as answer:
        models = (await answer.json())["data"]
    return {model["id"]: (model["root"], model["parent"]) for model in models}


async def test_adapters_come_and_go_beside_streams(client: ClientSession, folder: Path) -> None:
    base, old = Stream(client, "base"), Stream(client, "a")
    await asyncio.gather(base.has_begun.wait(), old.has_begun.wait())
    loading = {"lora_name": "b", "lora_path": str(folder / "b")}
    status, text = await post(client, "/v1/load_lora_adapter", **loading)
    assert (status, text) == (200, "Success: LoRA adapter 'b' added successfully.")
    other = Stream(client, "b")
    assert await names(client) == {
        "base": ("base", None),
        "a": (str(folder / "a"), "base"),
        "b": (str(folder / "b"), "base"),
    }
    assert (await post(client, "/v1/unload_lora_adapter", lora_name="a"))[0] == 200
    status, text = await post(client, "/v1/completions", model="a", prompt="x")
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
    for stream, name in ((base, "base"), (old, "a"), (other, "b")):
        assert await stream.done == expected(folder, name)

    # The name comes back with other weights, in the slot that is free now.
    status, text = await post(
        client, "/load_lora_adapter", lora_name="a", lora_path=str(folder / "a-new")
    )
    paths = {"b": str(folder / "b"), "a": str(folder / "a-new")}
    assert status == 200
    assert json.loads(text) == {"success": True, "error_message": "", "loaded_adapters": paths}
    new, again = Stream(client, "a"), Stream(client, "b")
    assert await new.done == expected(folder, "a-new")
    assert await again.done == expected(folder, "b")
    assert (new.cached, again.cached) == (0, 16)


async def test_an_adapter_has_the_names_that_sglangs_clients_use(
    client: ClientSession, folder: Path
) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    asked = {"input_ids": PROMPT, "sampling_params": sampling}
    for name in ({"lora_path": "a"}, {"model": "base:a"}):
        status, text = await post(client, "/generate", **asked, **name)
        assert (status, json.loads(text)["output_ids"]) == (200, expected(folder, "a"))
    for unknown in ("base:c", "c:a", "base:", ":a"):
        assert (await post(client, "/generate", **asked, lora_path=unknown))[0] == 404


async def test_what_cannot_be_loaded_is_refused_and_serves_nothing(
    client: ClientSession, folder: Path
) -> None:
    nowhere = {"lora_name": "c", "lora_path": str(folder / "nowhere")}
    for body, code in (
        (nowhere, "invalid_checkpoint"),
        ({"lora_name": "a", "lora_path": str(folder / "b")}, "adapter_exists"),
        ({"lora_name": "base", "lora_path": str(folder / "a")}, "bad_request"),
    ):
        status, text = await post(client, "/v1/load_lora_adapter", **body)
        assert (status, json.loads(text)["error"]["code"]) == (400, code)
    status, text = await post(client, "/unload_lora_adapter", lora_name="c")
    assert status == 404
    assert list(await names(client)) == ["base", "a"]
    async with ClientSession() as stranger:
        url = f"{client._base_url}/v1/load_lora_adapter"
        async with stranger.post(url, json=nowhere) as answer:
            assert answer.status in (401, 403)
