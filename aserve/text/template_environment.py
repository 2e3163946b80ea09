"""The Jinja environment of chat templates: what a template may use, and for how long it may run.

Templates come with checkpoints and are written for transformers, so the environment has the
functions, filters and whitespace rules of transformers. They are untrusted, so it has nothing else.

A template that yields text is bounded by the reader of that text. One that only computes is bounded
here: each round of a loop and each call of a macro looks at the clock, and a multiplication or a
power is refused if its result would be too large.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 10.0
MAX_PRODUCT = 1 << 25  # items or characters of a repeated value
MAX_BITS = 1 << 16  # of an integer
DEADLINE = "render deadline"  # a variable that no template can name or set, because of the space


class GenerationBlock(Extension):
    """`{% generation %}` marks text for training. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        del self.globals["lipsum"]  # it makes as many words as it is asked for, without a clock
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @pass_context
    def check_deadline(self, context: Context) -> None:
        if time.monotonic() > context.parent[DEADLINE]:
            raise jinja2.TemplateRuntimeError(f"it runs for more than {MAX_RENDER_S:.0f} seconds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        loops: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For)]
        for node in [*loops, *template.find_all(nodes.Macro)]:
            check = nodes.Call(nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
            statement = nodes.ExprStmt(check, lineno=node.lineno)
            statement.set_environment(self)
            node.body.insert(0, statement)
        return template


def limited(variables: dict[str, Any]) -> dict[str, Any]:
    """Adds the deadline of a rendering that begins now to its variables."""
    return variables | {DEADLINE: time.monotonic() + MAX_RENDER_S}


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(count, int) and len(value) * count > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError(f"a value of more than {MAX_PRODUCT} items")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"a number of more than {MAX_BITS} bits")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers. Unlike Jinja's own it does not escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
