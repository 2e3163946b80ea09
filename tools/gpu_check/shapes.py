"""The shapes of the measured models, as config.json without weights, and the sizes of the loads.

The bytes and operations of a model's step are counted here. A multiplication and an addition are
two operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

BYTES_PER_WEIGHT = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen3 decoder: attention with query and key norms, a gated MLP, and no biases."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool

    def write(self, folder: Path) -> Path:
        """Writes config.json for a model with random weights, and returns its directory."""
        model_dir = folder / self.name
        model_dir.mkdir(parents=True, exist_ok=True)
        (model_dir / "config.json").write_bytes(msgspec.json.encode(self._config()))
        return model_dir

    def _config(self) -> Mapping[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }

    @property
    def body_weights(self) -> int:
        """The number of weights of the layers' linears: q, k, v, o, gate, up and down."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def norm_weights(self) -> int:
        return self.layers * (2 * self.hidden + 2 * self.head_dim) + self.hidden

    @property
    def step_bytes(self) -> int:
        """The bytes of weights that one decode step reads: all except the input embeddings, of
        which it reads one row per token. KV, activations and writes are not counted.
        """
        return (self.body_weights + self.head_weights + self.norm_weights) * BYTES_PER_WEIGHT

    def prefill_flops(self, num_tokens: int) -> int:
        """Returns the operations of a prefill of n tokens: `2 n W_layers + 2 W_head + 4 d n (n + 1)
        / 2` per head and layer for attention, where d is the head dimension. Only the last token
        needs the head. Norms, rope and softmax are not counted.
        """
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return 2 * self.body_weights * num_tokens + 2 * self.head_weights + attention


QWEN3_SMALL = ModelShape("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936, is_tied=True)
QWEN3_LARGE = ModelShape("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936, is_tied=False)
TINY_SMALL = ModelShape("tiny", 64, 2, 4, 2, 16, 128, 512, is_tied=True)
TINY_LARGE = ModelShape("tiny-untied", 64, 3, 4, 2, 16, 128, 512, is_tied=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all measurements. Lengths are in tokens."""

    small: ModelShape
    large: ModelShape
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    prefill_len: int
    repeats: int
    replays: int  # of a captured step, timed together
    num_prompts: int  # of the bundled model
    copy_bytes: int
    matrix: int  # rows and columns of the matrices in the matmul rate
    published: tuple[int, int, int]  # number of requests, shortest and longest length
    bench_arguments: Mapping[str, tuple[str, ...]]

    @property
    def num_decodes(self) -> int:
        """The number of steps of a batch after its prefill."""
        return self.output_len - 1

    @property
    def most_rows(self) -> int:
        return max(self.batches)


FULL = Sizes(
    small=QWEN3_SMALL,
    large=QWEN3_LARGE,
    batches=(1, 64, 256),
    input_len=128,
    output_len=256,
    prefill_len=8192,
    repeats=3,
    replays=100,
    num_prompts=32,
    copy_bytes=4 << 30,
    matrix=8192,
    published=(256, 100, 1024),
    bench_arguments={"overlap-sim": ("--processes", "1,2")},
)
TINY = Sizes(
    small=TINY_SMALL,
    large=TINY_LARGE,
    batches=(1, 3),
    input_len=8,
    output_len=6,
    prefill_len=48,
    repeats=1,
    replays=2,
    num_prompts=1,
    copy_bytes=1 << 22,
    matrix=128,
    published=(4, 5, 12),
    bench_arguments={
        "host-step": ("--rows", "4", "--steps", "5", "--repeats", "1"),
        "overlap-sim": ("--step-ms", "1", "--rows", "2", "--steps", "4", "--no-http"),
        "relay": ("--rows", "1", "--steps", "4", "--repeats", "1"),
    },
)
SIZES: Mapping[str, Sizes] = {"full": FULL, "tiny": TINY}
