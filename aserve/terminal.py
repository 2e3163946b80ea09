"""This module writes what the commands say to stdout and stderr, and reads stdin for them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console

from aserve.errors import ConfigError
from aserve.host.logs import discard_stdout


def show(text: str) -> None:
    """Writes to stdout, if it is open."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise ConfigError(f"the output cannot be written: {error.strerror}") from None


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        show(f"{line}\n")


def complain(message: str) -> None:
    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(
        f"aserve: error: {line}", markup=False, emoji=False, highlight=False
    )


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _undecodable(error) from None


def ask(console: Console) -> str | None:
    """Returns the next line, or None at the end. What cannot be decoded is an empty line on a
    terminal, and raises ConfigError elsewhere, where a later read may fail for the same bytes."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except UnicodeDecodeError as error:
        if not sys.stdin.isatty():
            raise _undecodable(error) from None
        complain(_undecodable(error).message)
        return ""
    except EOFError:
        console.print()
        return None


def _undecodable(error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"the input is no {error.encoding}: {error.reason} at its byte {error.start}; convert it, "
        "by iconv for example"
    )
