"""`aserve selftest`: asks a server what its API promises, and prints a table of what was seen.

Every check is one function, whose name says what a right server does. It works with any server that
has OpenAI's API, and with any model: no check depends on what the model says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import aiohttp
from rich.console import Console
from rich.table import Table

from aserve.config import SelftestOptions
from aserve.errors import ConfigError
from aserve.selftest import border_checks as border
from aserve.selftest import chat_checks as chat
from aserve.selftest import structure_checks as structure
from aserve.selftest.target import Missing, Target, Wrong

Check: TypeAlias = Callable[[Target], Awaitable[str]]

STYLES = {"pass": "green", "off": "yellow", "fail": "red"}
MAX_EXIT_CODE = 99
CHECK_S = 180.0  # a check that takes longer has failed

CHECKS: Mapping[str, Sequence[Check]] = {
    "models": (border.lists_models, border.shows_one_model),
    "chat": (
        *(chat.answers_a_chat, chat.counts_tokens, chat.stops_at_max_tokens),
        *(chat.knows_max_completion_tokens, chat.reads_content_parts, chat.reads_a_conversation),
        *(chat.gives_several_choices, chat.stops_before_a_stop_string),
    ),
    "stream": (
        *(chat.streams_the_same_text, chat.ends_a_stream_once, chat.streams_usage),
        *(chat.never_streams_a_stop_string, structure.streams_characters_whole),
    ),
    "sampling": (
        *(chat.is_greedy_at_temperature_0, chat.repeats_a_seed, chat.samples_with_other_seeds),
        *(chat.takes_a_tiny_top_p_for_greedy, chat.takes_top_k_1_for_greedy),
        *(chat.applies_a_logit_bias, chat.applies_penalties),
    ),
    "logprobs": (
        *(chat.gives_logprobs, chat.spells_the_text_in_logprobs),
        chat.gives_logprobs_of_a_completion,
    ),
    "completions": (
        *(chat.completes_a_text, chat.completes_a_list_of_texts, chat.completes_token_ids),
        *(chat.echoes_a_prompt, chat.streams_a_completion),
    ),
    "tools": (
        *(structure.calls_a_required_tool, structure.calls_a_named_tool),
        *(structure.calls_no_tool_if_told_so, structure.may_call_a_tool),
        *(structure.streams_a_tool_call, structure.reads_the_result_of_a_tool),
    ),
    "structure": (
        *(structure.writes_json, structure.follows_a_schema, structure.streams_by_a_schema),
        *(structure.follows_a_regex, structure.takes_one_of_the_choices),
        structure.follows_a_grammar,
    ),
    "errors": (
        *(border.refuses_broken_json, border.refuses_a_chat_without_messages),
        *(border.refuses_messages_of_a_wrong_type, border.refuses_a_temperature_of_99),
        *(border.refuses_negative_max_tokens, border.refuses_n_of_0, border.refuses_a_top_p_of_2),
        *(border.refuses_a_broken_schema, border.refuses_a_stream_with_a_status),
        *(border.refuses_an_unknown_model, border.answers_unknown_paths_with_404),
    ),
    "load": (
        *(border.answers_many_at_once, border.frees_what_clients_leave),
        *(border.answers_a_long_prompt, border.finds_a_prompt_in_its_cache),
    ),
    "responses": (
        *(border.creates_a_response, border.streams_a_response, border.goes_on_from_a_response),
        border.answers_over_a_websocket,
    ),
    "messages": (border.answers_messages, border.streams_messages),
    "embeddings": (border.embeds_texts, border.embeds_in_base64),
    "operation": (
        *(border.tells_its_health, border.has_metrics, border.describes_its_api),
        *(border.tokenizes_and_back, border.keeps_files),
    ),
    # The last ones, because some servers compute for minutes on what they should refuse.
    "limits": (border.refuses_deep_json, border.refuses_a_prompt_beyond_the_context),
}


@dataclass(frozen=True, slots=True)
class Result:
    """`outcome` is pass, fail, or off if the server says that it does not have the feature."""

    feature: str
    check: str
    outcome: str
    seen: str


def selftest(options: SelftestOptions, console: Console) -> int:
    """Returns the exit code: the number of checks that failed."""
    results = asyncio.run(run_checks(options, starting=console.print))
    table = Table("feature", "check", "result", "seen", title=f"{options.against}")
    for result in results:
        shown = f"[{STYLES[result.outcome]}]{result.outcome}[/]"
        table.add_row(result.feature, result.check.replace("_", " "), shown, _escaped(result.seen))
    console.print(table)
    counts = {name: sum(each.outcome == name for each in results) for name in STYLES}
    console.print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if options.output is not None:
        Path(options.output).write_text(json.dumps([asdict(each) for each in results], indent=1))
    return min(counts["fail"], MAX_EXIT_CODE)


async def run_checks(
    options: SelftestOptions, *, starting: Callable[[str], None] = lambda _: None
) -> list[Result]:
    chosen = [*_chosen(options.only)]
    if not chosen:
        raise ConfigError(f"--only {options.only}: there is no such feature and no such check")
    target = Target(
        options.against,
        model=options.model or "",
        api_key=options.api_key or "",
        wait_s=options.wait,
        starting=starting,
    )
    try:
        async with target as server:
            return [await _result(server, feature, check) for feature, check in chosen]
    except (aiohttp.ClientError, TimeoutError, Wrong, LookupError) as error:
        raise ConfigError(
            f"--against {options.against}: no answer that lists models: {error}"
        ) from None


def _chosen(only: str | None) -> Iterable[tuple[str, Check]]:
    for feature, checks in CHECKS.items():
        for check in checks:
            if only in (None, feature, check.__name__):
                yield feature, check


async def _result(server: Target, feature: str, check: Check) -> Result:
    outcome = "fail"
    try:
        async with asyncio.timeout(CHECK_S):
            outcome, seen = "pass", await check(server)
    except Missing as error:
        outcome, seen = "off", str(error)
    except Wrong as error:
        seen = str(error)
    except TimeoutError:
        seen = "no answer in time"
    except LookupError as error:
        seen = f"the answer has no {error}"
    except (aiohttp.ClientError, TypeError, ValueError, AttributeError) as error:
        seen = f"{type(error).__name__}: {error}"  # a field has another type, or the answer is cut
    return Result(feature, check.__name__, outcome, " ".join(seen.split())[:200])


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
