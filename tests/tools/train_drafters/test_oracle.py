"""The oracle on drafters whose acceptance is known, and the figures that are shipped."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tools.train_drafters import texts
from tools.train_drafters.__main__ import main
from tools.train_drafters.drafter import Drafter
from tools.train_drafters.expected import EXPECTED
from tools.train_drafters.oracle import Acceptance, measure, speculate
from tools.train_drafters.registry import DRAFTERS, load
from tools.train_drafters.target import TargetStates, target_states
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Llama
from tools.train_tiny.tokenizer import EOT, chat_prompt, load_tokenizer


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_network(MODEL_DIR).requires_grad_(False)


class Scripted(Drafter):
    """Knows the text, and is right for as many drafts of each round as it is told."""

    def __init__(self, text: list[int], num_right: list[int]) -> None:
        super().__init__()
        self.text = text
        self.num_right = cycle(num_right)

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        length = seen.ids.shape[1]
        assert self.text[: length + 1] == [*seen.ids[0].tolist(), bonus]
        right = (self.text + [0] * count)[length + 1 : length + 1 + count]
        num_right = next(self.num_right)
        return [token_id if i < num_right else 2047 for i, token_id in enumerate(right)]

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def num_read(self, head: int) -> int:
        raise NotImplementedError

    def config(self) -> dict[str, object]:
        raise NotImplementedError


SUM = chat_prompt(load_tokenizer(MODEL_DIR), "What is 27 plus 15?")


@pytest.mark.parametrize(
    ("num_right", "max_tokens", "verifies", "emitted", "accepted_at"),
    [
        # The answer has 38 ids. The prefill gives the first, and 4 drafts and a bonus are 5 more.
        ([4], 100, 8, 37, [8, 8, 7, 7]),
        ([0], 100, 37, 37, [0, 0, 0, 0]),
        ([0, 4], 100, 13, 37, [6, 6, 6, 6]),
        ([1, 3], 100, 13, 37, [13, 6, 6, 0]),
        ([4], 9, 2, 8, [2, 2, 2, 1]),
        ([4], 1, 0, 0, []),
    ],
)
def test_a_round_emits_the_right_drafts_and_one_id(
    target: Llama,
    num_right: list[int],
    max_tokens: int,
    verifies: int,
    emitted: int,
    accepted_at: list[int],
) -> None:
    (answer,) = generate(target, [SUM], max_tokens)
    drafter = Scripted([*SUM, *generate(target, [SUM], 100)[0]], num_right)
    acceptance = Acceptance(num_drafts=4)
    assert speculate(target, drafter, SUM, acceptance, max_tokens=max_tokens) == answer
    assert (acceptance.num_verifies, acceptance.num_emitted) == (verifies, emitted)
    assert acceptance.num_accepted_at == accepted_at
    assert max_tokens < 100 or (answer[-1] == EOT and len(answer) == 38)


def test_the_states_of_the_target_are_those_of_its_own_forward(target: Llama) -> None:
    ids = torch.tensor([SUM])
    seen = target_states(target, ids)
    torch.testing.assert_close(seen.logits, target(ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.model.norm(seen.residuals[-1]), seen.normed)
    first = target.model.layers[0](seen.embed(ids), *rotation(target, len(SUM)))
    torch.testing.assert_close(first, seen.residuals[0], atol=1e-4, rtol=1e-4)
    second = target.model.layers[1](first, *rotation(target, len(SUM)))
    torch.testing.assert_close(
        seen.streams((1, 0)), torch.cat((second, first), dim=-1), atol=1e-4, rtol=1e-4
    )


def rotation(target: Llama, length: int) -> tuple[Tensor, Tensor]:
    return target.model.cos[:length], target.model.sin[:length]


SHIPPED: dict[str, Any] = json.loads((DRAFTERS_DIR / EXPECTED).read_text())


@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [(name, row["num_drafts"]) for name, rows in SHIPPED["drafters"].items() for row in rows],
)
def test_a_shipped_drafter_reaches_what_is_written(
    target: Llama, name: str, num_drafts: int
) -> None:
    row = next(row for row in SHIPPED["drafters"][name] if row["num_drafts"] == num_drafts)
    drafter = load(name, target, DRAFTERS_DIR)
    prompts, max_tokens = SHIPPED["prompts"][-1:], SHIPPED["max_tokens"]
    got = measure(target, drafter, prompts, num_drafts=num_drafts, max_tokens=max_tokens)
    # Rounding differs between processors, and a draft in doubt may fall on the other side.
    assert got.num_verifies == pytest.approx(row["verifies_by_prompt"][-1], abs=2)


GOALS = {"eagle": 2.2, "eagle3": 2.5, "mtp": 2.3, "dflash": 2.5, "frozen_kv": 2.0, "small_lm": 2.2}


def test_the_shipped_drafters_reach_the_goals_in_little_room() -> None:
    for name, goal in GOALS.items():
        chain, *_ = SHIPPED["drafters"][name]
        assert chain["mean_accept_len"] >= goal, name
    assert set(GOALS) == set(DRAFTERS)
    size = sum(path.stat().st_size for path in DRAFTERS_DIR.rglob("*") if path.is_file())
    assert size < 8e6


@pytest.mark.slow
def test_a_quick_run_goes_from_texts_to_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "TEXTS_OF_A_SHARD", 12)
    written, output = str(tmp_path / "texts"), str(tmp_path / "drafters")
    main(["texts", written, "--shards", "2", "--max-tokens", "12"])
    before = [(text.ids, text.prompt_len) for text in texts.read_shards(tmp_path / "texts")]
    (tmp_path / "texts" / "00001.safetensors").unlink()
    main(["texts", written, "--shards", "2", "--max-tokens", "12"])
    after = [(text.ids, text.prompt_len) for text in texts.read_shards(tmp_path / "texts")]
    assert after == before
    assert len(after) == 24
    assert all(0 < len(ids) - prompt_len <= 12 for ids, prompt_len in after)

    training = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", output]
    main(["train", written, *DRAFTERS, "--steps", "2", "--tokens", "600", *training])
    monkeypatch.setattr("tools.train_drafters.training.target_states", None)  # nothing is left
    main(["train", written, *DRAFTERS, "--steps", "2", "--tokens", "600", *training])

    main(["measure", "--prompts", "2", "--max-tokens", "6", "--output", output])
    figures = json.loads((tmp_path / "drafters" / EXPECTED).read_text())
    assert set(figures["drafters"]) == set(DRAFTERS)
    card = (tmp_path / "drafters" / "README.md").read_text()
    assert all(f"| {name} | 4 |" in card for name in DRAFTERS if name != "mtp")
