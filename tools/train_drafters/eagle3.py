"""EAGLE-3: one layer over three hidden streams of the target (Li et al., 2025).

    u_i = W [h^low_i ; h^mid_i ; h^high_i]
    a_i = Attention([norm(emb(t_{i+1})) ; norm_h(u_i)])     with queries, keys, values 2d wide
    x_i = u_i + a_i,  x_i += mlp(norm(x_i))
    p(t_{i+2}) = head(norm(x_i))                            over the reduced vocabulary

The next step takes x_i in place of u_i. Row i has rope position i. Draft id j is the target's id
j + d2t[j].
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tools.train_drafters.configs import draft_shape, llama_config
from tools.train_drafters.drafter import Drafter, appended, chain_loss, num_params, shifted_ids
from tools.train_drafters.layers import Attention, AttentionForm, causal, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_drafters.ttt import Unrolled
from tools.train_tiny.network import FeedForward, Llama, Shape, rotations

TRAINED_STEPS = 7
# The streams are those after these layers. The default of the published heads, [1, n/2 - 1,
# n - 4], would name one layer twice in a target of six layers.
AUX_LAYER_IDS = (0, 2, 4)


class Eagle3(Drafter):
    num_drafts = TRAINED_STEPS

    def __init__(self, target: Llama, draft_ids: Tensor) -> None:
        """draft_ids: int64 [draft_vocab], the target's ids that can be drafted, in order."""
        super().__init__()
        self.shape = draft_shape(target.shape, num_layers=1, intermediate_size=128)
        size = self.shape.hidden_size
        self.fc = nn.Linear(len(AUX_LAYER_IDS) * size, size, bias=False)
        self.midlayer = MidLayer(self.shape)
        self.norm = nn.RMSNorm(size, eps=self.shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.cos, self.sin = rotations(self.shape)
        reset_parameters(self)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.model.embed_tokens.weight[draft_ids])
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.isin(torch.arange(self.shape.vocab_size), draft_ids))

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        labels = seen.logits[..., self.target_ids(torch.arange(len(self.d2t)))]
        return chain_loss(self.unrolled_logits(seen), labels, weights)

    def unrolled_logits(self, seen: TargetStates) -> Iterator[Tensor]:
        unrolled = Unrolled(self.midlayer.self_attn, cos=self.cos, sin=self.sin)
        hidden: Tensor = self.fc(seen.streams(AUX_LAYER_IDS))
        for step in range(TRAINED_STEPS):
            ids = seen.ids[:, 1 + step :]
            residual = hidden[:, : ids.shape[1]]
            mixed = unrolled.attend(self.midlayer.fused(seen.embed(ids), residual))
            hidden = self.midlayer.after_attention(residual, mixed)
            yield self.lm_head(self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        ids: Tensor = shifted_ids(seen, bonus)
        hidden: Tensor = self.fc(seen.streams(AUX_LAYER_IDS))
        drafts: list[int] = []
        for _ in range(count):
            length = ids.shape[1]
            rows = self.midlayer(seen.embed(ids), hidden, self.cos[:length], self.sin[:length])
            draft_id = self.lm_head(self.norm(rows[0, -1])).argmax()
            drafts.append(int(self.target_ids(draft_id)))
            ids = appended(ids, drafts[-1])
            hidden = torch.cat((hidden, rows[:, -1:]), dim=1)
        return drafts

    def num_read(self, head: int) -> int:
        # The projection of the streams is read for the target's rows alone.
        return num_params(self) - num_params(self.fc)

    def config(self) -> dict[str, object]:
        return {
            **llama_config(self.shape, "LlamaForCausalLMEagle3"),
            "draft_vocab_size": len(self.d2t),
            "target_hidden_size": self.shape.hidden_size,
            "num_aux_hidden_states": len(AUX_LAYER_IDS),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
            },
        }


class MidLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(shape, AttentionForm(input_size=2 * size))
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = FeedForward(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        fused = self.fused(embedded, hidden)
        queries = self.self_attn.queries(fused, cos, sin)
        mixed = causal(queries, *self.self_attn.keys_values(fused, cos, sin))
        return self.after_attention(hidden, mixed)

    def fused(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def after_attention(self, residual: Tensor, mixed: Tensor) -> Tensor:
        hidden = residual + self.self_attn.join(mixed)
        changed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return changed
