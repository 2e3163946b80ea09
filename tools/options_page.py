"""Writes docs/options.md, the reference of all options, from the records of aserve/config.py, and
the table of families in docs/models.md from their registry.

`python -m tools.options_page` writes both; tests fail while the pages and their sources differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from aserve.cli import COMMAND_RECORDS
from aserve.config import PromptOptions, RouterOptions
from aserve.gpu.supported import family_rows
from aserve.options.foreign_flags import foreign_rows
from aserve.options.option import Option, grouped

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """\
# Options

This page is generated from `aserve/config.py` by `python -m tools.options_page`.
`aserve serve --help` prints the same.

Each option can be given in three ways, and the first one that is present wins:

1. on the command line: `--max-num-seqs 32`,
2. as an environment variable: `ASERVE_MAX_NUM_SEQS=32`,
3. as a line of a TOML or YAML file that `--config FILE` names: `max-num-seqs = 32` or
   `max-num-seqs: 32`.

`aserve.engine.Engine` takes them as keyword arguments: `Engine(max_num_seqs=32)`. A switch takes
`true` or `false` in a variable or a file. An option that does not exist and a value out of range
end the start with one line that says what is wrong.
"""
ROUTER_NOTE = "`aserve route` has these, and `aserve serve` for its --replicas.\n"
PROMPT_NOTE = "Only `aserve generate` and `aserve chat` have these.\n"
NOTES: Mapping[type, str] = {RouterOptions: ROUTER_NOTE}
COLUMNS = "| option | values | default | meaning |\n|---|---|---|---|\n"
FOREIGN = """\
## Flags of vLLM and SGLang

Spellings with the same meaning as an option stand beside it above; they work on the command line.
There these are accepted, too, with the values in the second column and no others:

| flag | values | why |
|---|---|---|
"""
MODELS = PAGE.with_name("models.md")
FAMILIES = re.compile(r"(\| family \| architecture \| features \|\n\|---\|---\|---\|\n)(?:\|.*\n)+")
KINDS = {int: "integer", float: "number", str: "text", bool: "switch"}


def options_page() -> str:
    """Returns the page as Markdown, with one section and one table for each group of options."""
    records = COMMAND_RECORDS["serve"]
    sections = [
        _section(*group, note=NOTES.get(record, ""))
        for record in records
        for group in grouped(record).items()
    ]
    prompts = [_section(*group, note=PROMPT_NOTE) for group in grouped(PromptOptions).items()]
    foreign = "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in foreign_rows())
    return "\n".join([HEAD, *sections, *prompts, FOREIGN + foreign])


def _section(title: str, options: list[Option], *, note: str = "") -> str:
    rows = "".join(f"| {' | '.join(_cells(option))} |\n" for option in options)
    return "\n".join(filter(None, [f"## {title}\n", note, COLUMNS + rows]))


def _cells(option: Option) -> Iterator[str]:
    yield ", ".join(f"`{flag}`" for flag in option.flags)
    yield _values(option)
    yield "" if option.default is None else f"`{_default(option)}`"
    former = f" (formerly `--{option.limits.former.replace('_', '-')}`)"
    yield _escaped(option.about) + (former if option.limits.former else "")


def _values(option: Option) -> str:
    """Returns the choices or the range of an option, or else its type."""
    limits = option.limits
    if limits.choices:
        also = [f"`{word}` (= `{value}`)" for word, value in limits.value_aliases.items()]
        return ", ".join([*[f"`{choice}`" for choice in limits.choices], *also])
    if math.isinf(limits.low) or option.kind is bool:
        return limits.metavar.lower() or KINDS[option.kind]
    if math.isinf(limits.high):
        return f"{KINDS[option.kind]}, {limits.low:,.12g} or more"
    return f"{KINDS[option.kind]}, {limits.low:,.12g} to {limits.high:,.12g}"


def _default(option: Option) -> str:
    """Returns the default as text. A multiple of 2^20 is shown as such."""
    value = option.default
    if option.kind is bool:
        return "on" if value else "off"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value} ({value >> 20} x 2^20)"
    return str(value)


def _escaped(text: str) -> str:
    """Escapes the characters of Markdown outside backquotes."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*|<>_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def models_page() -> str:
    """Returns docs/models.md with the table of families that the registry has."""
    rows = "".join(
        f"| {name} | `{architecture}` | {_escaped(about)} |\n"
        for name, architecture, about in family_rows()
    )
    return FAMILIES.sub(lambda found: found[1] + rows, MODELS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
    MODELS.write_text(models_page(), encoding="utf-8")
