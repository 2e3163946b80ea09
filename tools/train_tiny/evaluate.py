"""`python -m tools.train_tiny.evaluate [MODEL_DIR]` measures scores on held-out cases and losses.

The scores need only a function that continues prompts, so that an engine can be scored too.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from aserve.tiny import MODEL_DIR
from tools.train_tiny.cases import Suite, all_suites
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Shape
from tools.train_tiny.tokenizer import BOS, EOS, EOT, PAD, load_tokenizer

# Takes prompts and the number of new tokens; returns the new ids, which may end in a stop id.
Generate = Callable[[list[list[int]], int], list[list[int]]]
# Takes ids int64 [rows, length]; returns logits [rows, length, vocab].
LogitsOf = Callable[[Tensor], Tensor]

LOSS_DOCUMENTS = 40
LOSS_ROOM = 400
LOSS_ROWS = 8
MAX_LEN = Shape().max_position_embeddings


@dataclass(frozen=True)
class Score:
    name: str
    num_right: int
    num_cases: int
    required: int

    @property
    def is_reached(self) -> bool:
        return self.num_right >= self.required


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network = load_network(options.model_dir)
    tokenizer = load_tokenizer(options.model_dir)
    console = Console()
    console.print(score_table(scores(partial(generate, network), tokenizer)))
    console.print(loss_table(held_out_losses(network, tokenizer)))


def scores(generate: Generate, tokenizer: Tokenizer) -> list[Score]:
    return [score(suite, generate, tokenizer) for suite in all_suites(tokenizer)]


def score(suite: Suite, generate: Generate, tokenizer: Tokenizer) -> Score:
    answers = generate([case.prompt for case in suite.cases], suite.max_tokens)
    num_right = sum(
        suite.is_right(answer_text(ids, tokenizer), case.expected)
        for ids, case in zip(answers, suite.cases, strict=True)
    )
    return Score(suite.name, num_right, len(suite.cases), suite.required)


def answer_text(ids: list[int], tokenizer: Tokenizer) -> str:
    """Returns the text before the first stop, with the tags of reasoning and tool calls."""
    stops = [index for index, token_id in enumerate(ids) if token_id in (EOS, EOT)]
    text: str = tokenizer.decode(ids[: stops[0]] if stops else ids, skip_special_tokens=False)
    return text


def held_out_losses(
    logits_of: LogitsOf, tokenizer: Tokenizer, *, num_documents: int = LOSS_DOCUMENTS
) -> dict[str, float]:
    return {
        kind: held_out_loss(logits_of, tokenizer, kind=kind, num_documents=num_documents)
        for kind in KINDS
    }


def held_out_loss(
    logits_of: LogitsOf, tokenizer: Tokenizer, *, kind: str, num_documents: int = LOSS_DOCUMENTS
) -> float:
    """Returns the mean nats per token of one kind of document."""
    return mean_loss(logits_of, held_out_rows(tokenizer, kind, num_documents))


def held_out_rows(tokenizer: Tokenizer, kind: str, num_documents: int) -> list[list[int]]:
    """Returns the ids of documents of one kind."""
    draw = Draw(Random(f"losses/{kind}"), Split.HELD_OUT, LOSS_ROOM)
    texts = [KINDS[kind](draw).text for _ in range(num_documents)]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [[BOS, *encoding.ids, EOS] for encoding in encodings]


@torch.inference_mode()
def mean_loss(logits_of: LogitsOf, rows: list[list[int]]) -> float:
    width = min(MAX_LEN + 1, max(len(row) for row in rows))
    padded = [(row + [PAD] * width)[:width] for row in rows]
    ids = torch.tensor(padded)
    total = torch.zeros(())
    for part in torch.split(ids, LOSS_ROWS):
        logits = logits_of(part[:, :-1]).flatten(0, 1)
        targets = part[:, 1:].flatten()
        total += functional.cross_entropy(logits, targets, ignore_index=PAD, reduction="sum")
    return float(total / (ids[:, 1:] != PAD).sum())


def score_table(scores: list[Score]) -> Table:
    table = Table("cases", "right", "of", "required")
    for row in scores:
        mark = "" if row.is_reached else "  missed"
        table.add_row(row.name, str(row.num_right), str(row.num_cases), f"{row.required}{mark}")
    return table


def loss_table(losses: dict[str, float]) -> Table:
    table = Table("held-out documents", "nats per token")
    for kind, loss in losses.items():
        table.add_row(kind, f"{loss:.3f}")
    return table


if __name__ == "__main__":
    main()
