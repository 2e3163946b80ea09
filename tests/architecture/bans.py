"""What may not be written, or only in its home (where a thing belongs, no exception)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.imports import imports
from tests.architecture.source import FUNCTIONS, Finding, Module, dotted, is_under

TASK_HOMES = (
    *("aserve/actors/base.py", "aserve/http/responses/live.py"),
    "aserve/parallel/leader.py",  # a profile ends although its client has gone
    "aserve/router/replica_connection.py",  # a body is sent while its answer is awaited
    "aserve/http/streams/resumable.py",  # an answer that goes on without its client
    "aserve/http/state.py",  # updates of weights and sleeps go on, too
)
BROAD_EXCEPT_HOMES = (
    *("aserve/actors/base.py", "aserve/http/server.py", "aserve/http/streams/resumable.py"),
    "aserve/http/responses/websocket.py",  # each of its messages is a request
    # a failing step is a value, whatever it raised; a graph that fails is not captured
    *("aserve/gpu/step_threads.py", "aserve/gpu/cudagraph/graphs.py"),
    "aserve/tiers/page_files.py",  # each store behind fsspec has exceptions of its own
    "aserve/disagg/nixl_agent.py",  # so has NIXL
    "aserve/text/text_size.py",  # tokenizers raises a bare Exception for unknown text
)
ENVIRONMENT_HOMES = ("aserve/config.py",)
ENVIRONMENT_CALLS = ("os.environ", "os.getenv", "os.putenv")
# The client for Node is in the npm registry, which a machine may not reach. NIXL is for Linux, and
# Ray has packages of its own, so both are tested where they are installed.
SKIP_HOMES = (
    *("tests/e2e/test_node_client.py", "tests/disagg/test_nixl.py"),
    "tests/parallel/test_ray.py",
)
DEVICE = ("aserve/gpu/",)
PURE = ("aserve/scheduling/", "aserve/cache/")
# A drafter is named by its own file and a registry line; tiny/ and bench/ train and measure it.
DRAFTER_HOMES = ("aserve/gpu/spec/", "aserve/tiny/", "aserve/bench/")

VAGUE = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
DRAFTERS = {"dflash", "eagle", "eagle3", "medusa", "mtp", "ngram"}
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {"all_gather_object", "broadcast_object_list", "gather_object"}
PICKLING_CALLS |= {"recv_object_list", "scatter_object_list", "send_object_list"}
MUTATORS = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop"}
MUTATORS |= {"popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"}
CONTAINERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
SKIPS = {"importorskip", "skip", "skipif", "xfail"}
CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*$|__\w+__$")
ALIAS = re.compile(r"_*[A-Z]\w*$")
IGNORE = re.compile(r"#\s*type:\s*ignore")
IGNORE_WITH_REASON = re.compile(r"#\s*type:\s*ignore\[[\w, -]+\]\s+#\s*\S+")


def vague_names(module: Module) -> Iterator[Finding]:
    words = {
        word for part in module.path.removesuffix(".py").split("/") for word in part.split("_")
    }
    for word in sorted(words & VAGUE):
        yield Finding("name", module.path, 1, f"'{word}' says nothing: name the noun it is about")


def host_syncs(module: Module) -> Iterator[Finding]:
    """`.item()`, `.cpu()`, `.tolist()` make the device's thread wait."""
    if not is_under(module.path, DEVICE):
        return
    for name, node in module.calls:
        method = name.rpartition(".")[2]
        if "." in name and method in ("item", "cpu", "tolist"):
            yield Finding("sync", module.path, node.lineno, f".{method}() waits for the device")


def pickles(module: Module) -> Iterator[Finding]:
    for item in imports(module):
        if item.target.partition(".")[0] in PICKLES:
            yield Finding("pickle", module.path, item.line, f"{item.target}: use msgspec")
    for name, node in module.calls:
        options = {option.arg: option.value for option in node.keywords}
        if name.rpartition(".")[2] in PICKLING_CALLS:
            yield Finding("pickle", module.path, node.lineno, f"{name} pickles: send tensors")
        if _is_constant(options.get("allow_pickle"), True):
            yield Finding("pickle", module.path, node.lineno, f"{name} with allow_pickle=True")
        if _is_constant(options.get("weights_only"), False):
            yield Finding("pickle", module.path, node.lineno, f"{name} with weights_only=False")


def evals(module: Module) -> Iterator[Finding]:
    for name, node in module.calls:
        if name in ("eval", "exec", "__import__"):
            yield Finding("eval", module.path, node.lineno, f"{name}() runs what it is given")


def remote_code(module: Module) -> Iterator[Finding]:
    """Without the argument, transformers asks the terminal if it may run a checkpoint's code."""
    for name, node in module.calls:
        options = {option.arg: option.value for option in node.keywords}
        is_loader = name.startswith("Auto") and name.endswith(".from_pretrained")
        if is_loader and not _is_constant(options.get("trust_remote_code"), False):
            yield Finding("code", module.path, node.lineno, f"{name} may run a checkpoint's code")


def module_state(module: Module) -> Iterator[Finding]:
    """A name that a module binds is a constant, a type or a logger, and nobody changes it."""
    constants = set()
    for name, value, line in _bindings(module.tree.body):
        constants.add(name)
        if not _may_bind(name, value):
            what = f"{name} is module state: make it an ALL_CAPS constant or pass it as an argument"
            yield Finding("state", module.path, line, what)
    for node in module.nodes:
        if isinstance(node, ast.Global):
            what = f"global {', '.join(node.names)}"
            yield Finding("state", module.path, node.lineno, what)
        elif isinstance(node, FUNCTIONS):
            yield from _changes(node, module, constants)


def broad_excepts(module: Module) -> Iterator[Finding]:
    if is_under(module.path, BROAD_EXCEPT_HOMES):
        return
    what = f"catches everything: only {' and '.join(BROAD_EXCEPT_HOMES)} may, and answer someone"
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is not None and _is_broad(node.type):
            yield Finding("except", module.path, node.lineno, what)
    for name, node in module.calls:
        if name.endswith("suppress") and any(_is_broad(item) for item in node.args):
            yield Finding("except", module.path, node.lineno, what)


def tasks(module: Module) -> Iterator[Finding]:
    """A task belongs to its actor (or to an `asyncio.TaskGroup`, whose own create_task is free)."""
    if is_under(module.path, TASK_HOMES):
        return
    for name, node in module.calls:
        owner, _, method = name.rpartition(".")
        is_loop = owner in ("", "asyncio") or "loop" in owner
        if method == "ensure_future" or (method == "create_task" and is_loop):
            what = f"{name}: only {', '.join(TASK_HOMES)} starts tasks"
            yield Finding("task", module.path, node.lineno, what)


def polling(module: Module) -> Iterator[Finding]:
    for name, node in module.calls:
        if name == "time.sleep":
            yield Finding("sleep", module.path, node.lineno, "time.sleep blocks: wait for an event")
        if name == "asyncio.sleep" and node.args and _is_constant(node.args[0], 0):
            yield Finding("sleep", module.path, node.lineno, "asyncio.sleep(0) polls")
    for item in imports(module):
        if item.target in ("time.sleep", "asyncio.sleep"):
            what = f"import {item.target.partition('.')[0]}, so that sleeping is seen"
            yield Finding("sleep", module.path, item.line, what)


def environment(module: Module) -> Iterator[Finding]:
    if is_under(module.path, ENVIRONMENT_HOMES):
        return
    what = f"the environment is read in {', '.join(ENVIRONMENT_HOMES)} alone"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT_CALLS:
            yield Finding("environment", module.path, node.lineno, what)
    for item in imports(module):
        if item.target in ENVIRONMENT_CALLS:
            yield Finding("environment", module.path, item.line, what)


def impurities(module: Module) -> Iterator[Finding]:
    """What an import table cannot see: files and numpy's own randomness."""
    if not is_under(module.path, PURE):
        return
    for name, node in module.calls:
        is_random = name.startswith(("np.random.", "numpy.random."))
        if name in ("open", "input") or is_random:
            what = f"{name}(): decisions have no I/O and no chance"
            yield Finding("pure", module.path, node.lineno, what)


def type_ignores(module: Module) -> Iterator[Finding]:
    if not IGNORE.search(module.source):
        return
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type != tokenize.COMMENT or not IGNORE.match(token.string):
            continue
        if not IGNORE_WITH_REASON.match(token.string):
            what = "write `# type: ignore[code]  # the reason`"
            yield Finding("ignore", module.path, token.start[0], what)


def drafter_names(module: Module) -> Iterator[Finding]:
    """Ask what, not who: no drafter's name in an identifier or a comparison."""
    if is_under(module.path, DRAFTER_HOMES):
        return
    for node in module.nodes:
        for name in _identifiers(node):
            if DRAFTERS & set(name.lower().split("_")):
                what = f"'{name}' names a drafter: ask its capabilities"
                yield Finding("who", module.path, getattr(node, "lineno", 1), what)


def skips(module: Module) -> Iterator[Finding]:
    """For tests: nothing is skipped on the CPU; what needs CUDA is marked `gpu`."""
    if is_under(module.path, SKIP_HOMES):
        return
    attributes = (node for node in module.nodes if isinstance(node, ast.Attribute))
    uses = [(dotted(node), node.lineno) for node in attributes]
    uses += [(item.target, item.line) for item in imports(module)]
    for name, line in uses:
        if name.startswith("pytest.") and name.rpartition(".")[2] in SKIPS:
            yield Finding("skip", module.path, line, f"{name}: no test is skipped")


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None, int]]:
    """The names that a module's statements bind, also below `if` and `try`."""
    for node in body:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            yield name.id, value, node.lineno
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, value, node.lineno
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield from _bindings([*_blocks(node)])


def _blocks(node: ast.stmt) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler):
            yield from child.body


def _may_bind(name: str, value: ast.expr | None) -> bool:
    if CONSTANT.match(name):
        return True
    if value is not None and dotted(value).endswith("getLogger()"):
        return True
    return ALIAS.match(name) is not None and not _is_container(value)


def _is_container(value: ast.expr | None) -> bool:
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in CONTAINERS
    return isinstance(value, displays)


def _changes(function: ast.AST, module: Module, constants: set[str]) -> Iterator[Finding]:
    """Writes into a module's constant, by item or by method."""
    for node in ast.iter_child_nodes(function):
        changed = ""
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                changed = name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                changed = name if method in MUTATORS else ""
        if changed in constants:
            what = f"{changed} belongs to the module and is changed here"
            yield Finding("state", module.path, getattr(node, "lineno", 1), what)
        if not isinstance(node, FUNCTIONS):
            yield from _changes(node, module, constants)


def _is_broad(node: ast.expr) -> bool:
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(
        dotted(kind).removeprefix("builtins.") in ("Exception", "BaseException") for kind in kinds
    )


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _identifiers(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Compare(comparators=comparators):
            for item in (node.left, *comparators):
                yield from _strings(item)
        case ast.MatchValue(value=value):
            yield from _strings(value)


def _strings(node: ast.expr) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value
