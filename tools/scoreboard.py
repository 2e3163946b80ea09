"""Prints the results of `aserve selftest --output FILE` of several servers as a table in Markdown:
`python -m tools.scoreboard NAME=FILE ...`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

SHOWN = {"pass": "yes", "off": "no", "fail": "**wrong**"}


class Result(TypedDict):
    feature: str
    check: str
    outcome: str
    seen: str


def main(arguments: Sequence[str]) -> None:
    named = dict(argument.split("=", 1) for argument in arguments)
    results: dict[str, list[Result]] = {
        name: json.loads(Path(file).read_text()) for name, file in named.items()
    }
    sys.stdout.write("\n".join(scoreboard(results)) + "\n")


def scoreboard(results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Yields the lines of a table with a row for each check, and of a list of what was wrong."""
    yield row("", "the server ...", *results)
    yield row(*["---"] * (2 + len(results)))
    for outcome in SHOWN:
        counts = (sum(each["outcome"] == outcome for each in found) for found in results.values())
        yield row("", f"checks: {SHOWN[outcome]}", *map(str, counts))
    by_check = [{each["check"]: each for each in found} for found in results.values()]
    for check, first in by_check[0].items():
        cells = [SHOWN[found[check]["outcome"]] for found in by_check]
        yield row(first["feature"], check.replace("_", " "), *cells)
    for name, found in results.items():
        wrong = [each for each in found if each["outcome"] == "fail"]
        if wrong:
            yield f"\nWhat was wrong with {name}:\n"
            yield from (f"- {each['check'].replace('_', ' ')}: `{_code(each)}`" for each in wrong)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(result: Result) -> str:
    return result["seen"].replace("`", "'")[:140]


if __name__ == "__main__":
    main(sys.argv[1:])
