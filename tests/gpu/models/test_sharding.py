"""How a model is divided among tensor-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.parallel.source import for_rank
from aserve.gpu.weights.source import HOST, Shard
from aserve.tiny import MODEL_DIR
from tests.load_model import load_model
from tests.parity.references import make_reference

CONFIG = json.loads((MODEL_DIR / "config.json").read_bytes())


class Rank:
    """`Collectives` of a rank whose model is not run."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    def sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def concat(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def least(self, number: int) -> int:
        raise NotImplementedError


def load_rank(folder: Path, changes: dict[str, Any], *, num_ranks: int = 2) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    load_model(folder, load_format="dummy", target=for_rank(HOST, Rank(1, num_ranks), beside={}))


@pytest.mark.parametrize(
    ("changes", "num_ranks", "complaint"),
    [
        ({"num_attention_heads": 6}, 4, "num_attention_heads is 6, .* 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads is 3"),
        ({"intermediate_size": 385}, 2, "intermediate_size is 385"),
        ({"architectures": ["Phi3ForCausalLM"]}, 2, r"qkv_proj\.weight|gate_up_proj\.weight"),
    ],
)
def test_a_model_that_no_rule_divides_is_refused(
    tmp_path: Path, changes: dict[str, Any], num_ranks: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_rank(tmp_path, changes, num_ranks=num_ranks)


def test_options_that_are_not_divided_are_refused() -> None:
    beside = {"--enable-lora": 2, "--enable-hisparse": None}
    with pytest.raises(ConfigError, match=r"^--enable-lora cannot be divided"):
        for_rank(HOST, Rank(1, 2), beside=beside)


def test_ranks_share_the_parts_of_a_tensor_that_has_fewer_than_ranks() -> None:
    """Two KV heads on four ranks: ranks 0 and 1 have the first one."""
    whole = torch.arange(12).view(6, 2)
    for rank in range(4):
        shard = Shard(rank, 4, {"k_proj.weight": 0}, {"k_proj.weight": 2})
        assert shard.whole_shape("a.k_proj.weight", (3, 2)) == (6, 2)
        [piece] = shard.pieces("a.k_proj.weight", (3, 2))
        assert torch.equal(whole[piece], whole[rank // 2 * 3 :][:3])


def test_heads_of_a_gated_deltanet_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    """Its heads of keys are not replicated, and each serves the same number of heads of values."""
    make_reference("qwen3.5", tmp_path)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads is 2, .* among 4 ranks"):
        load_model(tmp_path, target=for_rank(HOST, Rank(1, 4), beside={}))


def test_channels_of_a_convolution_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    changes = {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 129, "conv_L_cache": 3}
    with pytest.raises(ConfigError, match=r"num_conv_channels is 129, .* among 2 ranks"):
        load_rank(tmp_path, changes)


def test_biases_and_an_odd_vocabulary_are_on_every_rank(tmp_path: Path) -> None:
    changes = {"vocab_size": 2047, "attention_bias": True, "mlp_bias": True}
    load_rank(tmp_path, changes)  # the parts fit the whole
