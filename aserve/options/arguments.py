"""Adds the options of a record to a parser of arguments, with their headings and their help."""

from __future__ import annotations

import argparse
from collections.abc import Container

from aserve.options.option import Option, grouped


def add_groups(
    parser: argparse.ArgumentParser, record: type, names: Container[str] | None = None
) -> None:
    """`names` are the options that the command has of this record, if not all."""
    for title, options in grouped(record).items():
        group = parser.add_argument_group(title)
        for option in options:
            if names is None or option.name in names:
                _add_option(group, option)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.kind is bool:
        group.add_argument(
            *option.flags, dest=option.name, action="store_const", const="true",
            default=argparse.SUPPRESS, help=option.about,
        )  # fmt: skip
    else:
        group.add_argument(
            *option.flags, dest=option.name, metavar=_metavar(option),
            action=_Join if option.limits.is_list else "store",
            nargs="+" if option.limits.takes_many else None,
            default=argparse.SUPPRESS, help=_help(option),
        )  # fmt: skip
    if option.limits.former:
        flag = "--" + option.limits.former.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Join(argparse.Action):
    """Joins the values of an option with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        given = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, ",".join([*([before] if before else []), *map(str, given)]))


def _metavar(option: Option) -> str:
    limits = option.limits
    if limits.choices:
        return "{" + ",".join(limits.choices) + "}"
    return limits.metavar or {int: "N", float: "X"}.get(option.kind, "NAME")


def _help(option: Option) -> str:
    """Returns the help text. NOTE: argparse formats it with %, so a literal % is doubled."""
    default = "" if option.default is None else f" (default: {option.default})"
    return (option.about + default).replace("%", "%%")
