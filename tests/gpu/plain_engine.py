"""The plain engine: one request, alone in the world; no pages, no batch, no relay, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from aserve.gpu.models.base import CausalModel
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import RowInit
from aserve.scheduling.request import Sequence
from aserve.scheduling.table_writes import row_init
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import allowed_ids, forced_ids, min_tokens_of
from tests.gpu.naive_sampler import Floats, naive_logits, naive_set, naive_token
from tests.parity.dense_attend import DenseAttend, given_ids

# From processed logits, and the position of the token, and the row's parameters.
Pick: TypeAlias = Callable[[Floats, int, RowInit], int]


def plain_logprobs(model: CausalModel, request: AdmitRequest) -> Floats:
    """[prompt_len - 1, vocab]: of each token of the prompt but the first."""
    logits = model.logits(_hidden(model, request)[:-1]).double()
    return np.asarray(logits.log_softmax(dim=1).numpy())


def plain_embedding(model: CausalModel, request: AdmitRequest) -> Floats:
    """[hidden]"""
    last = np.asarray(_hidden(model, request)[-1].double().numpy())
    return np.asarray(last / np.linalg.norm(last))


def _hidden(model: CausalModel, request: AdmitRequest) -> torch.Tensor:
    """The prompt in one forward -> [prompt_len, hidden]"""
    ids = torch.tensor(array_i32(request.prompt_ids).tolist())
    return model.forward(given_ids(model, ids), torch.arange(len(ids)), DenseAttend())


class PlainRun(NamedTuple):
    """Outputs up to the end, and the logprob before temperature of each that was sampled."""

    tokens: list[int]
    logprobs: list[float]


def plain_outputs(model: CausalModel, request: AdmitRequest, child: int = 0) -> list[int]:
    """What the sequence generates, up to its end."""
    return plain_run(model, request, child).tokens


def plain_tokens(
    requests: Iterable[AdmitRequest], model: CausalModel | None = None
) -> dict[tuple[str, int], list[int]]:
    """What each sequence of the requests generates, as `Served.outputs` has it."""
    model = model or HashModel()
    return {
        (each.request_id, child): plain_outputs(model, each, child)
        for each in requests
        for child in range(each.sampling.n)
    }


def picking(said: list[int]) -> Pick:
    """Picks the tokens that were said, each of which must be possible; behind them the best one."""

    def pick(processed: Floats, position: int, init: RowInit) -> int:
        index, best = position - init.prompt_len, int(processed.argmax())
        if index >= len(said):
            return best
        members = naive_set(processed / (init.temperature or 1), init)
        assert said[index] in (members if init.temperature else {best}), (index, said, members)
        return said[index]

    return pick


def plain_run(
    model: CausalModel, request: AdmitRequest, child: int = 0, *, pick: Pick = naive_token
) -> PlainRun:
    init = row_init(Sequence(request, child=child, arrival=0))
    sampling = request.sampling
    assert sampling.max_tokens is not None
    tokens: list[int] = array_i32(request.prompt_ids).tolist()
    attend = DenseAttend()
    logprobs: list[float] = []
    known = 0
    while (num_outputs := len(tokens) - init.prompt_len) < sampling.max_tokens:
        if num_outputs > min_tokens_of(sampling) and tokens[-1] in request.end_ids:
            break
        forced = forced_ids(request, tokens[init.prompt_len :])
        if forced:
            tokens += forced[: sampling.max_tokens - num_outputs]
            continue
        ids, positions = given_ids(model, torch.tensor(tokens)), torch.arange(known, len(tokens))
        hidden = model.forward(ids[known:], positions, attend)
        known = len(tokens)
        logits = model.logits(hidden[-1:])[0].double().numpy()
        total = sum(tokens[init.prompt_len :])
        allowed = None if sampling.grammar is None else allowed_ids(total, model.vocab_size)
        processed = naive_logits(np.asarray(logits), tokens, init, allowed)
        tokens.append(pick(processed, len(tokens), init))
        logprobs.append(float(processed[tokens[-1]] - np.logaddexp.reduce(processed)))
    return PlainRun(tokens[init.prompt_len :], logprobs)
