"""Speculation with each drafter on CUDA: nothing in a step makes the host wait, decode steps are
replayed, and the tokens are those of plain decoding on the CPU.

The bundled model runs in float64, in plain torch. On the simulated runtime the weights come from
the CPU, because safetensors does not know its device.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from aserve.gpu.build import BuildOptions, build_executor, build_on
from aserve.gpu.device.base import GraphBreak
from aserve.gpu.device.cuda.graphs import CudaCaptured
from aserve.gpu.spec.registry import COUPLED
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.weights import checkpoint
from aserve.messages.base import array_i32
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.cuda.places import FakePlace, Place
from tests.gpu.drive import captured, request, serve

PROMPT = [1, 411, 279, 300, 41, 22]
ASKED = [
    request("long", PROMPT, max_tokens=14),
    request("warm", PROMPT[1:], max_tokens=3, temperature=0.8, seed=3, presence_penalty=0.5),
]
DRAFTERS: dict[str, dict[str, Any]] = {
    "DFLASH": {"num_steps": 3},
    "EAGLE": {"num_steps": 2},
    "EAGLE with a tree": {"num_steps": 2, "topk": 2},
    "EAGLE3": {"num_steps": 2},
    "FROZEN_KV_MTP": {"num_steps": 2},
    "NEXTN": {},
    "NGRAM": {"num_steps": 2},
    "STANDALONE": {"num_steps": 2},
    "EAGLE3 with block verification": {"num_steps": 2, "verification": "block"},
}


def options(speculative: SpecOptions | None, **more: Any) -> BuildOptions:
    settings: dict[str, Any] = {
        "dtype": "float64",
        "attention": "torch-ref",
        "num_pages": 40,
        "max_rows": 2,
        "max_model_len": 64,
        "speculative": speculative,
        **more,
    }
    return BuildOptions(Path(MODEL_DIR), **settings)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[int]]:
    return serve(build_executor(options(None)), ASKED).outputs


class FileOfCpu:
    """A safetensors file that is read on the CPU and copied to the device."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")
        self._device = device
        self.keys, self.get_slice = self._file.keys, self._file.get_slice

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name).to(self._device)

    def __enter__(self) -> FileOfCpu:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_decode_step_is_replayed_in_two_parts_and_the_host_waits_for_nothing(
    name: str,
    place: Place,
    plain: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There are graphs for one row. So the steps of both rows run eagerly, and those of the row
    that is left are replayed: the first part is draft, forward and verify, up to the lengths that
    are published, and the second part is extend and stash."""
    algorithm = SpecOptions(name.split()[0], bundled_drafters=DRAFTERS_DIR, **DRAFTERS[name])
    wanted = options(algorithm, graph_rows=1, depth=2, lead=2)
    if isinstance(place, FakePlace):
        monkeypatch.setattr(checkpoint, "open_file", FileOfCpu)
        with place.cuda:
            executor = build_on(place.device, wanted)
    else:
        executor = build_on(place.device, wanted)
    captured(executor)
    num_parts: list[int] = []
    replay = CudaCaptured.replay

    def counted(self: CudaCaptured, on_break: GraphBreak) -> Tensor:
        num_parts.append(len(self.parts) + 1)
        return replay(self, on_break)

    monkeypatch.setattr(CudaCaptured, "replay", counted)
    assert "run without graphs" not in caplog.text
    with place.no_waits():
        served = serve(executor, ASKED)
    if algorithm.verification != COUPLED:  # tokens are those that the same engine has on the CPU
        plain = serve(build_executor(options(algorithm)), ASKED).outputs
    assert served.outputs == plain
    windows = [array_i32(batch.verify.num_drafts) for batch in served.batches if batch.verify]
    widest = max(map(max, windows))
    num_alone = sum(each.tolist() == [widest] for each in windows)
    decodes = [b for b in served.batches if len(array_i32(b.rows)) == 1 and not b.row_inits]
    assert max(num_alone, 2) <= len(num_parts) <= len(decodes)  # one for each step
    assert num_parts.count(2) >= num_alone
    assert max(num_parts) == 2
