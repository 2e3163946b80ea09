"""The command line: every option is there, and what a user can mend is one line and exit code 2."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aserve.bench.catalog import BENCHES
from aserve.cli import ARGUMENTS, COMMAND_RECORDS, command_options, main, make_parser
from aserve.config import ALL_RECORDS, Facts, Raw, Resolved, resolve, shown_settings
from aserve.errors import InvalidRequest
from aserve.gpu.spec.registry import ALGORITHMS, METHODS
from aserve.host.memory import STARTUP_THRESHOLD
from aserve.messages.output import OutputChunk, Usage
from aserve.options.foreign_flags import FOREIGN_FLAGS, ForeignFlag
from aserve.options.option import options_of
from aserve.parsers.events import Content, ParsedEvent, Reasoning

FACTS = Facts(default_model="none")
REPOSITORY = Path(__file__).parents[1]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command writes."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("aserve: error: ")
    return line


@pytest.mark.parametrize("command", sorted(COMMAND_RECORDS))
def test_help_shows_every_option_of_the_command_with_its_text(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for option in command_options(command):
        assert option.flag in shown
        assert option.about in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["serve", "--max-runing-requests", "1"], "did you mean --max-running-requests?"),
        (["serve", "--page-size", "99"], "--page-size 99: must be an integer from 1 to 64"),
        (["serve", "--max-queue", str(1 << 63)], f"an integer of at most {(1 << 63) - 1}"),
        (["serve", "--page-size"], "--page-size"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["generate", "x", "--port", "1"], "unknown option --port"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--port", "0", "--model", "missing/model/dir"], "missing/model/dir"),
        (["serve", "--port", "0", "/nonexistent"], "directory '/nonexistent' does not exist"),
        (["generate"], "TEXT"),
        (["kernels"], "required: build"),
        (["generate", "text", "--model", "missing/model/dir"], "missing/model/dir"),
        (["replay", "missing.rec"], "missing.rec"),
        (["srve"], "srve"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, *arguments)


def test_imports_of_a_server_are_not_slowed_down_by_collections_of_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds: list[int] = []
    monkeypatch.setattr("aserve.server.serve", lambda _: thresholds.append(gc.get_threshold()[0]))
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        main(["serve"])
    finally:
        gc.set_threshold(*before)
    assert thresholds == [STARTUP_THRESHOLD]


def settings(*words: str) -> dict[str, Any]:
    """What `aserve serve` makes of these words."""
    given = vars(make_parser().parse_args(["serve", *words]))
    return shown_settings(
        resolve(Raw(command_line={k: v for k, v in given.items() if k != "command"}), FACTS)
    )


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        # vLLM's spelling
        (
            (
                "org/m --dtype half --max-model-len 99 --gpu-memory-utilization 0.5 "
                "--enforce-eager --max-num-seqs 7 "
                "--max-num-batched-tokens 512 --no-enable-prefix-caching --seed 3 "
                "--block-size 32 --generation-config vllm --scheduling-policy priority -tp 1 "
                "--tensor-parallel-size=1 --enable-chunked-prefill --trust-remote-code "
                "--disable-log-requests --shutdown-timeout 9 --kv-cache-dtype fp8_e4m3"
            ),
            (
                "--model org/m --dtype float16 --max-model-len 99 --gpu-memory-utilization 0.5 "
                "--eager --max-num-seqs 7 --max-num-batched-tokens 512 --no-prefix-cache --seed 3 "
                "--page-size 32 --generation-config none --enable-priority-scheduling "
                "--drain-timeout 9 --kv-cache-dtype fp8"
            ),
        ),
        # SGLang's
        (
            (
                "--model-path org/m --context-length 99 --mem-fraction-static 0.5 "
                "--disable-cuda-graph --max-running-requests 7 "
                "--chunked-prefill-size 512 --disable-radix-cache "
                "--random-seed 3 --sampling-defaults openai --schedule-policy fcfs --tp-size 1 "
                "--tp 1 --max-queued-requests 5 --enable-metrics --enable-deterministic-inference "
                "--tokenizer-path t --cuda-graph-bs 1 8 4 --root-path /x"
            ),
            (
                "--model org/m --max-model-len 99 --gpu-memory-utilization 0.5 --eager "
                "--max-num-seqs 7 --max-num-batched-tokens 512 --no-prefix-cache --seed 3 "
                "--generation-config none --max-queue 5 --deterministic --tokenizer t "
                "--cuda-graph-max-bs 8 --root-path /x"
            ),
        ),
        (
            (
                "serve --enable-log-requests --log-requests-format json --log-requests-level=3 "
                "--stream-response-default-include-usage --structured-outputs-config.backend auto "
                "--api-server-count 3 --disable-overlap-schedule --schedule-policy lpm "
                "--max-prefill-tokens 512 --cudagraph-capture-sizes [1,8,4]"
            ),
            (
                "serve --frontends 3 --log-requests --log-format json --log-requests-level 3 "
                "--enable-force-include-usage --overlap-depth 1 --max-num-batched-tokens 512 "
                "--cuda-graph-max-bs 8"
            ),
        ),
    ],
)
def test_a_command_line_of_vllm_or_sglang_means_the_same_here(typed: str, ours: str) -> None:
    assert settings(*typed.split()) == settings(*ours.split())


@pytest.mark.parametrize("foreign", FOREIGN_FLAGS, ids=lambda foreign: foreign.names[0])
def test_a_flag_for_what_aserve_cannot_do_says_what_is_possible(
    foreign: ForeignFlag, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every accepted value is, in every spelling, and no other; and none is known as an option."""
    names = {option.name for option in options_of(*ALL_RECORDS)}
    for flag in foreign.flags:
        if foreign.is_refused:
            line = complaint(capsys, "serve", flag)
            assert line == f"aserve: error: {flag}: not supported: {foreign.about}"
            continue
        if not foreign.takes_value:
            shown = settings(flag)
            assert {name: str(shown[name]) for name in foreign.sets} == {
                name: str(value) for name, value in foreign.sets.items()
            }
            assert bool(foreign.sets) == (shown != settings())
            continue
        for value, sets in foreign.values.items():
            shown = settings(flag, value)
            assert {name: str(shown[name]).lower() for name in sets} == sets
        wrong = "few" if foreign.takes_many else "17"
        line = complaint(capsys, "serve", flag, wrong)
        assert line.startswith(f"aserve: error: {flag} {wrong}: ")
        assert foreign.about in line
    assert not {name.replace("-", "_") for name in foreign.names} & names


@pytest.mark.parametrize(
    ("method", "algorithm"), [*METHODS.items(), ("deepseek_mtp", "NEXTN"), ("mimo_mtp", "NEXTN")]
)
def test_each_method_of_vllms_speculative_config_is_an_algorithm(
    method: str, algorithm: str
) -> None:
    given = {"method": method, "num_speculative_tokens": 3, "model": "some/dir"}
    ours = ["--speculative-algorithm", algorithm, "--speculative-num-steps", "3"]
    ours += ["--speculative-draft-model-path", "some/dir"]
    assert settings("--speculative-config", json.dumps(given)) == settings(*ours)
    assert {*METHODS.values()} == {*ALGORITHMS} - {"FROZEN_KV_MTP"}  # which NEXTN finds by itself


def test_vllms_speculative_config_sets_the_options_that_it_stands_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
    ours += ["--speculative-draft-model-path", "some/dir"]
    given = {"method": "eagle3", "model": "some/dir", "num_speculative_tokens": 3}
    given["draft_tensor_parallel_size"] = 1
    assert settings("--speculative-config", json.dumps(given)) == settings(*ours)
    for name, method in (("standard", "rejection"), ("block", "block"), (None, "coupled")):
        shown = settings(
            "--speculative-config", json.dumps({**given, "rejection_sample_method": name})
        )
        assert shown == settings(*ours, "--speculative-verification", method)
    ngram = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    shown = settings("--speculative-config", json.dumps(ngram))
    names: tuple[str, ...] = ("speculative_min_match_len", "speculative_max_match_len")
    assert [shown[name] for name in names] == [2, 5]
    tree = {"method": "eagle", "speculative_token_tree": "[(0,), (0, 0)]"}
    shown = settings("--speculative-config", json.dumps({**tree, "num_speculative_tokens": 2}))
    names = ("speculative_token_tree", "speculative_num_draft_tokens", "speculative_num_steps")
    assert [shown[name] for name in names] == ["[(0,), (0, 0)]", 3, None]
    for wrong, word in (
        ({"method": "x"}, "'x'"),
        ({"method": ["eagle"]}, "['eagle']"),
        ({**given, "disable_by_batch_size": 4}, "size"),
        ({**given, "rejection_sample_method": "synthetic"}, "'synthetic'"),
    ):
        line = complaint(capsys, "serve", "--speculative-config", json.dumps(wrong))
        assert word in line
        assert "is not known" in line


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"backend": "xgrammar", "disable_fallback": True, "enable_in_reasoning": False}, {}),
        ({"reasoning_parser": "qwen3"}, {"reasoning_parser": "qwen3"}),
        ({"backend": "outlines"}, 'only "auto" or "xgrammar" is possible as backend'),
        ({"disable_any_whitespace": True}, "only false is possible as disable_any_whitespace"),
        ({"any": 1}, "the field 'any' is not known (known: reasoning_parser, backend, "),
        (["backend"], "it is not a JSON object"),
    ],
)
def test_vllms_structured_outputs_config_sets_the_parser_or_says_what_is_possible(
    given: object, outcome: dict[str, str] | str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ("--structured-outputs-config", json.dumps(given))
    if isinstance(outcome, str):
        assert outcome in complaint(capsys, "serve", *typed)
    else:
        assert settings(*typed) == settings() | outcome


def test_no_spelling_stands_for_two_options() -> None:
    flags = [flag for option in options_of(*ALL_RECORDS) for flag in option.flags]
    flags += [flag for foreign in FOREIGN_FLAGS for flag in foreign.flags]
    assert len(flags) == len(set(flags))


def test_no_option_has_the_name_of_a_positional_argument() -> None:
    records = {*ALL_RECORDS, *(bench.options for bench in BENCHES.values())}
    names = {each.name for record in records for each in options_of(record)}
    assert not names & ARGUMENTS


def test_former_names_are_taken_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    former = ("depth", "lead", "mixed-prompt-tokens")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for option in former:
        known, unknown = make_parser().parse_known_args(["serve", f"--{option}", "1"])
        assert not unknown
        assert vars(known)[option.replace("-", "_")] == "1"
        assert f"--{option} " not in shown


def test_no_option_is_shortened_silently() -> None:
    _, unknown = make_parser().parse_known_args(["serve", "--max-model", "16"])
    assert "--max-model" in unknown


class EchoEngine:
    """Answers with what was asked in capitals, a chat with all that was said in it. To "think" it
    answers with reasoning before that.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.asked: list[tuple[object, dict[str, object]]] = []

    def __enter__(self) -> EchoEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def chat_sync(self, messages: Any, **fields: object) -> Iterator[ParsedEvent]:
        said = "+".join(message["content"] for message in messages)
        if said.endswith("interrupt"):
            raise KeyboardInterrupt
        if said.endswith("too long"):
            raise InvalidRequest("the prompt is too long")
        if said.endswith("think"):
            yield Reasoning("it is")
            yield Reasoning(" A")
        yield Content(f"{said} {fields['temperature']}".upper())

    def stream_sync(self, prompt: str, **fields: object) -> Iterator[OutputChunk]:
        text = f"{prompt} {fields['temperature']}".upper()
        yield OutputChunk("a", 0, text[:3], b"", Usage())
        yield OutputChunk("a", 0, text[3:], b"", Usage(), finish_reason="stop", is_last=True)


def chatted(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> int:
    """What the chat returns when these lines are typed, then Ctrl-D."""
    typed = iter(lines)

    def read(*_: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("aserve.chat.Engine", EchoEngine)
    return main(["chat", *(["--system", system] if system else [])])


def test_generate_writes_the_answer_as_it_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.engine.Engine", EchoEngine)
    assert main(["generate", "once upon", "--temperature", "0.5"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "ONCE UPON 0.5\nFROM A PIPE 0.0\n"


@pytest.mark.parametrize(
    ("command", "is_terminal", "expected"),
    [(["generate", "-"], False, 2), (["chat"], False, 2), (["chat"], True, 0)],
)
def test_input_that_is_no_text_is_an_error_in_words_and_ends_no_chat_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    is_terminal: bool,
    expected: int,
) -> None:
    """A text in Latin-1 that was piped in ended with a traceback."""
    monkeypatch.setattr("aserve.engine.Engine", EchoEngine)
    monkeypatch.setattr("aserve.chat.Engine", EchoEngine)
    lines = io.TextIOWrapper(io.BytesIO("né\n".encode("latin-1")), encoding="utf-8")
    monkeypatch.setattr(lines, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdin", lines)
    words = "the input is no utf-8: invalid continuation byte at its byte 1; convert it"
    assert main(command) == expected
    assert words in capsys.readouterr().err


def test_a_chat_whose_input_ends_within_a_character_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's decoder keeps such bytes, so each later read fails, and the chat went on."""
    monkeypatch.setattr("aserve.chat.Engine", EchoEngine)
    lines = io.TextIOWrapper(io.BytesIO(b"n\n\xc3"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.count("unexpected end of data") == 1


def test_a_chat_remembers_what_was_said_until_it_is_cleared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chatted(monkeypatch, "a", "b", "/clear", "c", system="s") == 0
    prompts = capsys.readouterr().out.replace("> ", "").splitlines()[1:]
    assert prompts == ["S+A 0.0", "S+A+S+A 0.0+B 0.0", "S+C 0.0", ""]


def test_ctrl_c_ends_an_answer_and_an_error_is_a_line_but_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chatted(monkeypatch, "interrupt", "too long", "/clear", "c") == 0
    captured = capsys.readouterr()
    assert "[stopped]" in captured.out
    assert "> C 0.0" in captured.out
    assert captured.err == "aserve: error: the prompt is too long\n"


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [
        (None, "Thinking...\nit is A\n...done thinking.\n\nTHINK 0.0"),
        ("dumb", "Thinking...\nit is A\n...done thinking.\n\nTHINK 0.0"),
        (
            "xterm",
            (
                "\x1b[2mThinking...\n\x1b[0m\x1b[2mit is\x1b[0m\x1b[2m A\x1b[0m"
                "\x1b[2m\n...done thinking.\n\n\x1b[0mTHINK 0.0\n"
            ),
        ),
    ],
)
def test_reasoning_is_dimmed_on_a_terminal_and_is_no_part_of_the_next_prompt(
    terminal: str | None,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if terminal is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", terminal)
    assert chatted(monkeypatch, "think", "b") == 0
    out = capsys.readouterr().out
    assert expected in out
    assert "THINK+THINK 0.0+B 0.0" in out


def test_help_and_version_are_quick_because_they_import_no_engine() -> None:
    check = (
        "import sys\nfrom aserve.cli import main\nmain(['version'])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'aiohttp', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("aserve ")
    assert "torch 2." in result.stdout


def test_output_that_cannot_be_written_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["version"]) == 2
    assert "the output cannot be written: No space left on device" in capsys.readouterr().err


def test_output_without_a_reader_ends_as_sigpipe_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["version"]) == 141
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["version"]) == 0


def test_a_receipt_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read the receipt /nope: No such file" in complaint(capsys, "verify", "/nope")
