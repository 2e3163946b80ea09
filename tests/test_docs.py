"""Documentation names options and files that exist; generated pages and pictures are up to date."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from aserve.bench.chart import Comparison
from aserve.cli import make_parser
from aserve.http.routes import ROUTES
from tests.architecture.source import ROOT
from tests.bench.last_line import Captured, figures_of
from tools.options_page import MODELS, PAGE, models_page, options_page

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
FIGURES = ROOT / "docs" / "figures"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
CODE_PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?|[\w-]+\.py)`")
NAME_IN_FILE = re.compile(r"`(?:\w+\.)*(\w+)` \(`([\w/-]+\.py)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CURL = re.compile(r"^curl .*(?:\n  .*)*", re.MULTILINE)
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")
# Options of mypy, transformers, llama.cpp, Docker, `make gpu-check` and the training script of the
# bundled model.
FOREIGN = frozenset(
    {
        "--build-arg",
        "--builtin-schema",
        "--ipc",
        "--read-only",
        "--secret",
        "--target",
        "--tmpfs",
        "--depth",
        "--lead",
        "--mixed-prompt-tokens",
        "--strict",
        "--continuous-batching",
        "--again",
        "--output",
        "--alias",
        "--chat-template-file",
        "--embedding",
        "--embeddings",
        "--jinja",
        "--metrics",
        "--parallel",
        "--pooling",
    }
)
# Pages name a file from one of these folders.
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


def test_a_name_beside_a_file_is_in_that_file() -> None:
    named = [match for page in PAGES for match in NAME_IN_FILE.findall(page.read_text())]
    assert named
    texts = {
        path: "".join(
            (ROOT / home / path).read_text() for home in FOLDERS if (ROOT / home / path).exists()
        )
        for _, path in named
    }
    assert [each for each in named if not re.search(rf"\b{each[0]}\b", texts[each[1]])] == []


def test_every_test_that_is_named_is_there() -> None:
    named = [match for page in PAGES for match in TEST.findall(page.read_text(encoding="utf-8"))]
    assert named
    lost = [
        f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert lost == []


def test_every_curl_command_says_that_it_sends_json() -> None:
    """Otherwise the answer is a 415. The router's own routes take any type."""
    commands = [
        command
        for page in PAGES
        for command in CURL.findall(page.read_text(encoding="utf-8").replace("\\\n", ""))
        if " -d " in command and "/admin/replicas" not in command
    ]
    assert commands
    assert [
        command for command in commands if "Content-Type: application/json" not in command
    ] == []


def test_the_table_of_endpoints_has_every_route() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^\| `([A-Z]+) (/\S*)` \|", page, re.MULTILINE)
    served = [(route.method, re.sub(r":[^}]*}", "}", route.path)) for route in ROUTES]
    assert sorted(listed) == sorted(served)


def test_the_page_of_options_is_generated_from_the_options() -> None:
    assert PAGE.read_text() == options_page(), "run `python -m tools.options_page`"


def test_the_table_of_families_is_generated_from_their_registry() -> None:
    assert MODELS.read_text() == models_page(), "run `python -m tools.options_page`"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--comparison", str(FIGURES / "engines.json")),
        ("--comparison", str(FIGURES / "speculation.json")),
        ("--results", str(FIGURES / "scaling.json")),
        ("--results", str(FIGURES / "cluster.json")),
    ],
    ids=("engines", "speculation", "scaling", "cluster"),
)
def test_the_pictures_show_the_figures_beside_them(
    arguments: tuple[str, str], tmp_path: Path, capsys: Captured
) -> None:
    pictures = figures_of(capsys, "report", *arguments, "--out", str(tmp_path))["pictures"]
    assert pictures
    for name, drawn in pictures.items():
        assert (FIGURES / f"{name}.svg").read_text() == Path(drawn).read_text(), name


@pytest.mark.parametrize("name", ["engines", "speculation"])
def test_the_figures_of_the_picture_stand_on_the_page(name: str) -> None:
    """A figure of the chart that the page about performance does not hold would be an invention."""
    page = (ROOT / "docs" / "performance.md").read_text()
    comparison = msgspec.json.decode((FIGURES / f"{name}.json").read_bytes(), type=Comparison)
    shown = {figure for panel in comparison.panels for bar in panel.bars.values() for figure in bar}
    assert [f"{figure:,g}" for figure in sorted(shown) if f"{figure:,g}" not in page] == []
