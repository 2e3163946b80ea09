"""What the documentation names is there: options of the command line, and files of the tree."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from aserve.cli import make_parser
from tests.architecture.source import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
CODE_PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?|[\w-]+\.py)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")
# Of mypy, of transformers, of `make gpu-check` and of the script that trains the bundled model.
FOREIGN = frozenset({"--strict", "--continuous-batching", "--again", "--output"})
# A file is named from where its reader stands.
FOLDERS = ("", "aserve", "aserve/gpu", "aserve/gpu/models", "kernels", "kernels/aserve_kernels")


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from flags_of(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_is_named_is_one(page: Path) -> None:
    known = {*flags_of(make_parser()), *FOREIGN}
    assert sorted(set(FLAG.findall(page.read_text())) - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    named = CODE_PATH.findall(text)
    lost = [path for path in named if not any((ROOT / home / path).exists() for home in FOLDERS)]
    lost += [path for path in LINK.findall(text) if not (page.parent / path).exists()]
    assert lost == []
