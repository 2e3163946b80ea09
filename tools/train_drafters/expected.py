"""`expected_acceptance.json`: what each drafter reaches in plain PyTorch on fixed story prompts."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track
from rich.table import Table

from tools.train_drafters.drafter import Drafter
from tools.train_drafters.oracle import Acceptance, measure
from tools.train_tiny.greedy import STOPS
from tools.train_tiny.network import Llama

EXPECTED = "expected_acceptance.json"
CHAIN = 4
METHOD = (
    "Greedy decoding in float32 with the saved bfloat16 weights. Each verify checks a chain of "
    "num_drafts drafts and emits the accepted ones and one id of the target. A text ends with a "
    "stop id or after max_tokens ids; ids beyond that are not counted, nor is the id that the "
    "prefill gives. acceptance_by_position is the part of all verifies that accepted that draft."
)


@dataclass(frozen=True)
class Expected:
    prompts: list[list[int]]
    max_tokens: int
    by_drafter: dict[str, list[Acceptance]]


def measured(
    target: Llama, drafters: dict[str, Drafter], prompts: list[list[int]], *, max_tokens: int
) -> Expected:
    by_drafter = {
        name: [
            measure(
                target,
                drafter,
                track(prompts, f"{name}, {num_drafts} drafts"),
                num_drafts=num_drafts,
                max_tokens=max_tokens,
            )
            for num_drafts in chain_lens(drafter)
        ]
        for name, drafter in drafters.items()
    }
    return Expected(prompts, max_tokens, by_drafter)


def chain_lens(drafter: Drafter) -> list[int]:
    """A chain of CHAIN where the drafter has so many, and its longest one."""
    return sorted({min(CHAIN, drafter.num_drafts), drafter.num_drafts})


def write_expected(expected: Expected, folder: Path) -> None:
    head = {"method": METHOD, "max_tokens": expected.max_tokens, "stop_ids": list(STOPS)}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    prompts = ",\n".join(f"    {json.dumps(prompt)}" for prompt in expected.prompts)
    lines.append(f'  "prompts": [\n{prompts}\n  ]')
    rows = ",\n".join(
        f"    {json.dumps(name)}: [\n"
        + ",\n".join(f"      {json.dumps(acceptance.described())}" for acceptance in acceptances)
        + "\n    ]"
        for name, acceptances in expected.by_drafter.items()
    )
    lines.append(f'  "drafters": {{\n{rows}\n  }}')
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (folder / EXPECTED).write_text(text, encoding="utf-8")


def shown(expected: Expected) -> Table:
    table = Table("drafter", "drafts", "accept length", "acceptance by position")
    for name, acceptances in expected.by_drafter.items():
        for acceptance in acceptances:
            table.add_row(
                name,
                str(acceptance.num_drafts),
                f"{acceptance.mean_accept_len:.2f}",
                " ".join(f"{share:.2f}" for share in acceptance.shares),
            )
    return table
