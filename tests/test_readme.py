"""What the README says that the bundled model says."""

import re

from aserve.engine import Engine
from tests.architecture.source import ROOT

ANSWERS = re.compile(r"```text\n(chat> .*?)```", re.DOTALL)
PROMPT = re.compile(r"^(chat|text)> (.*)$", re.MULTILINE)


def squeezed(text: str) -> str:
    """Without white space: the README breaks long lines."""
    return "".join(text.split())


def test_the_answers_in_the_readme_are_those_of_the_bundled_model() -> None:
    found = ANSWERS.search((ROOT / "README.md").read_text())
    assert found is not None
    parts = PROMPT.split(found.group(1))[1:]
    shown = list(zip(parts[0::3], parts[1::3], parts[2::3], strict=True))
    assert len(shown) == 8
    with Engine() as engine:
        for kind, escaped, answer in shown:
            prompt = escaped.replace("\\n", "\n")
            asked = [{"role": "user", "content": prompt}] if kind == "chat" else prompt
            stop = "\n" if "\n" in prompt else None
            (got,) = engine.generate_sync([asked], temperature=0, max_tokens=400, stop=stop)
            assert squeezed(got.text) == squeezed(answer), prompt
