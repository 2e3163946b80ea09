"""A server on MLX with its engine in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess
from tests.parity.real_model import engine

OPTIONS = ("--device", "mlx", "--dtype", "float32", "--processes", "2", "--num-pages", "200")
PROMPT = "Once upon a time"

pytestmark = pytest.mark.slow


async def test_a_server_on_mlx_answers_with_torchs_text() -> None:
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 24}
    async with engine(dtype="float32", device="cpu") as torchs:
        expected = (await torchs.answer(PROMPT, **sampling)).choices[0]
    with ServerProcess(*OPTIONS) as server:
        assert server.address, server.text
        async with server.client() as client:
            answer = await client.completions.create(model="aserve-tiny", prompt=PROMPT, **sampling)
            stream = await client.completions.create(
                model="aserve-tiny", prompt=PROMPT, stream=True, **sampling
            )
            streamed = "".join([part.choices[0].text async for part in stream])
        said = server.text
    assert answer.choices[0].text == streamed == expected.text
    assert "on mlx" in said
