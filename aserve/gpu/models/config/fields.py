"""Typed access to the fields of one JSON object.

Every error names the field, its value and what was expected. A null field counts as absent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from aserve.errors import ConfigError
from aserve.messages.base import MAX_INT32

T = TypeVar("T")
INFINITE = {"__float__": "Infinity"}  # as transformers writes it


class Fields:
    __slots__ = ("_values", "source")

    def __init__(self, values: Mapping[str, object], *, source: str) -> None:
        self._values = values
        self.source = source  # for messages: "path/config.json" or "path/config.json: rope_scaling"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.refuse(name, expected=f"an integer of at least {minimum}")
        if value > MAX_INT32:
            self.refuse(name, expected=f"an integer of at most {MAX_INT32}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """A positive and finite number, as all real numbers of model configurations are."""
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(name, expected="a positive number")
        if not (0 < value <= sys.float_info.max):
            self.refuse(name, expected="a positive number")
        return float(value)

    def number_if_any(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, expected="true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, expected="a string")
        return value

    def numbers(self, name: str, *, length: int) -> tuple[float, ...]:
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != length:
            self.refuse(name, expected=f"a list of {length} positive numbers")
        return tuple(Fields({name: value}, source=self.source).number(name) for value in values)

    def integers(
        self, name: str, *, may_be_empty: bool = False, may_be_single: bool = False
    ) -> tuple[int, ...]:
        values = self._get(name, [] if may_be_empty else None)
        if may_be_single and not isinstance(values, list):
            values = [values]
        if not isinstance(values, list) or not (values or may_be_empty):
            self.refuse(name, expected="a list of integers")
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            self.refuse(name, expected="a list of integers")
        if any(abs(value) > MAX_INT32 for value in values):
            self.refuse(name, expected=f"integers of at most {MAX_INT32}")
        return tuple(values)

    def texts(self, name: str, *, length: int | None = None) -> tuple[str, ...]:
        values = self._get(name, None)
        size = "" if length is None else f"{length} "
        expected = f"a list of {size}strings"
        if not isinstance(values, list) or length not in (None, len(values)):
            self.refuse(name, expected=expected)
        if not all(isinstance(value, str) for value in values):
            self.refuse(name, expected=expected)
        return tuple(values)

    def section(self, name: str) -> Fields:
        """Returns the fields of a nested object, which is empty where it is absent."""
        return Fields(self._mapping(name), source=f"{self.source}: {name}")

    def merged_with(self, name: str) -> Fields:
        """These fields, overridden by those of the nested object `name`."""
        inner = {key: value for key, value in self._mapping(name).items() if value is not None}
        return Fields({**self._values, **inner}, source=self.source)

    def differing(self, other: Fields) -> set[str]:
        """The names whose values differ."""
        own, others = self._values, other._values
        return {name for name in own.keys() | others.keys() if own.get(name) != others.get(name)}

    def over(
        self, defaults: Mapping[str, object], *, other_names: Mapping[str, str] | None = None
    ) -> Fields:
        """These fields, with the value of the field `other_names[name]` where `name` is absent or
        null, and with `defaults` for names that are absent (null is not absent here)."""
        others = {
            name: self._values[other]
            for name, other in (other_names or {}).items()
            if self.has(other) and not self.has(name)
        }
        return Fields({**defaults, **self._values, **others}, source=self.source)

    def refuse(self, name: str, *, expected: str) -> NoReturn:
        value = self._values.get(name)
        found = "is missing" if value is None else f"is {_shortened(value)}"
        raise ConfigError(f"{self.source}: {name} {found}; expected {expected}")

    def _get(self, name: str, default: T) -> object | T:
        value = self._values.get(name)
        return default if value is None else value

    def _mapping(self, name: str) -> Mapping[str, object]:
        value = self._get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, expected="an object")
        return value


def replaced(fields: Fields, values: Mapping[str, object]) -> Fields:
    """Returns the fields with other values."""
    return Fields({**fields._values, **values}, source=fields.source)


def is_text(fields: Fields, name: str, text: str) -> bool:
    """Returns whether a field that may have a value of another kind has this text."""
    return fields._values.get(name) == text


def interval(fields: Fields, name: str) -> tuple[float, float]:
    """Returns two numbers of at least 0, of which the second may be infinite."""
    values = fields._values.get(name)
    if isinstance(values, list):
        values = [math.inf if value == INFINITE else value for value in values]
    match values:
        case [float() | int() as least, float() | int() as most] if 0 <= least <= most:
            return float(least), float(most)
        case _:
            fields.refuse(name, expected="two numbers of at least 0, in ascending order")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
