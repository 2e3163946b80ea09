"""What a request that waits costs."""

from __future__ import annotations

import pytest

from aserve.bench.options import RequestMemoryOptions
from aserve.bench.request_memory import run
from aserve.config import Facts, Raw, resolve
from aserve.tiny import MODEL_DIR

MAX_WAITING_BYTES = 4_000


@pytest.mark.slow
def test_a_waiting_request_has_less_than_4_kb_beside_its_tokens() -> None:
    resolved = resolve(Raw(command_line={}), Facts(default_model=str(MODEL_DIR)))
    figures = run(RequestMemoryOptions(running=64, waiting=3000), resolved).figures
    waiting_bytes = figures["waiting_bytes"]
    assert isinstance(waiting_bytes, int)
    assert waiting_bytes < MAX_WAITING_BYTES
