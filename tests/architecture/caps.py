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
    "cached_njit",  # ours, of aserve_kernels/cpu/ahead.py
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
# What the core path does without: before the first request, or beside it.
STARTS = (
    *("aserve/cli.py", "aserve/config.py", "aserve/engine.py", "aserve/progress.py"),
    *(f"aserve/{name}.py" for name in ("banner", "event_loop", "launch", "load", "logs")),
    "aserve/actors/supervisor.py",
    *("aserve/host/threads.py", "aserve/option.py", "aserve/program.py", "aserve/server.py"),
    *("aserve/cache/layout.py", "aserve/gpu/build.py"),
    *("aserve/gpu/cudagraph/warmup.py", "aserve/gpu/cudagraph/warmup.py"),
    *(f"aserve/gpu/attention/{name}.py" for name in ("capabilities", "choice", "registry")),
    *("aserve/gpu/weights/*", "aserve/host/environment.py"),
    "aserve/host/limits.py",
    *(f"aserve/gpu/device/cpu_{name}.py" for name in ("count", "facts", "weights")),
    *("aserve/gpu/models/config/model.py", "aserve/gpu/models/config/fields.py"),
    *("aserve/gpu/models/config/rope.py", "aserve/gpu/models/config/layer_types.py"),
    *("aserve/text/load.py", "aserve/text/model_files.py", "aserve/text/model_files.py"),
    *("aserve/text/tokenizer.py", "aserve/text/defaults.py"),
)
LOOKS_ON = (
    *("aserve/observability/*", "aserve/actors/replay.py", "aserve/http/routes.py"),
    *("aserve/scheduling/check.py", "aserve/cache/conservation.py"),
    *("aserve/tiny/*", "aserve/bench/*"),
)
# One of several that a server may take; the core counts one of each kind.
ALTERNATIVES = (
    *("aserve/processes/*", "aserve/frames.py"),
    *("aserve/gpu/fallback/*", "aserve/gpu/quant/*"),
    *("aserve/gpu/cudagraph/graphs.py", "aserve/gpu/cudagraph/shapes.py"),
    *("aserve/gpu/device/cuda*.py", "tools.gpu_check.recorded_graphs.py"),
    *("aserve/gpu/device/cuda/ops.py", "aserve/gpu/device/cuda/ops.py"),
    *(f"aserve/gpu/attention/{name}.py" for name in ("dense", "paged_sdpa", "torch_ref", "triton")),
    *("aserve/gpu/attention/flashinfer*.py", "aserve/gpu/attention/base.py"),
    *(
        "aserve/gpu/attention/flashinfer/page_indices.py",
        "aserve/gpu/attention/flashinfer/plan_buffers.py",
    ),
    *("aserve/cache/allocation.py", "aserve/cache/layout.py", "aserve/cache/windowed_pages.py"),
    *(f"aserve/gpu/kv/{name}.py" for name in ("stored", "compiled_store", "triton_store")),
    *(f"aserve/gpu/layers/{name}_linear.py" for name in ("half_stored", "invariant")),
    *(f"aserve/gpu/layers/{name}_linear.py" for name in ("packed", "tiled")),
    *(f"aserve/gpu/layers/{name}.py" for name in ("compiled", "each_alone", "triton_elementwise")),
    *("aserve/gpu/device/cuda/ops.py", "aserve/gpu/device/cpu/ops.py"),
    "aserve/gpu/device/cpu/fused_decoder.py",
    *(f"aserve/gpu/models/{name}.py" for name in ("mistral", "qwen2", "qwen3", "gemma2")),
    *(f"aserve/gpu/models/{name}.py" for name in ("gemma3", "phi3", "granite", "olmo2")),
)
# What only some requests ask for, each in files of its own.
ASKED_FOR = (
    *("aserve/http/openai/responses/*", "aserve/http/responses/websocket.py"),
    *("aserve/grammar/*", "aserve/actors/grammars.py"),
    *("aserve/actors/masks.py", "aserve/actors/mask_lane.py"),
    *("aserve/http/openai/grammars.py", "aserve/scheduling/grammar_rows.py"),
    *(
        "aserve/scheduling/prompts.py",
        "aserve/gpu/step/prompt_plan.py",
        "aserve/gpu/step/prompts.py",
    ),
    *("aserve/text/prompt_text.py", "aserve/http/openai/prompt_scores.py"),
    *(f"aserve/http/openai/{name}.py" for name in ("embeddings", "gathered")),
    *("aserve/http/openai/completion_logprobs.py", "aserve/http/long_json.py"),
    *("aserve/http/openai/tokens.py", "aserve/http/tokenize_service.py"),
    *("aserve/text/logprobs.py", "aserve/text/bad_words.py"),
    *("aserve/gpu/sampling/token_masks.py", "aserve/gpu/sampling/penalties.py"),
    "aserve/gpu/sampling/top_k_top_p.py",
)
# What only refuses: limits and checks that a request passes on its way, in files of their own.
GUARDS = (
    *("aserve/http/openai/limits.py", "aserve/http/openai/json_values.py"),
    *("aserve/actors/admission.py", "aserve/actors/tokenize_queue.py"),
    "aserve/text/text_size.py",
    *(f"aserve/http/{name}.py" for name in ("connection", "hosts", "json_bounds")),
    *(f"aserve/http/{name}.py" for name in ("decompress", "descriptors", "intake")),
    *("aserve/http/masked_frames.py", "aserve/text/plain_content.py"),
    *(f"aserve/http/openai/{name}.py" for name in ("answer_size", "checks")),
    "aserve/actors/text_slices.py",
    "aserve/actors/text_slices.py",
    *("aserve/unread.py", "aserve/http/delivery.py"),
    *("aserve/capacity.py", "aserve/heap.py", "aserve/http/state.py"),
)
# What only a server of several clients needs: who they are, and how they share the engine. The
# queue is here, because a list in order of arrival would do for one client.
# So are the files by which many requests that come at once share turns and prompts.
SHARING = (
    *("aserve/scheduling/followers.py", "aserve/scheduling/intake.py"),
    *("aserve/http/auth.py", "aserve/scheduling/clients.py", "aserve/scheduling/queue.py"),
    *("aserve/scheduling/shares.py", "aserve/http/openai/caller.py"),
)
# What only the prefix cache needs: without it the page pools alone would do.
PREFIX_CACHE = ("aserve/cache/eviction.py", "aserve/cache/prefix_tree.py")
BESIDE_THE_CORE = (*PREFIX_CACHE, *STARTS, *LOOKS_ON, *ALTERNATIVES, *ASKED_FOR, *GUARDS, *SHARING)

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
