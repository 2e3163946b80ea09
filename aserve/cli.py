"""The command line: parses the arguments, runs one command, and prints an error as one line.

Options are defined in config.py. torch and the engine are imported only by the commands that need
them, so that the others start quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from aserve.bench.catalog import BENCHES, Bench, run_bench
from aserve.config import (
    DebugOptions,
    DiffusionOptions,
    DisaggregationOptions,
    ExpertOptions,
    Facts,
    GrammarOptions,
    GraphOptions,
    KvOptions,
    LoraOptions,
    MachineOptions,
    ModelOptions,
    PromptOptions,
    Resolved,
    RouterOptions,
    SchedulerOptions,
    SelftestOptions,
    ServerOptions,
    SpeculativeOptions,
    read_raw,
    resolve,
)
from aserve.errors import AserveError, ConfigError
from aserve.health import ask_health
from aserve.host.environment import installed_version, prepare_process
from aserve.host.logs import discard_stdout, start_logging
from aserve.host.memory import collect_rarely
from aserve.options.arguments import add_groups
from aserve.options.foreign_flags import add_foreign_flags
from aserve.options.node_options import NodeOptions
from aserve.options.option import Option, options_of, parse_options, unknown_option
from aserve.terminal import complain, print_lines, read_stdin, show
from aserve.tiny import MODEL_DIR

ENGINE_RECORDS = (
    *(ModelOptions, KvOptions, SchedulerOptions, SpeculativeOptions, DiffusionOptions),
    *(MachineOptions, ExpertOptions, GraphOptions, DebugOptions),
)
COMMAND_RECORDS: Mapping[str, tuple[type, ...]] = {
    "serve": (
        *ENGINE_RECORDS,
        GrammarOptions,
        LoraOptions,
        DisaggregationOptions,
        NodeOptions,
        ServerOptions,
        RouterOptions,
    ),
    "route": (RouterOptions, ServerOptions, DebugOptions),
    "chat": (*ENGINE_RECORDS, PromptOptions),
    "generate": (*ENGINE_RECORDS, PromptOptions),
    "health": (ServerOptions,),
    "verify": ENGINE_RECORDS,
}
# A router has these options of a server.
ROUTE_OPTIONS = frozenset(
    {
        *("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
        *("api_key", "api_key_file", "admin_api_key", "public_metrics", "allowed_hosts"),
        *("max_body_size", "max_connections", "header_timeout", "body_timeout"),
        *("write_timeout", "keep_alive_timeout", "drain_timeout"),
        *("log_level", "log_format", "config"),
        *(item.name for item in options_of(RouterOptions)),
    }
)
# Arguments of single commands, which are no options of config.py.
ARGUMENTS = frozenset({"command", "text", "file", "bench", "action", "adapter", "replica"})

EPILOG = (
    "Each option can be set as ASERVE_NAME in the environment and as `name = value` in the file of "
    "--config, too; the command line wins over the environment, and that over the file."
)


def main(arguments: Sequence[str] | None = None, *, benches: Mapping[str, Bench] = BENCHES) -> int:
    """Runs one command. Returns the exit code: 0; 1 when the engine failed; 2 for what the user
    can mend. `benches` are those of `aserve bench`; a tool may bring its own.
    """
    return guarded(lambda: _run(list(sys.argv[1:] if arguments is None else arguments), benches))


def guarded(run: Callable[[], int]) -> int:
    """Prints an error as one line, and returns the exit code that stands for it."""
    try:
        return run()
    except ConfigError as error:
        complain(error.message)
        return 2
    except AserveError as error:
        complain(error.message)
        return 2 if error.info().status < 500 else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard_stdout()  # the reader of the output has gone
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
        case "route":
            return _route(_resolved(given, log_level="info"), known.replica)
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
        case "health":
            return _health(_resolved(given, log_level="warning"))
        case name if name in WITHOUT_OPTIONS:
            return WITHOUT_OPTIONS[name]()
        case _:
            parser.print_help()
            return 0


def _resolved(given: dict[str, object], *, log_level: str) -> Resolved:
    facts = Facts(default_model=str(MODEL_DIR))
    resolved = resolve(read_raw(given), facts)
    start_logging(resolved.debug.log_level or log_level, resolved.debug.log_format)
    return resolved


def _serve(resolved: Resolved) -> int:
    if resolved.server.replicas > 1:
        from aserve.router.run import serve_replicas

        return serve_replicas(resolved)
    if resolved.nodes.node_rank > 0:
        from aserve.parallel.rank_host import serve_node

        return serve_node(resolved)
    collect_rarely()
    from aserve.server import serve

    return serve(resolved)


def _route(resolved: Resolved, replicas: Sequence[str]) -> int:
    from aserve.router.run import route

    return route(resolved, replicas)


def _generate(resolved: Resolved, text: str) -> int:
    """Streams the answer to stdout, and nothing else."""
    from aserve.engine import Engine

    prompt = read_stdin() if text == "-" else text
    with Engine(resolved) as engine:
        for chunk in engine.stream_sync(prompt, **_sampling(resolved)):
            show(chunk.text)
    show("\n")
    return 0


def _chat(resolved: Resolved) -> int:
    from aserve.chat import run_chat

    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() then has line editing and a history
    run_chat(resolved, Console(), **_sampling(resolved))
    return 0


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

    print_lines(replay(path))
    return 0


def _verify(file: str, adapter: str | None, given: dict[str, object]) -> int:
    from aserve.receipts.record import receipt_in
    from aserve.receipts.verify import options_of_receipt, verify

    receipt = receipt_in(Path(file))
    resolved = _resolved(options_of_receipt(receipt, given), log_level="warning")
    verdict = verify(resolved, receipt, adapter_dir=None if adapter is None else Path(adapter))
    print_lines(verdict.lines)
    return verdict.code


def _selftest(given: Mapping[str, object]) -> int:
    from aserve.selftest.run import selftest

    return selftest(parse_options(SelftestOptions, given), Console())


def _bench(name: str, bench: Bench, given: Mapping[str, object]) -> int:
    """Runs a bench. Its own options come from the command line alone, the engine's from all
    sources.
    """
    record = bench.options
    own = {option.name for option in options_of(record)} & given.keys()
    options: object = parse_options(record, {name: given[name] for name in own})
    rest = {name: value for name, value in given.items() if name not in own}
    run_bench(name, bench, options, _resolved(rest, log_level="warning"))
    return 0


def _build_kernels() -> int:
    start_logging("info")
    prepare_process(None)
    from aserve.gpu.device.cpu.kernels import compile_all_kernels

    num_compiled, num_kernels = compile_all_kernels()
    num_before = num_kernels - num_compiled
    text = f"{num_compiled} kernels compiled, {num_before} were compiled before"
    nothing = "no kernels to compile, because numba is not installed"
    print_lines([f"aserve: {text if num_kernels else nothing}"])
    return 0


def _doctor() -> int:
    prepare_process(None)
    from aserve.gpu.doctor import examine, report

    print_lines(report(examine()))
    return 0


def _models() -> int:
    prepare_process(None)
    from aserve.gpu.supported import supported

    print_lines(supported())
    return 0


def _health(resolved: Resolved) -> int:
    is_ready, status = ask_health(resolved.server)
    print_lines([f"aserve: {status}"])
    return 0 if is_ready else 1


def _version() -> int:
    version, torch = (installed_version(name) or "not installed" for name in ("aserve", "torch"))
    print_lines([f"aserve {version} (Python {platform.python_version()}, torch {torch})"])
    return 0


WITHOUT_OPTIONS: Mapping[str, Callable[[], int]] = {
    "doctor": _doctor,
    "kernels": _build_kernels,
    "models": _models,
    "version": _version,
}


def _unexpected(word: str, arguments: Sequence[str], benches: Mapping[str, Bench]) -> ConfigError:
    if not word.startswith("-"):
        return ConfigError(f"unexpected argument {word!r}")
    options = command_options(arguments[0])
    if arguments[0] == "bench":
        options = list(options_of(*_records_of_bench(benches[arguments[1]])))
    known = [flag for item in options for flag in item.flags]
    return unknown_option(word.partition("=")[0], known)


def command_options(command: str) -> list[Option]:
    """Returns the options of a command, in the order of its records."""
    options = options_of(*COMMAND_RECORDS.get(command, ()))
    return [each for each in options if command != "route" or each.name in ROUTE_OPTIONS]


def _records_of_bench(bench: Bench) -> tuple[type, ...]:
    return (bench.options, *ENGINE_RECORDS) if bench.takes_engine else (bench.options,)


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
            add_groups(added, record, ROUTE_OPTIONS if name == "route" else None)
        if records and name != "route":
            add_foreign_flags(added, {flag for item in options_of(*records) for flag in item.flags})
        return added

    for added in (command("serve", "Start the HTTP server."), command("chat", "Chat here.")):
        added.add_argument(
            "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model"
        )
    route = command("route", "Balance requests over the servers of these addresses.")
    route.add_argument(
        "replica", nargs="*", metavar="URL",
        help="a server with OpenAI's API, as http://HOST:PORT or unix:PATH; POST /admin/replicas "
        "adds others while the router runs",
    )  # fmt: skip
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
    add_groups(ask, SelftestOptions)
    measure = command("bench", "Measure; the last line of the output is one JSON object.")
    _add_benches(measure, benches)
    kernels = command("kernels", "Compile the CPU's kernels ahead of the first start.")
    kernels.add_argument(
        "action",
        choices=["build"],
        metavar="build",
        help="compile what is missing, on all cores; it takes a minute",
    )
    command("doctor", "Show what the machine has, and what would make aserve faster on it.")
    command("models", "List the models, attention backends and number formats that are supported.")
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
            add_groups(added, record)
