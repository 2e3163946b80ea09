"""Keywords that the compiler would pass over are found; names and data that look alike are not."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.grammar.schema import ignored_keyword, without_ignored


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "#/not"),
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems"),
        ({"items": {"multipleOf": 3}}, "#/items/multipleOf"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "#/anyOf/1/if"),
        ({"$defs": {"x": {"contains": {}}}}, "#/$defs/x/contains"),
        ({"additionalProperties": {"not": {}}}, "#/additionalProperties/not"),
    ],
)
def test_an_ignored_keyword_is_found_wherever_a_schema_may_stand(
    schema: dict[str, Any], place: str
) -> None:
    assert ignored_keyword(schema) == place
    assert ignored_keyword(without_ignored(schema)) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": {"type": "string"}, "if": {}}},
        {"enum": [{"not": 1}], "const": {"contains": 2}, "default": {"then": 3}},
        {"uniqueItems": False, "items": True, "additionalProperties": False},
    ],
)
def test_properties_and_data_of_that_name_are_no_keywords(schema: dict[str, Any]) -> None:
    assert ignored_keyword(schema) is None
    kept = {key: value for key, value in schema.items() if key != "uniqueItems"}
    assert without_ignored(schema) == kept
