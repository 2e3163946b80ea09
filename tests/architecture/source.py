"""A source file as the ratchets see it, and what they say about it. Knows no rule."""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
FREE_TOKENS = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """`path` is relative to the repository's root, with forward slashes.

    `nodes` are all nodes of the tree, and `calls` have the dotted name that each call is made by:
    nearly every rule looks at them.
    """

    path: str
    source: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    calls: tuple[tuple[str, ast.Call], ...]

    @classmethod
    def parse(cls, path: str, source: str) -> "Module":
        tree = ast.parse(source, filename=path)
        nodes = tuple(ast.walk(tree))
        calls = tuple((dotted(node.func), node) for node in nodes if isinstance(node, ast.Call))
        return cls(path, source, tree, nodes, calls)

    @property
    def name(self) -> str:
        """The import name: `aserve.cache.pools`, `aserve_kernels.gather`."""
        parts = self.path.removeprefix("kernels/").removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def code_lines(self) -> int:
        """Lines that hold code: docstrings, comments and blank lines are free, as in every cap."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in FREE_TOKENS:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - self._docstring_lines())

    def _docstring_lines(self) -> set[int]:
        lines: set[int] = set()
        for node in self.nodes:
            first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return lines


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.what}"


Rule = Callable[[Module], Iterator[Finding]]


def modules(*folders: str) -> list[Module]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Module.parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def is_under(path: str, homes: tuple[str, ...]) -> bool:
    """`homes` are files, or folders that end in a slash."""
    return any(path == home or (home.endswith("/") and path.startswith(home)) for home in homes)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names, with `()` for a call in it, and "" for what has no name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
        case ast.Call(func=func):
            return f"{dotted(func)}()"
        case _:
            return ""


def named(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, Function | ast.ClassDef, ast.AST]]:
    """Every function and class below `node`, with its qualified name and what it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield prefix + child.name, child, node
            yield from named(child, f"{prefix}{child.name}.")
        else:
            yield from named(child, prefix)
