"""DFlash: one forward drafts a block, from the target's hidden states of the committed ids.

    c_i = norm_h(W [h^a_i ; h^b_i ; ..])                    context features of positions i < L
    block: [emb(bonus), emb(MASK), .., emb(MASK)]           at positions L to L + B - 1
    each layer: queries of the block rows, keys and values of the context and of the block
    p(t_{L+j}) = head(norm(x_j)),  j = 1 to B - 1           with the target's embedding and head

The rows of a block see the whole context and one another, in both directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.train_drafters.configs import draft_shape, llama_config
from tools.train_drafters.drafter import Drafter, num_params, soft_cross_entropy
from tools.train_drafters.layers import QWEN3, Block, per_query_head, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_tiny.network import Llama, rotations
from tools.train_tiny.tokenizer import MASK

BLOCK_SIZE = 8
TARGET_LAYER_IDS = (0, 2, 4)
ANCHORS = 24  # trained blocks of a row
GAMMA = 4.0  # the loss of block row j counts exp(-(j - 1) / GAMMA)


class DFlash(Drafter):
    num_drafts = BLOCK_SIZE - 1
    drafts_per_step = BLOCK_SIZE - 1

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.num_target_layers = target.shape.num_hidden_layers
        self.shape = draft_shape(target.shape, num_layers=2, intermediate_size=256)
        size, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self.fc = nn.Linear(len(TARGET_LAYER_IDS) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        count = self.shape.num_hidden_layers
        self.layers = nn.ModuleList(Block(self.shape, QWEN3) for _ in range(count))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.cos, self.sin = rotations(self.shape)
        reset_parameters(self)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        last = seen.ids.shape[1] - BLOCK_SIZE
        anchors = 1 + torch.randperm(max(last, 1))[:ANCHORS]
        rows = anchors[:, None] + torch.arange(BLOCK_SIZE - 1)  # the logits of row i are of i + 1
        rows = rows.clamp(max=seen.ids.shape[1] - 1)
        decay = torch.exp(-torch.arange(BLOCK_SIZE - 1) / GAMMA)
        counted = weights[:, rows] * decay
        return soft_cross_entropy(self.block_logits(seen, anchors), seen.logits[:, rows], counted)

    def block_logits(
        self, seen: TargetStates, anchors: Tensor, *, ids: Tensor | None = None
    ) -> Tensor:
        """Returns logits [rows, anchors, block - 1, vocab] of blocks that begin at the anchors.

        ids: int64 [rows, anchors], the first ids of the blocks, which are those of the row if not
        given.
        """
        context = self.hidden_norm(self.fc(seen.streams(TARGET_LAYER_IDS)))
        blocks = self.blocks_at(anchors, context_len=context.shape[1])
        first = seen.ids[:, anchors] if ids is None else ids
        masks = torch.full((*first.shape, BLOCK_SIZE - 1), MASK)
        block_ids = torch.cat((first[..., None], masks), dim=-1)
        hidden = seen.embed(block_ids.flatten(1))
        for layer in self.layers:
            assert isinstance(layer, Block)
            hidden = layer.after_attention(hidden, attended(layer, hidden, context, blocks))
        drafted = self.norm(hidden).unflatten(1, (-1, BLOCK_SIZE))[:, :, 1:]
        return seen.head(drafted)

    def blocks_at(self, anchors: Tensor, *, context_len: int) -> "Blocks":
        positions = (anchors[:, None] + torch.arange(BLOCK_SIZE)).flatten()
        return Blocks(
            block_rotation=(self.cos[positions], self.sin[positions]),
            context_rotation=(self.cos[:context_len], self.sin[:context_len]),
            visible=torch.arange(context_len) < anchors.repeat_interleave(BLOCK_SIZE)[:, None],
        )

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        anchor = torch.tensor([seen.ids.shape[1]])
        logits = self.block_logits(seen, anchor, ids=torch.tensor([[bonus]]))
        drafts: list[int] = logits[0, 0].argmax(dim=-1).tolist()
        return drafts[:count]

    def num_read(self, head: int) -> int:
        return num_params(self) - num_params(self.fc) + head

    def config(self) -> dict[str, object]:
        return {
            **llama_config(self.shape, "DFlashDraftModel"),
            "model_type": "qwen3",
            "block_size": BLOCK_SIZE,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.shape.num_hidden_layers,
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": list(TARGET_LAYER_IDS),
            },
        }


@dataclass(frozen=True)
class Blocks:
    """The places of several blocks, whose rows stand one behind another."""

    block_rotation: tuple[Tensor, Tensor]
    context_rotation: tuple[Tensor, Tensor]
    visible: Tensor  # bool [block rows, context]


def attended(layer: Block, hidden: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
    """One softmax over the visible context and the rows of the own block.

    hidden: [rows, anchors * block, hidden]; context: [rows, length, hidden].
    Returns [rows, heads, anchors * block, head_dim].
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    queries = attention.queries(normed, *blocks.block_rotation)
    num_heads = queries.shape[1]
    context_keys, context_values = (
        per_query_head(part, num_heads)
        for part in attention.keys_values(context, *blocks.context_rotation)
    )
    keys, values = (
        per_query_head(part, num_heads).unflatten(2, (-1, BLOCK_SIZE))
        for part in attention.keys_values(normed, *blocks.block_rotation)
    )
    context_scores = (queries @ context_keys.mT).masked_fill(~blocks.visible, -torch.inf)
    own_scores = (queries.unflatten(2, (-1, BLOCK_SIZE)) @ keys.mT).flatten(2, 3)
    scores = torch.cat((context_scores, own_scores), dim=-1) * attention.head_dim**-0.5
    weights = scores.softmax(dim=-1)
    length = context.shape[1]
    own_weights = weights[..., length:].unflatten(2, (-1, BLOCK_SIZE))
    mixed: Tensor = weights[..., :length] @ context_values + (own_weights @ values).flatten(2, 3)
    return mixed
