"""The texts that train the drafters: what the target itself says, kept in shards on disk.

A shard is a pure function of the seed and its index, so that an interrupted run goes on where it
stopped, and a shorter run is the beginning of a longer one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_drafters.prompts import training_prompt
from tools.train_drafters.sampling import Sampling, continued
from tools.train_tiny.network import Llama
from tools.train_tiny.tokenizer import PAD

ROWS_AT_ONCE = 64
TEXTS_OF_A_SHARD = 256
# Greedy and sampled texts, because both are served. Temperature 0 is greedy.
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)
MAX_TOKENS = 240
GOES_ON = 0.15  # the part of texts that go on after a stop id, as with `ignore_eos`


@dataclass(frozen=True)
class Text:
    ids: list[int]
    prompt_len: int


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right."""

    ids: Tensor  # int64 [rows, length]
    weights: Tensor  # float32 [rows, length], 1 where the id was generated


def write_shard(
    network: Llama, tokenizer: Tokenizer, path: Path, *, seed: int, max_tokens: int = MAX_TOKENS
) -> None:
    rng = Random(f"{seed}/{path.stem}")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    prompts = [training_prompt(rng, tokenizer) for _ in range(TEXTS_OF_A_SHARD)]
    texts: list[list[int]] = []
    # Prompts of one length are continued together, so that little is padding.
    prompts.sort(key=len)
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        rows = prompts[first : first + ROWS_AT_ONCE]
        sampling = Sampling(
            temperatures=torch.tensor(rng.choices(TEMPERATURES, k=len(rows))),
            goes_on=torch.tensor([rng.random() < GOES_ON for _ in rows]),
            max_tokens=max_tokens,
            generator=generator,
        )
        texts += continued(network, rows, sampling)
    ids = [token_id for text in texts for token_id in text]
    unfinished = path.with_suffix(".part")
    content = {
        "ids": torch.tensor(ids, dtype=torch.int32),
        "lens": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompt_lens": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
    }
    save_file(content, unfinished)
    unfinished.replace(path)


def read_shards(folder: Path) -> list[Text]:
    texts: list[Text] = []
    for path in sorted(folder.glob("*.safetensors")):
        content = load_file(path)
        rows = content["ids"].split(content["lens"].tolist())
        texts += [
            Text(ids.tolist(), prompt_len)
            for ids, prompt_len in zip(rows, content["prompt_lens"].tolist(), strict=True)
        ]
    return texts


def batches(texts: list[Text], *, tokens: int, seed: int) -> Iterator[Batch]:
    """Yields batches of about `tokens` ids, epoch after epoch, each of texts of similar lengths."""
    epoch = 0
    while True:
        rng = Random(f"{seed}/epoch {epoch}")
        order = sorted(texts, key=lambda text: len(text.ids) + rng.random() * 16)
        packed = list(grouped(order, tokens))
        rng.shuffle(packed)
        yield from map(padded, packed)
        epoch += 1


def grouped(texts: list[Text], tokens: int) -> Iterator[list[Text]]:
    """Cuts texts, sorted by length, into groups that pad to at most `tokens` ids."""
    group: list[Text] = []
    for text in texts:
        if group and (len(group) + 1) * len(text.ids) > tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def padded(texts: list[Text]) -> Batch:
    width = max(len(text.ids) for text in texts)
    ids = torch.full((len(texts), width), PAD)
    weights = torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        weights[row, text.prompt_len : len(text.ids)] = 1.0
    return Batch(ids, weights)
