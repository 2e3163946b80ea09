"""Greedy speculative decoding in plain PyTorch, which says how many drafts are accepted.

Every round recomputes everything from the ids: the target over the committed ids, the bonus and
the drafts, and the drafter over the committed ids. There is no KV cache and no engine code, so an
engine that accepts less has a bug in what it feeds to the drafter.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tools.train_drafters.drafter import Drafter
from tools.train_drafters.target import TargetStates, target_states
from tools.train_tiny.greedy import STOPS, until_stop
from tools.train_tiny.network import Llama


@dataclass
class Acceptance:
    """What the verify rounds of some prompts accepted."""

    num_drafts: int
    num_verifies: int = 0
    num_emitted: int = 0  # accepted drafts and bonus ids; without the id that the prefill gave
    num_accepted_at: list[int] = field(default_factory=list)  # rounds that accepted draft k
    verifies_by_prompt: list[int] = field(default_factory=list)

    @property
    def mean_accept_len(self) -> float:
        return self.num_emitted / max(1, self.num_verifies)

    @property
    def shares(self) -> list[float]:
        """The part of all verifies that accepted draft k."""
        return [count / self.num_verifies for count in self.num_accepted_at]

    def add(self, emitted: list[int], num_accepted: int) -> None:
        self.num_verifies += 1
        self.num_emitted += len(emitted)
        counts = self.num_accepted_at or [0] * self.num_drafts
        self.num_accepted_at = [
            count + (position < num_accepted) for position, count in enumerate(counts)
        ]

    def described(self) -> dict[str, object]:
        return {
            "num_drafts": self.num_drafts,
            "mean_accept_len": round(self.mean_accept_len, 4),
            "acceptance_by_position": [round(share, 4) for share in self.shares],
            "num_verifies": self.num_verifies,
            "num_emitted": self.num_emitted,
            "verifies_by_prompt": self.verifies_by_prompt,
        }


def measure(
    target: Llama,
    drafter: Drafter,
    prompts: Iterable[list[int]],
    *,
    num_drafts: int,
    max_tokens: int,
) -> Acceptance:
    acceptance = Acceptance(num_drafts)
    for prompt in prompts:
        before = acceptance.num_verifies
        speculate(target, drafter, prompt, acceptance, max_tokens=max_tokens)
        acceptance.verifies_by_prompt.append(acceptance.num_verifies - before)
    return acceptance


@torch.inference_mode()
def speculate(
    target: Llama, drafter: Drafter, prompt: list[int], acceptance: Acceptance, *, max_tokens: int
) -> list[int]:
    """Returns the new ids up to and including a stop id, and adds the rounds to `acceptance`."""
    seen = target_states(target, torch.tensor([prompt]))
    bonus = int(seen.logits[0, -1].argmax())
    new_ids = [bonus]
    while len(new_ids) < max_tokens and new_ids[-1] not in STOPS:
        drafts = drafter.draft(seen, bonus, acceptance.num_drafts)
        committed = seen.ids[0].tolist()
        verified = target_states(target, torch.tensor([[*committed, bonus, *drafts]]))
        greedy = verified.logits[0, len(committed) :].argmax(dim=-1).tolist()
        num_accepted = num_equal(drafts, greedy)
        emitted = until_stop([*drafts[:num_accepted], greedy[num_accepted]])
        emitted = emitted[: max_tokens - len(new_ids)]
        acceptance.add(emitted, min(num_accepted, len(emitted)))
        new_ids += emitted
        seen = first_rows(verified, len(committed) + 1 + num_accepted)
        bonus = greedy[num_accepted]
    return new_ids


def num_equal(drafts: list[int], greedy: list[int]) -> int:
    """Returns how many leading drafts are what the target chose."""
    for index, (draft, choice) in enumerate(zip(drafts, greedy, strict=False)):
        if draft != choice:
            return index
    return len(drafts)


def first_rows(seen: TargetStates, length: int) -> TargetStates:
    """Returns the states of the first ids, which do not depend on what follows."""
    return TargetStates(
        ids=seen.ids[:, :length],
        residuals=tuple(residual[:, :length] for residual in seen.residuals),
        normed=seen.normed[:, :length],
        logits=seen.logits[:, :length],
        embedding=seen.embedding,
        last_keys=seen.last_keys[:, :, :length],
        last_values=seen.last_values[:, :, :length],
    )
