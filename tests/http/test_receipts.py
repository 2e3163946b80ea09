"""Receipts over HTTP: a server gives none that `aserve verify` would call false."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.config import Facts, Raw, resolve, shown_settings
from aserve.messages.executor import DecodeCaps
from aserve.receipts.facts import FactFinder
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import SPEC
from tests.http.asking import Answer, ask

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
PICTURES: dict[str, Any] = {"messages": [{"role": "user", "content": [PICTURE]}]}
GREEDY: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "temperature": 0}
DRAWN = GREEDY | {"temperature": 1}
DIFFUSION = DecodeCaps(root_len=0, block_len=8, max_tokens_per_step=8)
REJECTION = DecodeCaps(max_tokens_per_step=5, whole_windows=True)


@pytest.mark.parametrize(
    ("body", "caps", "reason"),
    [
        pytest.param(PICTURES, DecodeCaps(), "pictures", id="pictures"),
        pytest.param(GREEDY, DIFFUSION, "diffusion", id="diffusion"),
        pytest.param(DRAWN, REJECTION, "depend on the drafts", id="rejection"),
    ],
)
async def test_tokens_that_cannot_be_drawn_again_get_no_receipt(
    body: dict[str, Any], caps: DecodeCaps, reason: str
) -> None:
    answer = await asked(body, caps)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "unsupported_parameter"
    assert reason in answer.json["error"]["message"]


async def test_greedy_tokens_of_any_verification_get_a_receipt() -> None:
    assert "receipt" in (await asked(GREEDY, REJECTION)).json


async def asked(body: dict[str, Any], caps: DecodeCaps) -> Answer:
    settings = shown_settings(resolve(Raw(), Facts(default_model=str(MODEL_DIR))))
    async with EchoEngine(receipts=FactFinder(lambda: MODEL_DIR, settings)) as echo:
        echo.state.settings.spec = msgspec.structs.replace(SPEC, decode=caps)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await ask(echo, path, body | {"receipt": True})
