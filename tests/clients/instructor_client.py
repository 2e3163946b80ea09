"""Instructor, which reads models of pydantic from forced tool calls and from JSON."""

from __future__ import annotations

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main(address: str, model: str) -> None:
    openai = OpenAI(base_url=f"{address}/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        person = instructor.from_openai(openai, mode=mode).chat.completions.create(
            model=model,
            temperature=0,
            response_model=Person,
            messages=[{"role": "user", "content": "Return JSON for Sam."}],
        )
        assert isinstance(person, Person), (mode, person)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
