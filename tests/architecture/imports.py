"""Who may import whom: the paragraph "Import directions" of the architecture as a table."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from tests.architecture.source import FUNCTIONS, Finding, Module, dotted, is_under

FIRST = (
    "aserve.errors",
    "aserve.json_file",
    "aserve.config",
    "aserve.options.option",
    "aserve.messages",
    "aserve.picture",
    "aserve.channel",
    "aserve.frames",
    "aserve.observability",
)
PLAIN = ("numpy", "msgspec", "prometheus_client")
TORCH_HOMES = ("aserve/gpu/", "kernels/", "aserve/bench/", "aserve/tiny/")

# What a decision must not see: the clock, chance, threads, the outside world.
IMPURE = (
    *("asyncio", "concurrent", "multiprocessing", "subprocess", "threading"),
    *("datetime", "random", "secrets", "time", "uuid"),
    *("io", "os", "pathlib", "socket", "tempfile"),
)

# Seconds each: only inside functions.
LAZY = re.compile(
    r"xgrammar(\.|$)"
    r"|transformers\.(models|modeling_\w+|generation)(\.|$)"
    r"|transformers\.(AutoModel\w*|\w*PreTrainedModel|\w+For[A-Z]\w+|\w+Model)$"
)


@dataclass(frozen=True, slots=True)
class Reach:
    """What a package may import; None is everything that is installed, and all of aserve."""

    aserve: tuple[str, ...] | None = None
    packages: tuple[str, ...] | None = None
    not_stdlib: tuple[str, ...] = ()


ANYTHING = Reach()
BORDER = Reach(aserve=FIRST, packages=PLAIN)
# What loads or runs a model.
DEVICE = (
    *(*PLAIN, "torch", "triton", "flashinfer", "deep_ep", "mlx"),
    *("gguf", "safetensors", "huggingface_hub", "transformers"),
)

REACH = {
    "aserve.__init__": Reach(aserve=(), packages=()),
    "aserve.__main__": ANYTHING,
    "aserve.cli": ANYTHING,
    "aserve.chat": ANYTHING,
    "aserve.frontend": ANYTHING,
    "aserve.engine_core": ANYTHING,
    "aserve.engine": ANYTHING,
    "aserve.startup": ANYTHING,
    "aserve.load": ANYTHING,
    "aserve.program": ANYTHING,
    "aserve.server": ANYTHING,
    "aserve.processes": ANYTHING,
    "aserve.router": Reach(
        aserve=(*FIRST, "aserve.http", "aserve.host", "aserve.processes", "aserve.program"),
        packages=(*PLAIN, "aiohappyeyeballs", "aiohttp", "httptools", "multidict", "rich", "yarl"),
    ),
    "aserve.parallel": ANYTHING,
    "aserve.terminal": Reach(aserve=("aserve.errors", "aserve.host.logs"), packages=("rich",)),
    "aserve.progress": Reach(aserve=(), packages=("rich",)),
    "aserve.bench": ANYTHING,
    "aserve.tiny": ANYTHING,
    "aserve.errors": BORDER,
    "aserve.config": Reach(
        aserve=(
            *(*FIRST, "aserve.gpu.attention.registry", "aserve.gpu.diffusion.registry"),
            *("aserve.gpu.spec.registry", "aserve.parsers.registry"),
            "aserve.options.node_options",
        ),
        packages=(*PLAIN, "yaml"),
    ),
    "aserve.options": Reach(aserve=(*FIRST, "aserve.gpu.spec.registry"), packages=PLAIN),
    "aserve.disagg": Reach(
        aserve=(*FIRST, "aserve.actors", "aserve.host"), packages=(*PLAIN, "nixl")
    ),
    "aserve.tiers": Reach(
        aserve=(
            *(*FIRST, "aserve.actors", "aserve.cache.page_keys", "aserve.disagg.connect"),
            "aserve.host",
        ),
        packages=(*PLAIN, "fsspec"),
    ),
    "aserve.measure_steps": Reach(
        aserve=(*FIRST, "aserve.progress", "aserve.scheduling"), packages=PLAIN
    ),
    "aserve.messages": BORDER,
    "aserve.picture": Reach(aserve=(), packages=PLAIN, not_stdlib=IMPURE),
    "aserve.channel": BORDER,
    "aserve.frames": BORDER,
    "aserve.fair_queue": BORDER,
    "aserve.json_file": BORDER,
    "aserve.gguf": Reach(aserve=FIRST, packages=(*PLAIN, "gguf")),
    "aserve.host": Reach(
        aserve=(*FIRST, "aserve.gguf.model_dir"), packages=("uvloop", "huggingface_hub")
    ),
    "aserve.amendments": BORDER,
    "aserve.request_stream": Reach(
        aserve=(*FIRST, "aserve.unread", "aserve.amendments"), packages=PLAIN
    ),
    "aserve.unread": BORDER,
    "aserve.health": BORDER,
    "aserve.host.heap": Reach(aserve=(), packages=()),
    "aserve.observability": BORDER,
    "aserve.observability.tracing": Reach(aserve=FIRST, packages=(*PLAIN, "opentelemetry")),
    "aserve.cache": Reach(aserve=FIRST, packages=PLAIN, not_stdlib=IMPURE),
    "aserve.scheduling": Reach(aserve=(*FIRST, "aserve.cache"), packages=PLAIN, not_stdlib=IMPURE),
    "aserve.pictures": Reach(aserve=FIRST, packages=(*PLAIN, "PIL", "yarl")),
    "aserve.pictures.fetch": Reach(
        aserve=(*FIRST, "aserve.pictures"), packages=(*PLAIN, "aiohttp", "yarl")
    ),
    "aserve.text": Reach(
        aserve=(
            *(*FIRST, "aserve.cache.page_keys", "aserve.parsers.registry"),
            "aserve.pictures",
        ),
        packages=(*PLAIN, "huggingface_hub", "tokenizers", "transformers", "jinja2"),
    ),
    "aserve.parsers": Reach(
        aserve=(*FIRST, "aserve.grammar.schema"), packages=PLAIN, not_stdlib=IMPURE
    ),
    "aserve.grammar": Reach(aserve=(*FIRST, "aserve.fair_queue"), packages=(*PLAIN, "xgrammar")),
    "aserve.actors": Reach(
        aserve=(
            *(*FIRST, "aserve.scheduling", "aserve.text", "aserve.grammar", "aserve.host"),
            *("aserve.fair_queue", "aserve.pictures.fetch"),
        ),
        packages=PLAIN,
    ),
    "aserve.http": Reach(
        aserve=(
            *(*FIRST, "aserve.request_stream", "aserve.unread", "aserve.text", "aserve.parsers"),
            *("aserve.batches", "aserve.receipts", "aserve.amendments"),
            *("aserve.grammar.source_limits", "aserve.host.memory", "aserve.pictures.fetch"),
        ),
        packages=(*PLAIN, "aiohttp", "multidict"),
    ),
    "aserve.receipts": Reach(aserve=(*FIRST, "aserve.host.threads"), packages=PLAIN),
    "aserve.receipts.verify": ANYTHING,
    "aserve.selftest": Reach(aserve=FIRST, packages=(*PLAIN, "aiohttp", "rich")),
    "aserve.batches": Reach(aserve=(*FIRST, "aserve.actors.base"), packages=PLAIN),
    "aserve.gpu": Reach(
        aserve=(
            *(*FIRST, "aserve.cache.layout", "aserve.host", "aserve.progress", "aserve_kernels"),
            *("aserve.gguf.families", "aserve.gguf.table"),
            "aserve.parallel.topology",
        ),
        packages=DEVICE,
    ),
    "aserve_kernels": Reach(aserve=(), packages=("torch", "numpy", "triton")),
    "aserve_kernels.cpu": Reach(
        aserve=("aserve_kernels",), packages=("torch", "numpy", "triton", "numba", "llvmlite")
    ),
}


@dataclass(frozen=True, slots=True)
class Import:
    """`target` is dotted down to the imported name; a lazy one doesn't run at import."""

    target: str
    line: int
    is_lazy: bool


def directions(module: Module) -> Iterator[Finding]:
    unit = unit_of(module.name)
    if unit is None:
        what = f"{module.name} is in no row of REACH (tests/architecture/imports.py): place it"
        yield Finding("import", module.path, 1, what)
        return
    for item in imports(module):
        reason = _refusal(item.target, unit, REACH[unit])
        if reason:
            what = f"{unit} must not import {item.target}: {reason}"
            yield Finding("import", module.path, item.line, what)


def torch_homes(module: Module) -> Iterator[Finding]:
    """torch only on the device side; triton, which needs it, too."""
    if is_under(module.path, TORCH_HOMES):
        return
    for item in imports(module):
        if item.target.partition(".")[0] in ("torch", "triton"):
            what = f"{item.target} is imported outside of {', '.join(TORCH_HOMES)}"
            yield Finding("torch", module.path, item.line, what)


def lazy_imports(module: Module) -> Iterator[Finding]:
    for item in imports(module):
        if not item.is_lazy and LAZY.match(item.target):
            what = f"{item.target} takes seconds to import: do it in the function that uses it"
            yield Finding("lazy", module.path, item.line, what)


def circle(modules: list[Module]) -> list[str]:
    """Modules each of which imports the next, and the last the first; none if there is no circle.
    Imports within functions, and for types alone, count: they would only hide it.
    """
    names = {module.name for module in modules}
    graph = {
        module.name: {_home(item.target, names) for item in imports(module)} & names
        for module in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def folder_circles(modules: list[Module]) -> list[str]:
    """Pairs of folders that import each other. A folder and its direct parent may, and so may the
    package's root, whose files put everything together.
    """
    homes = {module.name: _folder(module) for module in modules}
    arrows = {
        (homes[module.name], homes[target])
        for module in modules
        for item in imports(module)
        if (target := _home(item.target, set(homes))) in homes
    }
    return sorted(
        f"{left} and {right} import each other"
        for left, right in arrows
        if left < right and (right, left) in arrows and not _is_above(left, right)
    )


def unit_of(name: str) -> str | None:
    """The row of REACH that a module belongs to: the longest that is a prefix."""
    if name == "aserve":
        return "aserve.__init__"
    return max((row for row in REACH if _within(name, row)), key=len, default=None)


def imports(module: Module) -> Iterator[Import]:
    yield from _imports_below(module.tree, module, is_lazy=False)


def _home(target: str, names: set[str]) -> str:
    """The module that an imported name stands in; itself for what is none of `names`."""
    return target if target in names else target.rpartition(".")[0]


def _folder(module: Module) -> str:
    is_package = module.path.endswith("__init__.py")
    return module.name if is_package else module.name.rpartition(".")[0]


def _is_above(left: str, right: str) -> bool:
    return left == "aserve" or left == right.rpartition(".")[0]


def _refusal(target: str, unit: str, reach: Reach) -> str:
    top = target.partition(".")[0]
    if top in ("aserve", "aserve_kernels"):
        allowed = reach.aserve
        if allowed is None or any(_within(target, row) for row in (unit, *allowed)):
            return ""
        return f"of aserve it may import {', '.join(allowed) or 'nothing'}"
    if top in sys.stdlib_module_names:
        return "it decides without clock, chance and I/O" if top in reach.not_stdlib else ""
    if top == "tests":
        return "the product doesn't know its tests"
    if reach.packages is None or top in reach.packages:
        return ""
    return f"of other packages it may import {', '.join(reach.packages) or 'nothing'}"


def _within(target: str, row: str) -> bool:
    return target == row or target.startswith(f"{row}.")


def _imports_below(node: ast.AST, module: Module, *, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, child.lineno, is_lazy)
            case ast.ImportFrom(names=names):
                for alias in names:
                    target = f"{_base(child, module)}.{alias.name}".removesuffix(".*")
                    yield Import(target, child.lineno, is_lazy)
            case ast.If(test=test) if dotted(test).endswith("TYPE_CHECKING"):
                yield from _imports_below(child, module, is_lazy=True)
            case _:
                is_inner = is_lazy or isinstance(child, (*FUNCTIONS, ast.Lambda))
                yield from _imports_below(child, module, is_lazy=is_inner)


def _base(node: ast.ImportFrom, module: Module) -> str:
    """The module that `from` names; a relative one is resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts if module.path.endswith("__init__.py") else parts[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)
