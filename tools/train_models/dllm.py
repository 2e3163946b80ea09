"""Diffusion: a dense LLaDA2 made from the bundled model, which writes blocks of 8 ids.

A training step masks a random part t of each block and predicts the masked ids from the noisy block
and the clean blocks before it, with the weight 1/t (block diffusion). The bundled model predicts
the next id and this one the id in place, so that the start is good in the layers and bad at the
ends; short blocks are not needed to get over that. Decoding repeats, block by block:

    of the masked positions, fill those whose best id is likelier than the threshold, or the best
    one
"""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from aserve.tiny import MODEL_DIR
from tools.train_models.llada import BLOCK_SIZE, Llada
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.recipes import CAUSAL_QUICK
from tools.train_models.starts import bundled_layers, copy_norms
from tools.train_tiny.cases import chat_story_suite, story_suite
from tools.train_tiny.evaluate import answer_text, held_out_rows
from tools.train_tiny.export import load_network
from tools.train_tiny.network import Shape
from tools.train_tiny.packing import Batch
from tools.train_tiny.recipe import Rates, Recipe, Stage
from tools.train_tiny.tokenizer import EOS, EOT, MASK

HEAD_DIM, HALF, FAST = 64, 32, 16
PARTIAL_ROTARY_FACTOR = 0.5
# Half of the pairs are turned, and this base gives them the frequencies of the first half of 10000.
ROPE_THETA = 100.0
LEAST_NOISE = 0.15
THRESHOLD = 0.9
SHARES: dict[str, float] = {
    "story": 30, "two_persons": 15, "chat_two_persons": 15, "chat_asked_story": 10,
    "sums": 8, "chat_sum": 8, "chat_json": 5, "chat_tool": 5, "counting": 4,
}  # fmt: skip
NUM_BEGINNINGS, BEGINNING = 60, 24  # stories of which the first ids are given
# Turned pairs (i, i + 16) of the first 32 dimensions come from pairs (i, i + 32) of 64.
ORDER = torch.cat(
    (
        torch.arange(FAST),
        torch.arange(HALF, HALF + FAST),
        torch.arange(FAST, HALF),
        torch.arange(HALF + FAST, HEAD_DIM),
    )
)


@dataclass(frozen=True)
class Written:
    ids: list[int]  # of the answer, up to and including a stop id
    # NOTE: an engine computes the keys and values of a finished block in the first forward of the
    # next block, so this is the number of all forwards.
    num_forwards: int


class Dllm(Member):
    about = (
        "A block diffusion model of LLaDA2's family, with dense layers only "
        "(`first_k_dense_replace` is the number of layers). It writes blocks of 8 ids, several ids "
        "in one forward. It was made from the bundled model."
    )
    notes = (
        "Blocks are cut from position 0 on, the prompt included; a position sees the blocks before "
        f"its own and the whole of its own. The mask id is {MASK}. Row i of the logits predicts "
        "the id at position i. The first half of each head is turned by rope, in rotated halves. "
        "`query_key_value` has the rows of all query heads, then keys, then values. "
        "`block_size` and `mask_token_id` are not in the published configurations, which leave "
        "them to the caller."
    )
    recipe = Recipe(
        stages=(
            Stage("short", length=128, rows=4, steps=600, shares=SHARES),
            Stage("long", length=256, rows=3, steps=400, shares=SHARES),
        ),
        rates=Rates(muon=3e-3, adam=3e-3, warmup_steps=20, decay_part=0.5),
        tokenizer_documents=0,
        tokenizer_kinds=frozenset(),
    )
    quick = CAUSAL_QUICK

    def config(self) -> dict[str, object]:
        return published_config(
            "LLaDA2MoeModelLM",
            "llada2_moe",
            rope_theta=ROPE_THETA,
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            partial_rotary_factor=PARTIAL_ROTARY_FACTOR,
            use_qk_norm=True,
            use_qkv_bias=False,
            use_bias=False,
            norm_head=False,
            first_k_dense_replace=6,
            num_experts=0,
            num_shared_experts=0,
            num_experts_per_tok=0,
            moe_intermediate_size=0,
            n_group=0,
            topk_group=0,
            routed_scaling_factor=1.0,
            score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            use_sliding_window=False,
            sliding_window=None,
            tie_word_embeddings=False,
            mask_token_id=MASK,
            block_size=BLOCK_SIZE,
        )

    def empty(self) -> nn.Module:
        return Llada(Shape(rope_theta=ROPE_THETA), partial_rotary_factor=PARTIAL_ROTARY_FACTOR)

    def start(self, network: nn.Module) -> None:
        assert isinstance(network, Llada)
        start(network)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The ids of a row are denoised where they stand: `weights` belong to ids[:, 1:]."""
        assert isinstance(network, Llada)
        usable = (batch.ids.shape[1] - 1) // BLOCK_SIZE * BLOCK_SIZE
        ids = batch.ids[:, :usable]
        first = torch.ones(len(ids), 1)
        weights = torch.cat((first, batch.weights), dim=1)[:, :usable]
        is_masked, inverse = drawn_masks(ids)
        # The complement is denoised, too, which halves the variance.
        noisy = torch.cat((ids.masked_fill(is_masked, MASK), ids.masked_fill(~is_masked, MASK)))
        logits = network.denoised(noisy, ids.repeat(2, 1))
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), ids.repeat(2, 1).flatten(), reduction="none"
        )
        counted = torch.cat((is_masked * inverse, ~is_masked / (1 - 1 / inverse))) * weights.repeat(
            2, 1
        )
        return (losses * counted.flatten()).sum() / counted.sum()

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        assert isinstance(network, Llada)
        loss = masked_loss(network, tokenizer, count=2 if is_quick else 20)
        figures = [Figure("nats per id with half of a block masked, stories", f"{loss:.3f}")]
        if is_quick:
            return figures
        beginnings = [row[:BEGINNING] for row in held_out_rows(tokenizer, "story", NUM_BEGINNINGS)]
        stories = [write(network, ids, threshold=THRESHOLD, max_tokens=200) for ids in beginnings]
        for suite in (story_suite(tokenizer), chat_story_suite(tokenizer)):
            written = [
                write(network, case.prompt, threshold=THRESHOLD, max_tokens=suite.max_tokens)
                for case in suite.cases
            ]
            stories += written
            right = sum(
                suite.is_right(answer_text(w.ids, tokenizer), case.expected)
                for w, case in zip(written, suite.cases, strict=True)
            )
            figures.append(Figure(suite.name, f"{right} of {len(written)}"))
        rate = sum(len(w.ids) for w in stories) / sum(w.num_forwards for w in stories)
        name = f"ids per forward at threshold {THRESHOLD}, {len(stories)} stories"
        return [*figures, Figure(name, f"{rate:.2f}", "2")]


def drawn_masks(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which ids are masked, bool [rows, length], and 1/t of each one's block."""
    blocks = ids.unflatten(1, (-1, BLOCK_SIZE))
    part = LEAST_NOISE + (1 - 2 * LEAST_NOISE) * torch.rand(*blocks.shape[:2], 1)
    is_masked = torch.rand(blocks.shape) < part
    return is_masked.flatten(1), (1 / part).expand(blocks.shape).flatten(1)


@torch.no_grad()
def start(network: Llada) -> None:
    """Copies the layers; norms of queries and keys start at the mean size of their inputs."""
    bundled = load_network(MODEL_DIR).model
    network.model.word_embeddings.weight.copy_(bundled.embed_tokens.weight)
    network.lm_head.weight.copy_(bundled.embed_tokens.weight)
    network.model.norm.weight.copy_(bundled.norm.weight)
    for module, (source, inputs) in zip(network.model.layers, bundled_layers(), strict=True):
        layer: Any = module
        copy_norms(layer, source)
        layer.mlp.load_state_dict(source.mlp.state_dict())
        layer.attention.dense.weight.copy_(source.self_attn.o_proj.weight)
        queries = source.self_attn.q_proj.weight.unflatten(0, (-1, HEAD_DIM))[:, ORDER]
        keys = source.self_attn.k_proj.weight.unflatten(0, (-1, HEAD_DIM))[:, ORDER]
        parts = (queries.flatten(0, 1), keys.flatten(0, 1), source.self_attn.v_proj.weight)
        layer.attention.query_key_value.weight.copy_(torch.cat(parts))
        for norm, weight in (("query_layernorm", parts[0]), ("key_layernorm", parts[1])):
            size = (inputs @ weight.T).pow(2).mean().sqrt()
            layer.attention.get_parameter(f"{norm}.weight").fill_(size)


@torch.inference_mode()
def masked_loss(network: Llada, tokenizer: Tokenizer, *, count: int) -> float:
    """Returns the mean nats of every second id, masked, of held-out stories."""
    total, number = 0.0, 0
    for row in held_out_rows(tokenizer, "story", count):
        ids = torch.tensor([row[: len(row) // BLOCK_SIZE * BLOCK_SIZE]])
        is_masked = (torch.arange(ids.shape[1]) % 2 == 1)[None]
        logits = network.denoised(ids.masked_fill(is_masked, MASK), ids)
        total += float(functional.cross_entropy(logits[is_masked], ids[is_masked], reduction="sum"))
        number += int(is_masked.sum())
    return total / number


@torch.inference_mode()
def write(network: Llada, prompt: list[int], *, threshold: float, max_tokens: int) -> Written:
    """Writes block after block, as LLaDA2 does: the likeliest id, or all above the threshold.

    The prompt's whole blocks are kept in a cache. Its rest is the beginning of the first block.
    """
    kept = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
    cache = network(torch.tensor([prompt[:kept]]))[1] if kept else None
    known, ids = prompt[kept:], list(prompt)
    num_forwards = 0
    while len(ids) - len(prompt) < max_tokens:
        block = torch.tensor([known + [MASK] * (BLOCK_SIZE - len(known))])
        is_open = torch.arange(BLOCK_SIZE)[None] >= len(known)
        while bool(is_open.any()):
            filled = chosen(network(block, cache)[0], is_open, threshold=threshold)
            block = torch.where(filled >= 0, filled, block)
            is_open = is_open & (filled < 0)
            num_forwards += 1
        cache = network(block, cache)[1]
        new = block[0, len(known) :].tolist()
        stops = [place for place, token_id in enumerate(new) if token_id in (EOS, EOT)]
        ids += new[: stops[0] + 1] if stops else new
        if stops:
            break
        known = []
    return Written(ids[len(prompt) :], num_forwards)


def chosen(logits: Tensor, is_open: Tensor, *, threshold: float) -> Tensor:
    """Returns the ids [1, block] to fill now, and -1 elsewhere."""
    logits[..., MASK] = -torch.inf
    odds, best = logits.softmax(dim=-1).max(dim=-1)
    odds = odds.masked_fill(~is_open, -1.0)
    is_sure = odds > threshold
    is_sure[0, odds.argmax()] = True
    return torch.where(is_sure, best, -1)
