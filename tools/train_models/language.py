"""The figures of members that write text: losses by kind of document, and answers to cases."""

from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.train_models.member import Figure
from tools.train_tiny.cases import all_suites
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.evaluate import Generate, LogitsOf, held_out_loss, score
from tools.train_tiny.greedy import ROWS_AT_ONCE, until_stop
from tools.train_tiny.tokenizer import EOS, EOT, PAD

CASES = 25
DOCUMENTS = 20
SUITES = (
    "recall after 50",
    "a+b=",
    "What is a plus b?",
    "Return JSON for",
    "stories of two persons",
)


def language_figures(network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
    """`network` is a causal model of transformers."""

    def logits_of(ids: Tensor) -> Tensor:
        logits: Tensor = network(ids, use_cache=False).logits
        return logits

    losses = loss_figures(logits_of, tokenizer, is_quick=is_quick)
    return losses if is_quick else [*score_figures(greedy(network), tokenizer), *losses]


def loss_figures(logits_of: LogitsOf, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
    kinds = ["story"] if is_quick else list(KINDS)
    count = 2 if is_quick else DOCUMENTS
    return [
        Figure(
            f"nats per token, {kind}",
            f"{held_out_loss(logits_of, tokenizer, kind=kind, num_documents=count):.3f}",
        )
        for kind in kinds
    ]


def score_figures(generate: Generate, tokenizer: Tokenizer) -> list[Figure]:
    suites = [
        replace(suite, cases=suite.cases[:CASES])
        for suite in all_suites(tokenizer)
        if suite.name in SUITES
    ]
    reached = [score(suite, generate, tokenizer) for suite in suites]
    return [Figure(f"{row.name}, greedy", f"{row.num_right} of {row.num_cases}") for row in reached]


def greedy(network: nn.Module) -> Generate:
    """Returns a function that continues prompts by `generate` of transformers."""
    model: Any = network

    @torch.inference_mode()
    def generated(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            rows = prompts[first : first + ROWS_AT_ONCE]
            width = max(len(row) for row in rows)
            ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
            new = model.generate(
                ids,
                attention_mask=torch.tensor(
                    [[0] * (width - len(row)) + [1] * len(row) for row in rows]
                ),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=[EOS, EOT],
                pad_token_id=PAD,
            )[:, width:]
            answers += [until_stop(row) for row in new.tolist()]
        return answers

    return generated
