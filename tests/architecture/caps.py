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
    "cached_njit",  # ours, of aserve_kernels/cpu/precompile.py
)

CORE_LINES = 8_000
# Most of the way of a request through one dense model with a plain rope, overlapped and streamed,
# on the CPU. NOTE: such a request also runs through files that are not counted, about as many lines
# again: the rest of the scheduler and of the cache, metrics, and features that return at once.
CORE = (
    *(f"aserve/messages/{name}.py" for name in ("base", "executor", "output", "requests")),
    *(f"aserve/messages/{name}.py" for name in ("results", "step")),
    *(f"aserve/{name}.py" for name in ("channel", "engine_core", "frontend", "request_stream")),
    *(f"aserve/actors/{name}.py" for name in ("base", "detokenizer", "scheduler", "tokenizer")),
    *(f"aserve/scheduling/{name}.py" for name in ("admit", "batch", "budget", "commit", "finish")),
    *(f"aserve/scheduling/{name}.py" for name in ("queue", "recover", "request", "tick")),
    *(f"aserve/scheduling/{name}.py" for name in ("scheduler", "select", "state")),
    *(f"aserve/cache/{name}.py" for name in ("allocation", "kv_cache", "pools")),
    *("aserve/cache/page_keys.py", "aserve/cache/prefix_tree.py"),
    *(f"aserve/text/{name}.py" for name in ("detokenize", "output", "prompt", "stop")),
    *(f"aserve/text/{name}.py" for name in ("template", "tokenizer")),
    *(f"aserve/gpu/{name}.py" for name in ("executor", "runner", "step_threads", "waiter")),
    *(f"aserve/gpu/step/{name}.py" for name in ("forward_batch", "future_map", "plan", "resolve")),
    *("aserve/gpu/step/results.py", "aserve/gpu/step/ticket.py"),
    *("aserve/gpu/transfer/*", "aserve/gpu/decode/*", "aserve/gpu/kv/*"),
    *(f"aserve/gpu/layers/{name}.py" for name in ("linear", "mlp", "norm", "ops", "rope")),
    *(f"aserve/gpu/sampling/{name}.py" for name in ("draw", "gumbel", "ops", "params", "plan")),
    "aserve/gpu/sampling/sampler.py",
    *(f"aserve/gpu/models/{name}.py" for name in ("base", "decoder", "decoder_spec")),
    *("aserve/gpu/attention/base.py", "aserve/gpu/attention/cpu.py"),
    *("aserve/gpu/device/base.py", "aserve/gpu/device/ops.py", "aserve/gpu/device/cpu/device.py"),
    *(f"aserve/http/{name}.py" for name in ("body", "routes", "server", "sse")),
    *(f"aserve/http/openai/{name}.py" for name in ("call", "chat", "respond")),
)

# A file under this many statements is merged with what it belongs to, unless it is of a kind of
# which each has a file of its own: registries, model families, operators.
MIN_STATEMENTS = 25
OWN_FILES = (
    *("*/__init__.py", "*/__main__.py", "*/registry.py", "aserve/bench/catalog.py"),
    "aserve/http/routes.py",
    *("aserve/gpu/models/families/*", "aserve/gpu/layers/*", "aserve/gpu/sampling/*"),
    "aserve/parsers/families/*",
    "kernels/aserve_kernels/*",
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
    return _matches(path, CORE)


def small_files(module: Module) -> Iterator[Finding]:
    """Statements of a file, the fields of its records included."""
    if any(fnmatch(module.path, glob) for glob in OWN_FILES):
        return
    nodes = module.nodes
    size = sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)
    if size < MIN_STATEMENTS:
        what = f"the file has {size} statements: merge it with what it belongs to"
        yield Finding("small", module.path, 1, what)


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
        yield Finding(rule, module.path, line, what)


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
