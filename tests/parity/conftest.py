"""The references of tests/parity/references.py, each made once in a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.references import Reference, make_reference

ReferenceOf = Callable[[str], Reference]


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    made: dict[str, Reference] = {}

    def reference_of(kind: str) -> Reference:
        if kind not in made:
            made[kind] = make_reference(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return reference_of
