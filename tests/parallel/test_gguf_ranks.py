"""Models of GGUF files on two ranks, whose layers lie otherwise in such a file than in a
checkpoint: tokens are those of the checkpoint on one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aserve.gguf.model_dir import gguf_model_dir
from tests.gguf_files.files import write_gguf
from tests.gpu.drive import serve
from tests.parallel.test_rank_traces import joined
from tests.parallel.test_ranks import loaded, resolved_of
from tests.parallel.test_recurrent_ranks import SETTINGS, asks
from tests.parity.references import new_model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "arch"),
    [("qwen3-next", {"mlp_only_layers": []}, "qwen3next"), ("deepseek2", {}, "deepseek2")],
)
def test_tokens_are_those_of_the_checkpoint(
    kind: str, sizes: dict[str, Any], arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    new_model(kind, **sizes).save_pretrained(tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", arch)
    options = resolved_of(**SETTINGS, tensor_parallel_size=2)
    ranks = joined(options, tmp_path / "store", gguf_model_dir(file))
    alone = loaded(tmp_path / "model", **SETTINGS)
    assert serve(ranks, asks()).outputs == serve(alone, asks()).outputs
