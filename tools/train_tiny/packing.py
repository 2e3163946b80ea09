"""Packs documents into rows for training. A batch is a pure function of seed, stage and step."""

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.corpus.document import PROMPT, RANDOM, Document, Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.recipe import Stage
from tools.train_tiny.tokenizer import BOS, EOS

MEASURED_DOCUMENTS = 40
WITHOUT_BOS = 0.1  # the part of documents without BOS, so that prompts may lack it


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # int64 [rows, length + 1]
    weights: Tensor  # float32 [rows, length], the weight of the loss of each predicted id


class Packer:
    def __init__(self, tokenizer: Tokenizer, stage: Stage, *, seed: int) -> None:
        self.tokenizer = tokenizer
        self.stage = stage
        self.seed = seed
        self.kinds = list(stage.shares)
        self.odds = [stage.shares[kind] / self.mean_len(kind) for kind in self.kinds]

    def mean_len(self, kind: str) -> float:
        """Returns the mean length of a kind. Shares count tokens, so long kinds are drawn less
        often.
        """
        draw = Draw(Random(f"{self.seed}/lengths/{kind}"), Split.TRAIN, self.stage.length // 2)
        documents = [KINDS[kind](draw) for _ in range(MEASURED_DOCUMENTS)]
        lens = [len(encoded(self.tokenizer, document)[0]) + 2 for document in documents]
        return sum(min(length, self.stage.length) for length in lens) / len(lens)

    def batch(self, step: int) -> Batch:
        rng = Random(f"{self.seed}/{self.stage.name}/{step}")
        rows = [self.row(rng) for _ in range(self.stage.rows)]
        ids = torch.tensor([ids for ids, _ in rows], dtype=torch.int64)
        weights = torch.tensor([weights for _, weights in rows], dtype=torch.float32)
        return Batch(ids, weights[:, 1:])

    def row(self, rng: Random) -> tuple[list[int], list[float]]:
        """Fills a row with whole documents. Only the last one is cut."""
        size = self.stage.length + 1
        ids: list[int] = []
        weights: list[float] = []
        is_opened = rng.random() < self.stage.opening
        while len(ids) < size:
            kind = rng.choices(self.kinds, self.odds)[0]
            if is_opened and not ids:
                kind = "recall"
            document = KINDS[kind](Draw(rng, Split.TRAIN, size - len(ids)))
            document_ids, document_weights = encoded(self.tokenizer, document)
            if rng.random() >= WITHOUT_BOS:
                ids.append(BOS)
                weights.append(RANDOM)
            ids += [*document_ids, EOS]
            weights += [*document_weights, PROMPT]
        return ids[:size], weights[:size]


def encoded(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float]]:
    """Returns the ids and their weights. An id has the weight of the piece with its last
    character.
    """
    encoding = tokenizer.encode(document.text, add_special_tokens=False)
    by_character: list[float] = []
    for text, weight in document.pieces:
        by_character += [weight] * len(text)
    return encoding.ids, [by_character[end - 1] for _, end in encoding.offsets]
