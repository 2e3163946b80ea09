"""How big things may be (style 13), and how long the core path may be."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

from tests.architecture.source import FUNCTIONS, Finding, Function, Module, dotted, named

FUNCTION_STATEMENTS = 40
FILE_STATEMENTS = 250
PARAMETERS = 7
PUBLIC_METHODS = 15
NESTING = 3

# A model definition may be long; its parameters, nesting and methods are capped like all others.
LONG_FILES = "aserve/gpu/models/*"
KERNEL_DECORATORS = (
    *("triton.jit", "triton.autotune", "triton.heuristics"),
    *("numba.njit", "numba.jit", "numba.vectorize", "numba.guvectorize"),
)

CORE_LINES = 8_000
# The way of a request through one dense model, overlapped and streamed.
CORE_PATH = (
    "aserve/*.py",
    "aserve/actors/*",
    "aserve/scheduling/*",
    "aserve/cache/*",
    "aserve/text/*",
    "aserve/gpu/*",
    "aserve/http/*",
)
MODELS = "aserve/gpu/models"
# Command line, options, the embedded form, loading, the families after the first, what only some
# requests ask for, and what only looks on.
BESIDE_THE_CORE = (
    *("aserve/cli.py", "aserve/config.py", "aserve/engine.py", "aserve/actors/replay.py"),
    "aserve/text/load.py",
    "aserve/gpu/fallback/*",
    *("aserve/text/load.py", "aserve/text/template_files.py", "aserve/text/json_file.py"),
    *("aserve/text/numeric.py", "aserve/text/defaults.py"),
    *("aserve/observability/*", "aserve/gpu/weights/*", "aserve/gpu/graphs.py"),
    # What is read of the machine, and set for libraries, before the engine starts.
    *("aserve/gpu/device/control_groups.py", "aserve/gpu/device/cpu_count.py"),
    *("aserve/gpu/device/cpu_weights.py", "aserve/gpu/device/process.py"),
    *("aserve/scheduling/check.py", "aserve/cache/conservation.py"),
    # What one dense model takes instead of the default, or is compared with.
    *("aserve/gpu/attention/paged_sdpa.py", "aserve/gpu/attention/torch_ref.py"),
    *("aserve/gpu/layers/half_stored_linear.py", "aserve/gpu/quant/*"),
    *(f"{MODELS}/config.py", f"{MODELS}/fields.py", f"{MODELS}/rope_fields.py"),
    *(f"{MODELS}/layer_kinds.py", f"{MODELS}/mistral.py", f"{MODELS}/qwen2.py"),
    *(f"{MODELS}/qwen3.py", f"{MODELS}/gemma2.py", f"{MODELS}/gemma3.py", f"{MODELS}/phi3.py"),
    *(f"{MODELS}/granite.py", f"{MODELS}/olmo2.py"),
    *("aserve/http/openai/responses/*", "aserve/http/openai/grammars.py"),
    *("aserve/http/openai/tokens.py", "aserve/http/text_desk.py"),
    *("aserve/http/websocket.py", "aserve/text/bad_words.py", "aserve/gpu/sample/bans.py"),
    *("aserve/scheduling/prompts.py", "aserve/gpu/prompt_plan.py", "aserve/gpu/prompt_values.py"),
    *("aserve/grammar/*", "aserve/actors/masks.py", "aserve/progress.py"),
    *("aserve/tiny/*", "aserve/bench/*"),
    *("aserve/text/prompt_text.py", "aserve/http/openai/prompt_scores.py"),
    "aserve/http/openai/embeddings.py",
)

BLOCKS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With),
    *(ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)


def sizes(module: Module) -> Iterator[Finding]:
    """Statements of the file and of each function."""
    if fnmatch(module.path, LONG_FILES):
        return
    yield from _over("file", module, "", 1, num_statements(module.tree), FILE_STATEMENTS)
    for where, node in _capped_functions(module):
        count = num_statements(node)
        yield from _over("statements", module, where, node.lineno, count, FUNCTION_STATEMENTS)


def shapes(module: Module) -> Iterator[Finding]:
    """Parameters and nesting of each function, public methods of each class."""
    for where, function in _capped_functions(module):
        size = nesting(function)
        yield from _over("nesting", module, where, function.lineno, size, NESTING)
    for where, node, parent in named(module.tree):
        if isinstance(node, ast.ClassDef):
            count = len(_public_methods(node))
            yield from _over("methods", module, where, node.lineno, count, PUBLIC_METHODS)
        elif not is_kernel(node):
            count = _num_parameters(node, is_method=isinstance(parent, ast.ClassDef))
            yield from _over("parameters", module, where, node.lineno, count, PARAMETERS)


def num_statements(node: ast.AST) -> int:
    """All statements below `node`; docstrings, fields of records and kernel bodies are free."""
    total = 0
    for child in ast.iter_child_nodes(node):
        if _is_docstring(child) or _is_field(child, node):
            continue
        total += isinstance(child, ast.stmt)
        if not is_kernel(child):
            total += num_statements(child)
    return total


def nesting(node: ast.AST) -> int:
    """How deep blocks stand in one another; `elif` stays level, an inner function begins anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def is_kernel(node: ast.AST) -> bool:
    """Compiled by Triton or numba: such a body may be long, and takes what it takes."""
    if not isinstance(node, FUNCTIONS):
        return False
    names = {dotted(item).removesuffix("()") for item in node.decorator_list}
    return any(name in KERNEL_DECORATORS or f"numba.{name}" in KERNEL_DECORATORS for name in names)


def core_lines(path_lines: dict[str, int]) -> int:
    return sum(lines for path, lines in path_lines.items() if is_core(path))


def is_core(path: str) -> bool:
    return _matches(path, CORE_PATH) and not _matches(path, BESIDE_THE_CORE)


def is_placed(path: str) -> bool:
    """A new folder must be put on the core path or beside it."""
    return _matches(path, CORE_PATH) or _matches(path, BESIDE_THE_CORE)


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    """`*.py` matches within one folder, a closing `*` everything below it."""
    return any(
        fnmatch(path, glob) and (not glob.endswith(".py") or path.count("/") == glob.count("/"))
        for glob in globs
    )


def _over(
    rule: str, module: Module, where: str, line: int, size: int, cap: int
) -> Iterator[Finding]:
    if size > cap:
        units = {"methods": "public methods", "nesting": "levels of nesting"}
        unit = units.get(rule, "parameters" if rule == "parameters" else "statements")
        what = f"{where or 'the file'} has {size} {unit}, at most {cap} are allowed"
        yield Finding(rule, module.path, line, what, where, size)


def _capped_functions(module: Module) -> Iterator[tuple[str, Function]]:
    for where, node, _ in named(module.tree):
        if isinstance(node, FUNCTIONS) and not is_kernel(node):
            yield where, node


def _public_methods(node: ast.ClassDef) -> set[str]:
    """By name: overloads, and a property with its setter, are one."""
    names = {child.name for child in node.body if isinstance(child, FUNCTIONS)}
    return {name for name in names if not name.startswith("_")}


def _num_parameters(node: Function, *, is_method: bool) -> int:
    spec = node.args
    count = len(spec.posonlyargs) + len(spec.args) + len(spec.kwonlyargs)
    count += (spec.vararg is not None) + (spec.kwarg is not None)
    is_static = any(dotted(item) == "staticmethod" for item in node.decorator_list)
    return count - (is_method and not is_static)


def _is_docstring(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False


def _is_field(node: ast.AST, parent: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(parent, ast.ClassDef)
