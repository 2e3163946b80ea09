"""The ratchets: sizes, import directions, homes and bans.

The rules are in tests/architecture/, one kind per file. Here each is shown to hold for the tree,
without an exception, and to see what it forbids in a sample.
"""

import functools
from fnmatch import fnmatch

import pytest

from tests.architecture import bans, caps, imports
from tests.architecture.samples import FORBIDDEN
from tests.architecture.source import ROOT, Module, Rule, modules

RULES: tuple[Rule, ...] = (
    caps.sizes,
    caps.shapes,
    caps.small_files,
    imports.directions,
    imports.torch_homes,
    imports.lazy_imports,
    bans.vague_names,
    bans.host_syncs,
    bans.pickles,
    bans.evals,
    bans.remote_code,
    bans.module_state,
    bans.broad_excepts,
    bans.tasks,
    bans.polling,
    bans.environment,
    bans.impurities,
    bans.type_ignores,
    bans.drafter_names,
)
RULES_OF_TESTS: tuple[Rule, ...] = (
    bans.vague_names,
    bans.pickles,
    bans.evals,
    bans.type_ignores,
    bans.skips,
)


@functools.cache
def product() -> list[Module]:
    return modules("aserve", "kernels")


@functools.cache
def own_tests() -> list[Module]:
    return modules("tests")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule: Rule) -> None:
    assert_keeps(rule, product())


@pytest.mark.parametrize("rule", RULES_OF_TESTS, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    assert_keeps(rule, own_tests())


def assert_keeps(rule: Rule, tree: list[Module]) -> None:
    found = [str(finding) for module in tree for finding in rule(module)]
    assert not found, "\n".join(["", *found])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert imports.circle(product()) == []


@pytest.mark.parametrize("back", ["from aserve.a import f", "def g():\n    import aserve.a"])
def test_a_circle_is_seen_through_a_function(back: str) -> None:
    modules = [
        Module.parse("aserve/a.py", "from aserve.b import g"),
        Module.parse("aserve/b.py", "import aserve.c"),
        Module.parse("aserve/c.py", back),
    ]
    assert sorted(set(imports.circle(modules))) == ["aserve.a", "aserve.b", "aserve.c"]


def test_the_core_path_stays_within_its_line_budget() -> None:
    lines = {module.path: module.code_lines() for module in product()}
    total = caps.core_lines(lines)
    longest = sorted((item for item in lines.items() if caps.is_core(item[0])), key=lambda i: -i[1])
    assert total <= caps.CORE_LINES, f"{total} lines, at most {caps.CORE_LINES}: {longest[:10]}"


def test_every_folder_with_code_is_a_package_so_that_it_is_installed() -> None:
    folders = {(ROOT / module.path).parent for module in product()} - {ROOT / "kernels"}
    bare = sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists())
    assert not bare, f"these have no __init__.py: {bare}"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "`kernels` is another distribution"


@pytest.mark.parametrize(
    ("rule", "path", "source", "what"),
    [(*key, *sample) for key, samples in FORBIDDEN.items() for sample in samples.items()],
)
def test_a_rule_sees_what_it_forbids(rule: Rule, path: str, source: str, what: str) -> None:
    found = [str(finding) for finding in rule(Module.parse(path, source))]
    assert any(what in line for line in found), found
    assert all(line.startswith(f"{path}:") for line in found)


def test_every_rule_has_a_source_that_breaks_it() -> None:
    shown = {rule for rule, _ in FORBIDDEN}
    assert shown == {*RULES, *RULES_OF_TESTS}


def test_each_entry_of_the_core_is_there() -> None:
    paths = [module.path for module in product()]
    gone = [entry for entry in caps.CORE if not any(fnmatch(path, entry) for path in paths)]
    assert not gone, f"the core names what is not there: {gone}"


def test_no_two_folders_import_each_other() -> None:
    assert not imports.folder_circles(product())


def test_two_folders_that_import_each_other_are_seen() -> None:
    module = Module.parse
    there = module("aserve/text/stop.py", "from aserve.cache import pools")
    back = module("aserve/cache/pools.py", "from aserve.text import stop")
    assert imports.folder_circles([there, back]) == [
        "aserve.cache and aserve.text import each other"
    ]
    child = module("aserve/text/bpe/merge.py", "from aserve.text import stop")
    parent = module("aserve/text/stop.py", "from aserve.text.bpe import merge")
    assert imports.folder_circles([child, parent]) == []
