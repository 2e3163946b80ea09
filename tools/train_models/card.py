"""Writes the card of a member: what it is, how it was trained, how good it is, what its files
have.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tools.train_models.folder import read_config
from tools.train_models.member import Figure, Member
from tools.train_tiny.card import Facts, cpu_name
from tools.train_tiny.export import WEIGHTS

CARD = """\
# {name}: `{architecture}`

{about}

{parameters:,} parameters; the weights are in bfloat16, apart from what the list of tensors says.
The tokenizer is that of [the bundled model](../../../aserve/tiny/model/README.md) and is not
copied: `python -m tools.train_models folder {name} FOLDER` makes a folder that has both.

## Training

`python -m tools.train_models train {name}` (seed {seed}): {tokens:.2f} M tokens in {minutes:.0f}
CPU minutes with {threads} thread of {cpu}, matmuls in {precision}, weights in float32; torch
{torch}.

| stage | rows x length | steps |
| --- | --- | --- |
{stages}

{remarks}
## Figures

In float32, of the saved weights, on held-out documents and cases.

| figure | value | required |
| --- | --- | --- |
{figures}

## What a loader must know

{notes}

```json
{config}
```

Tensors (`*` stands for each number, of layers or of experts):

| tensor | shape | dtype | number |
| --- | --- | --- | --- |
{tensors}
"""


def write_card(
    name: str, member: Member, facts: Facts, figures: list[Figure], folder: Path, *, remarks: str
) -> None:
    config = read_config(folder)
    text = CARD.format(
        name=name,
        architecture=architecture_of(config),
        about=member.about,
        parameters=facts.num_parameters,
        seed=facts.seed,
        tokens=facts.num_tokens / 1e6,
        minutes=facts.cpu_minutes,
        threads=facts.threads,
        cpu=cpu_name(),
        precision=facts.precision,
        torch=facts.torch,
        stages="\n".join(
            f"| {stage.name} | {stage.rows} x {stage.length} | {stage.steps} |"
            for stage in member.recipe.stages
        ),
        remarks=f"{remarks}\n" if remarks else "",
        figures="\n".join(f"| {row.name} | {row.value} | {row.required} |" for row in figures),
        notes=member.notes,
        config=json.dumps(config, indent=2),
        tensors="\n".join(tensor_rows(folder / WEIGHTS)),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def architecture_of(config: dict[str, object]) -> str:
    names = config["architectures"]
    assert isinstance(names, list)
    return str(names[0])


def tensor_rows(weights: Path) -> list[str]:
    """Returns a row for each name, with the numbers in it replaced, and each shape and dtype."""
    counts: dict[tuple[str, str, str], int] = {}
    with safe_open(weights, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  # this is no dict
            tensor: torch.Tensor = opened.get_tensor(name)
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            key = (pattern, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."))
            counts[key] = counts.get(key, 0) + 1
    return [
        f"| `{name}` | {shape} | {dtype} | {count} |"
        for (name, shape, dtype), count in sorted(counts.items())
    ]
