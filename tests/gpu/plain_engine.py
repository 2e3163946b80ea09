"""The plain engine: one request, alone in the world; no pages, no batch, no relay, no scheduler."""

from __future__ import annotations

import numpy as np
import torch

from aserve.gpu.models.causal_model import CausalModel
from aserve.messages import AdmitRequest, array_i32
from aserve.scheduling.request import Sequence
from tests.fakes import allowed_ids
from tests.gpu.naive_sampler import naive_logits, naive_token
from tests.parity.dense_attend import DenseAttend


def plain_outputs(model: CausalModel, request: AdmitRequest, child: int = 0) -> list[int]:
    """What the sequence generates, up to its end."""
    init = Sequence(request, child=child, arrival=0).row_init()
    sampling = request.sampling
    assert sampling.max_tokens is not None
    tokens: list[int] = array_i32(request.prompt_ids).tolist()
    attend = DenseAttend()
    known = 0
    while (num_outputs := len(tokens) - init.prompt_len) < sampling.max_tokens:
        if num_outputs > sampling.min_tokens and tokens[-1] in request.end_ids:
            break
        ids, positions = torch.tensor(tokens[known:]), torch.arange(known, len(tokens))
        known = len(tokens)
        logits = model.logits(model.forward(ids, positions, attend)[-1:])[0].double().numpy()
        total = sum(tokens[init.prompt_len :])
        allowed = None if sampling.grammar is None else allowed_ids(total, model.vocab_size)
        processed = naive_logits(np.asarray(logits), tokens, init, allowed)
        tokens.append(naive_token(processed, len(tokens), init))
    return tokens[init.prompt_len :]
