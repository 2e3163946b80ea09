"""An option as a field of a record, with help text and limits, and the parsing of its value."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

from aserve.errors import ConfigError

T = TypeVar("T")

ENV_PREFIX = "ASERVE_"
MAX_INT64 = (1 << 63) - 1  # what a message between processes can carry
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
TITLES = {"Kv": "KV cache", "Graph": "CUDA graphs", "Prompt": "Prompts"}
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a value; `metavar` stands for the value in --help."""

    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    metavar: str = ""
    is_secret: bool = False
    is_list: bool = False  # texts with commas between them; the command line may give it again
    aliases: tuple[str, ...] = ()  # on the command line: the spellings of vLLM and SGLang
    value_aliases: Mapping[str, str] = field(default_factory=dict)  # other words for its values
    group: str = ""  # the heading in --help, if it is not that of the record
    takes_many: bool = False  # a list of which the command line takes several items at once
    former: str = ""  # field name in the last release; still accepted, but shown nowhere


def option(default: T, about: str, limits: Limits | None = None) -> T:
    return field(default=default, metadata={"about": about, "limits": limits or Limits()})


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a record of options, with its names on the command line and elsewhere."""

    name: str
    kind: type
    default: object
    about: str
    limits: Limits

    @property
    def names(self) -> tuple[str, ...]:
        """The name, then the former one if there is one."""
        former = self.limits.former
        return (self.name, former) if former else (self.name,)

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, then its aliases; one of two letters, such as `tp`, has one dash or two."""
        aliases = self.limits.aliases
        short = [f"-{alias}" for alias in aliases if len(alias) == 2]
        return (self.flag, *[f"--{alias}" for alias in aliases], *short)

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def options_of(*records: type) -> Iterator[Option]:
    for record in records:
        hints = get_type_hints(record)
        for item in fields(record):
            yield Option(
                name=item.name,
                kind=_plain_type(hints[item.name]),
                default=item.default,
                about=item.metadata["about"],
                limits=item.metadata["limits"],
            )


def grouped(record: type) -> Mapping[str, list[Option]]:
    """Returns the options of a record under their headings, in order."""
    groups: dict[str, list[Option]] = {}
    for option in options_of(record):
        groups.setdefault(option.limits.group or title_of(record), []).append(option)
    return groups


def title_of(record: type) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", record.__name__.removesuffix("Options"))
    return TITLES.get(words, words)


def parse_value(option: Option, value: object, *, where: str) -> object:
    """Converts `value` (a text, or a value of TOML) to the option's type. Raises ConfigError."""
    shown = where if option.limits.is_secret else f"{where} {value}"
    if isinstance(value, str):
        value = option.limits.value_aliases.get(value, value)
    try:
        parsed = _converted(option.kind, value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{shown}: must be {_kind_words(option)}") from None
    limits = option.limits
    if limits.choices and parsed not in limits.choices:
        raise ConfigError(f"{shown}: must be one of {', '.join(limits.choices)}")
    if isinstance(parsed, int | float) and not limits.low <= parsed <= limits.high:
        raise ConfigError(f"{shown}: must be {_kind_words(option)}")
    if isinstance(parsed, int) and abs(parsed) > MAX_INT64:
        raise ConfigError(f"{shown}: must be an integer of at most {MAX_INT64}")
    return parsed


def parse_options(record: type[T], given: Mapping[str, object]) -> T:
    """Builds a record of options that only the command line sets."""
    options = (option for option in options_of(record) if option.name in given)
    return record(
        **{
            option.name: parse_value(option, given[option.name], where=option.flag)
            for option in options
        }
    )


def unknown_option(name: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name, with the nearest of the `known` ones."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"unknown option {name}{hint}")


def host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, with brackets around the colons of an IPv6 address. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def is_host(name: str) -> bool:
    """Returns whether sockets take it as a name or an address. They raise UnicodeError for others,
    such as names with an empty label.
    """
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _converted(kind: type, value: object) -> object:
    if value is None:
        raise TypeError
    if isinstance(value, str):
        return _from_text(kind, value)
    if isinstance(value, os.PathLike) and kind is str:
        return os.fspath(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _from_text(kind: type, text: str) -> object:
    if kind is str and not text:
        raise ValueError  # NOTE: an empty --api-key would otherwise look like a locked door
    if kind is not bool:
        return kind(text)
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def _kind_words(option: Option) -> str:
    if option.kind is bool:
        return "true or false"
    if option.kind is str:
        return "a text that is not empty"
    limits = option.limits
    words = "an integer" if option.kind is int else "a number"
    if math.isinf(limits.low):
        return words
    if math.isinf(limits.high):
        return f"{words}, {limits.low:.12g} or more"
    return f"{words} from {limits.low:.12g} to {limits.high:.12g}"


def _plain_type(hint: object) -> type:
    """Returns `int` for `int | None`."""
    if get_origin(hint) is UnionType:
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return cast(type, hint)
