"""A chat in the terminal, in which Ctrl-C ends an answer and Ctrl-D the chat.

The reasoning of a model is dimmed on a terminal, and stands between two lines of words. It is no
part of the answer that the model reads with the next question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.style import Style

from aserve.config import Resolved
from aserve.engine import Engine
from aserve.errors import AserveError
from aserve.parsers.events import Content, Malformed, ParsedEvent, Reasoning
from aserve.terminal import ask, complain, show

Message = Mapping[str, Any]

THINKING = "Thinking...\n"
THOUGHT = "\n...done thinking.\n\n"
DIM = Style(dim=True)


def run_chat(resolved: Resolved, console: Console, **sampling: object) -> None:
    system = resolved.prompt.system
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = opening
    with Engine(resolved) as engine:
        console.print(f"{resolved.model_name}: /clear begins anew, Ctrl-D ends.", style="dim")
        while (line := ask(console)) is not None:
            if line == "/clear":
                messages = opening
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                answer = _answer(engine.chat_sync(asked, **sampling), console)
                messages = messages if answer is None else [*asked, _said(answer)]


def _said(answer: str) -> Message:
    return {"role": "assistant", "content": answer}


def _answer(events: Iterator[ParsedEvent], console: Console) -> str | None:
    """Shows an answer and returns it, cut at Ctrl-C, or returns None for a refusal."""
    answer = ""
    thinks = False
    try:
        for event in events:
            if isinstance(event, Reasoning) != thinks:
                thinks = not thinks
                _show_dim(THINKING if thinks else THOUGHT, console)
            match event:
                case Reasoning():
                    _show_dim(event.text, console)
                case Content() | Malformed():
                    answer += event.text
                    show(event.text)
    except KeyboardInterrupt:
        show(" [stopped]")
    except AserveError as error:
        if error.info().status >= 500:
            raise
        complain(error.message)
        return None
    show("\n")
    return answer


def _show_dim(text: str, console: Console) -> None:
    is_styled = console.is_terminal and not console.is_dumb_terminal
    show(DIM.render(text) if is_styled else text)
