"""Chat templates: transformers' conventions, and a sandbox with bounds."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.errors import ConfigError, InvalidRequest
from aserve.text import template_environment
from aserve.text.template import ChatTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "<a & b>"},
    {"role": "assistant", "content": "ü"},
]


WHITESPACE = """
{%- for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
<|{{ message.role }}|>{{ message['content'] }}
    {% if message.role == 'assistant' %}
    {% generation %}marked{% endgeneration %}
    {% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.slow
def test_a_template_renders_as_in_transformers() -> None:
    """Slow: it imports transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tools: list[Any] = [{"type": "function", "function": {"name": "<ü>", "b": 1, "a": None}}]
    rendered: Any = render_jinja_template(
        conversations=[MESSAGES], tools=tools, chat_template=WHITESPACE, add_generation_prompt=True
    )
    assert ChatTemplate(WHITESPACE).render(MESSAGES, tools=tools) == rendered[0][0]


def test_the_client_gets_the_error_that_a_template_raises() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert (caught.value.error_code, caught.value.param) == ("chat_template_error", "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_a_client_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(MESSAGES)


MANY = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
TWICE = "{% macro twice(n) %}{{ twice(n + 1) if n < 60 }}{{ twice(n + 1) if n < 60 }}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (MANY + "{% endfor %}" * 3, "more than 0 seconds"),
        (TWICE + "{{ twice(0) }}", "more than 0 seconds"),
        (MANY + "{% set DEADLINE = 9 %}" + "{% endfor %}" * 3, "more than 0 seconds"),
        ("{% set a = 'a' * 10 ** 9 %}", "items"),
        ("{% set a = 10 ** 9 * [1, 2] %}", "items"),
        ("{% set a = 10 ** (10 ** 9) %}", "bits"),
        ("{% set a = 'a' * 9 %}{{ a }}", ""),
    ],
)
def test_a_template_that_only_computes_ends(
    monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setattr(template_environment, "MAX_RENDER_S", 0.05)
    if not said:
        assert ChatTemplate(source).render([]) == "a" * 9
        return
    with pytest.raises(InvalidRequest, match=said):
        ChatTemplate(source).render([])


def test_a_template_makes_no_words_of_its_own() -> None:
    with pytest.raises(InvalidRequest, match="'lipsum' is undefined"):
        ChatTemplate("{{ lipsum(n=1) }}").render([])


def test_the_size_of_a_prompt_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(99999) %}0123456789{% endfor %}")
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render([], max_chars=1000)
    assert len(template.render([])) == 999_990


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in range(9) %}" * 25 + "{% endfor %}" * 25,
    ],
    ids=["syntax", "deep expression", "nested loops"],
)
def test_a_template_that_cannot_be_read_is_an_error_at_start(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source)


def test_variables_of_a_request_reach_the_template_and_replace_nothing_of_its_own() -> None:
    template = ChatTemplate(
        "{{ style }}{{ bos_token }}{{ messages | length }}", variables={"bos_token": "<s>"}
    )
    assert template.render(MESSAGES, variables={"style": "plain"}) == "plain<s>2"
    assert template.render(MESSAGES, variables={"self": 1, "bos_token": "<x>"}) == "<x>2"


def test_variables_are_as_confined_as_the_template() -> None:
    template = ChatTemplate("{{ style.append(1) }}{{ style }}")
    with pytest.raises(InvalidRequest, match="rejects these messages"):
        template.render([], variables={"style": []})
