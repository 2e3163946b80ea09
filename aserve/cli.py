"""The command line: parses the arguments, runs one command, and prints an error as one line.

Options are defined in config.py. torch and the engine are imported only by the commands that need
them, so that the others start quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from rich.console import Console

from aserve.bench.catalog import BENCHES, Bench, run_bench
from aserve.config import (
    DebugOptions,
    Facts,
    GrammarOptions,
    GraphOptions,
    KvOptions,
    LoraOptions,
    MachineOptions,
    ModelOptions,
    PromptOptions,
    Resolved,
    SchedulerOptions,
    SelftestOptions,
    ServerOptions,
    SpeculativeOptions,
    read_raw,
    resolve,
)
from aserve.errors import AserveError, ConfigError
from aserve.foreign_flags import add_foreign_flags
from aserve.health import ask_health
from aserve.host.environment import (
    collect_rarely,
    installed_version,
    prepare_process,
)
from aserve.host.logs import start_logging
from aserve.option import Option, build_options, grouped, options_of, unknown_option
from aserve.tiny import MODEL_DIR

if TYPE_CHECKING:
    from aserve.engine import Engine

Message: TypeAlias = dict[str, str]

ENGINE_RECORDS = (
    *(ModelOptions, KvOptions, SchedulerOptions, SpeculativeOptions),
    *(MachineOptions, GraphOptions, DebugOptions),
)
COMMAND_RECORDS: Mapping[str, tuple[type, ...]] = {
    "serve": (*ENGINE_RECORDS, GrammarOptions, LoraOptions, ServerOptions),
    "chat": (*ENGINE_RECORDS, PromptOptions),
    "generate": (*ENGINE_RECORDS, PromptOptions),
    "health": (ServerOptions,),
    "verify": ENGINE_RECORDS,
}
ARGUMENTS = frozenset(
    {"command", "text", "file", "bench", "task", "adapter"}
)  # positional, not options

EPILOG = (
    "Each option can be set as ASERVE_NAME in the environment and as `name = value` in the file of "
    "--config, too; the command line wins over the environment, and that over the file."
)


def main(arguments: Sequence[str] | None = None, *, benches: Mapping[str, Bench] = BENCHES) -> int:
    """Runs one command. Returns the exit code: 0; 1 when the engine failed; 2 for what the user
    can mend. `benches` are those of `aserve bench`; a tool may bring its own.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments), benches)
    except ConfigError as error:
        complain(error.message)
        return 2
    except AserveError as error:
        complain(error.message)
        return 2 if error.info().status < 500 else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone, and Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: list[str], benches: Mapping[str, Bench]) -> int:
    parser = make_parser(benches)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unexpected(unknown[0], arguments, benches)
    given = {name: value for name, value in vars(known).items() if name not in ARGUMENTS}
    match known.command:
        case "serve":
            return _serve(_resolved(given, log_level="info"))
        case "chat":
            return _chat(_resolved(given, log_level="warning"))
        case "generate":
            return _generate(_resolved(given, log_level="warning"), known.text)
        case "replay":
            return _replay(Path(known.file))
        case "verify":
            return _verify(known.file, known.adapter, given)
        case "selftest":
            return _selftest(given)
        case "bench":
            return _bench(known.bench, benches[known.bench], given)
        case "kernels":
            return _build_kernels()
        case "doctor":
            return _doctor()
        case "health":
            return _health(_resolved(given, log_level="warning"))
        case "version":
            return _version()
        case _:
            parser.print_help()
            return 0


def _resolved(given: dict[str, object], *, log_level: str) -> Resolved:
    facts = Facts(default_model=str(MODEL_DIR))
    resolved = resolve(read_raw(given), facts)
    start_logging(resolved.debug.log_level or log_level, resolved.debug.log_format)
    return resolved


def _serve(resolved: Resolved) -> int:
    collect_rarely()
    from aserve.server import serve

    return serve(resolved)


def _generate(resolved: Resolved, text: str) -> int:
    """Streams the answer to stdout, and nothing else."""
    from aserve.engine import Engine

    prompt = sys.stdin.read() if text == "-" else text
    with Engine(resolved) as engine:
        for chunk in engine.stream_sync(prompt, **_sampling(resolved)):
            _show(chunk.text)
    _show("\n")
    return 0


def _chat(resolved: Resolved) -> int:
    """Runs a chat, in which Ctrl-C ends an answer and Ctrl-D the chat."""
    from aserve.engine import Engine

    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() then has line editing and a history
    console = Console()
    system = resolved.prompt.system
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = opening
    with Engine(resolved) as engine:
        console.print(f"{resolved.model_name}: /clear begins anew, Ctrl-D ends.", style="dim")
        while (line := _ask(console)) is not None:
            if line == "/clear":
                messages = opening
            elif line:
                messages = _exchange(engine, messages, line=line, resolved=resolved)
    return 0


def _exchange(
    engine: Engine, messages: list[Message], *, line: str, resolved: Resolved
) -> list[Message]:
    """Returns the messages with the question and its answer, or unchanged if it was refused."""
    asked = [*messages, {"role": "user", "content": line}]
    answer = _answer(engine, asked, resolved)
    return messages if answer is None else [*asked, {"role": "assistant", "content": answer}]


def _answer(engine: Engine, messages: list[Message], resolved: Resolved) -> str | None:
    """Returns the answer, cut at Ctrl-C, or None for a refusal."""
    answer = ""
    try:
        for chunk in engine.stream_sync(messages, **_sampling(resolved)):
            answer += chunk.text
            _show(chunk.text)
    except KeyboardInterrupt:
        _show(" [stopped]")
    except AserveError as error:
        if error.info().status >= 500:
            raise
        complain(error.message)
        return None
    _show("\n")
    return answer


def _ask(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        console.print()
        return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _sampling(resolved: Resolved) -> dict[str, object]:
    prompt = resolved.prompt
    return {
        "max_tokens": prompt.max_tokens,
        "temperature": prompt.temperature,
        "top_p": prompt.top_p,
        "top_k": prompt.top_k,
    }


def _replay(path: Path) -> int:
    from aserve.actors.replay import replay

    console = Console(soft_wrap=True)
    for line in replay(path):
        console.print(line, markup=False, highlight=False)
    return 0


def _verify(file: str, adapter: str | None, given: dict[str, object]) -> int:
    from aserve.receipts.record import read_receipt
    from aserve.verify import options_of_receipt, verify

    receipt = read_receipt(Path(file).read_bytes())
    resolved = _resolved(options_of_receipt(receipt, given), log_level="warning")
    verdict = verify(resolved, receipt, adapter_dir=None if adapter is None else Path(adapter))
    console = Console(soft_wrap=True)
    for line in verdict.lines:
        console.print(line, markup=False, highlight=False)
    return verdict.code


def _selftest(given: Mapping[str, object]) -> int:
    from aserve.selftest.run import selftest

    return selftest(build_options(SelftestOptions, given), Console())


def _bench(name: str, bench: Bench, given: Mapping[str, object]) -> int:
    """Runs a bench. Its own options come from the command line alone, the engine's from all
    sources.
    """
    record = bench.options
    own = {option.name for option in options_of(record)} & given.keys()
    options: object = build_options(record, {name: given[name] for name in own})
    rest = {name: value for name, value in given.items() if name not in own}
    run_bench(name, bench, options, _resolved(rest, log_level="warning"))
    return 0


def _build_kernels() -> int:
    start_logging("info")
    prepare_process(None)
    from aserve.gpu.device.cpu.kernels import compile_all_kernels

    num_compiled, num_kernels = compile_all_kernels()
    num_before = num_kernels - num_compiled
    text = f"aserve: {num_compiled} kernels compiled, {num_before} were compiled before"
    if not num_kernels:
        text = "aserve: no kernels to compile, because numba is not installed"
    Console(soft_wrap=True).print(text, highlight=False)
    return 0


def _doctor() -> int:
    prepare_process(None)
    from aserve.gpu.doctor import examine, report

    console = Console(soft_wrap=True)
    for line in report(examine()):
        console.print(line, markup=False, highlight=False)
    return 0


def _health(resolved: Resolved) -> int:
    is_ready, status = ask_health(resolved.server)
    Console(soft_wrap=True).print(f"aserve: {status}", markup=False, highlight=False)
    return 0 if is_ready else 1


def _version() -> int:
    python, torch = platform.python_version(), installed_version("torch") or "not installed"
    line = (
        f"aserve {installed_version('aserve') or 'not installed'} (Python {python}, torch {torch})"
    )
    Console(soft_wrap=True).print(line, highlight=False)
    return 0


def _unexpected(word: str, arguments: Sequence[str], benches: Mapping[str, Bench]) -> ConfigError:
    if not word.startswith("-"):
        return ConfigError(f"unexpected argument {word!r}")
    records = COMMAND_RECORDS.get(arguments[0], ())
    if arguments[0] == "bench":
        records = _records_of_bench(benches[arguments[1]])
    known = [flag for item in options_of(*records) for flag in item.flags]
    return unknown_option(word.partition("=")[0], known)


def _records_of_bench(bench: Bench) -> tuple[type, ...]:
    return (bench.options, *ENGINE_RECORDS) if bench.takes_engine else (bench.options,)


def complain(message: str) -> None:
    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(
        f"aserve: error: {line}", markup=False, highlight=False
    )


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser(benches: Mapping[str, Bench] = BENCHES) -> Parser:
    parser = Parser(
        prog="aserve", description="An LLM inference server.", epilog=EPILOG, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, about: str) -> Parser:
        records = COMMAND_RECORDS.get(name, ())
        epilog = EPILOG if records else None
        added = commands.add_parser(
            name, help=about, description=about, epilog=epilog, allow_abbrev=False
        )
        for record in records:
            _add_groups(added, record)
        if records:
            add_foreign_flags(added, {flag for item in options_of(*records) for flag in item.flags})
        return added

    for added in (command("serve", "Start the HTTP server."), command("chat", "Chat here.")):
        added.add_argument(
            "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model"
        )
    generate = command("generate", "Continue a text.")
    generate.add_argument(
        "text", metavar="TEXT", help="the text to continue; - reads it from stdin"
    )
    replay = command("replay", "Replay what --record wrote.")
    replay.add_argument("file", metavar="FILE", help="a recording of the scheduler's events")
    check = command("verify", "Compute the tokens of a receipt again: 0 if they are the same.")
    check.add_argument("file", metavar="FILE", help="a receipt, or an answer that has one")
    check.add_argument(
        "--adapter", metavar="DIR", help="the LoRA adapter, where the receipt is of one"
    )
    ask = command("selftest", "Check the API of any server; the exit code is how many checks fail.")
    _add_groups(ask, SelftestOptions)
    measure = command("bench", "Measure; the last line of the output is one JSON object.")
    _add_benches(measure, benches)
    kernels = command("kernels", "Compile the CPU's kernels ahead of the first start.")
    kernels.add_argument(
        "task", choices=["build"], help="compile what is missing, on all cores; it takes a minute"
    )
    command("doctor", "Show what the machine has, and what would make aserve faster on it.")
    command("health", "Ask the server of this machine whether it is ready: 0 if it is, else 1.")
    command("version", "Show the versions of aserve, Python and torch.")
    return parser


def _add_benches(parser: Parser, benches: Mapping[str, Bench]) -> None:
    commands = parser.add_subparsers(
        dest="bench", metavar="BENCH", parser_class=Parser, required=True
    )
    for name, bench in benches.items():
        added = commands.add_parser(
            name, help=bench.about, description=bench.about, allow_abbrev=False
        )
        for record in _records_of_bench(bench):
            _add_groups(added, record)


def _add_groups(parser: Parser, record: type) -> None:
    for title, options in grouped(record).items():
        group = parser.add_argument_group(title)
        for option in options:
            _add_option(group, option)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.kind is bool:
        group.add_argument(
            *option.flags, dest=option.name, action="store_const", const="true",
            default=argparse.SUPPRESS, help=option.about,
        )  # fmt: skip
    else:
        group.add_argument(
            *option.flags, dest=option.name, metavar=_metavar(option),
            action=_Join if option.limits.is_list else "store",
            nargs="+" if option.limits.takes_many else None,
            default=argparse.SUPPRESS, help=_help(option),
        )  # fmt: skip
    if option.limits.former:
        flag = "--" + option.limits.former.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Join(argparse.Action):
    """Joins the values of an option with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        given = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, ",".join([*([before] if before else []), *map(str, given)]))


def _metavar(option: Option) -> str:
    limits = option.limits
    if limits.choices:
        return "{" + ",".join(limits.choices) + "}"
    return limits.metavar or {int: "N", float: "X"}.get(option.kind, "NAME")


def _help(option: Option) -> str:
    """Returns the help text. NOTE: argparse formats it with %, so a literal % is doubled."""
    default = "" if option.default is None else f" (default: {option.default})"
    return (option.about + default).replace("%", "%%")
