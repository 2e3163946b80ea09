"""Plans a chat for all endpoints that have one: its prompt, the constraints of its output, and how
the output is parsed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.conversation import (
    Chat,
    ReasoningOptions,
    chat_of,
    prompt_of,
    text_of,
)
from aserve.http.openai.parsed import ParsePlan
from aserve.http.openai.reasoning import (
    BUDGETS,
    reasoning_budget,
    reasoning_limit,
    reasoning_params,
)
from aserve.http.openai.schema import ChatBody, Reasoning, TokenizeBody
from aserve.http.openai.tools import (
    ToolChoice,
    ToolUse,
    choose_tools,
    read_choice,
    read_function_choice,
    read_functions,
    read_tools,
)
from aserve.messages.requests import ChatPrompt, Grammar, ReasoningParams, SamplingParams
from aserve.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserNames,
    kept_tokens,
    opens_reasoning,
)
from aserve.parsers.tool_grammar import answer_grammar, calls_or_answer_grammar, tool_grammar


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt of a chat, and what becomes of its output. `grammar` is that of the tool calls, or
    else the one that the client gave. The output must not contain `banned_words`. In the answer
    `prefix` comes before the content, and with `has_functions` a call has the older form.
    """

    prompt: ChatPrompt
    parse: ParsePlan
    grammar: Grammar | None = None
    reasoning: ReasoningParams | None = None
    banned_words: tuple[str, ...] = ()
    prefix: str = ""
    has_functions: bool = False

    def constrained(self, sampling: SamplingParams) -> SamplingParams:
        """Returns the parameters with the constraints, and with the special tokens that the parser
        reads.
        """
        kept = kept_tokens(self.parse.reasoning, self.parse.tools)
        return msgspec.structs.replace(
            sampling,
            grammar=self.grammar,
            reasoning=self.reasoning,
            bad_words=(*sampling.bad_words, *self.banned_words),
            kept_special_tokens=tuple(sorted(kept)),
        )


def plan_chat(
    chat: Chat, parsers: ParserNames, *, grammar: Grammar | None = None, bans_calls: bool = False
) -> ChatPlan:
    """Plans a chat. `grammar` is the form that the client wants of the content. With `bans_calls`
    the model cannot begin a tool call.
    """
    tools, reasoning = chat.tool_use, chat.reasoning
    family = parsers.reasoning if reasoning.is_separate else None
    starts_inside = opens_reasoning(parsers.prompt_end(chat.template_variables()), family)
    # WHY: behind a grammar a model that has not begun to think would rarely do so by itself.
    thinks = family if starts_inside or reasoning.is_asked else None
    calls = parsers.tools if tools.specs else None
    is_free = False
    if tools.mode == "required":
        grammar = _call_grammar(tools, parsers.tools, thinks, starts_inside=starts_inside)
    elif grammar is not None and calls is not None:
        grammar = calls_or_answer_grammar(
            grammar,
            calls,
            tools.specs,
            parallel=tools.is_parallel,
            reasoning=thinks,
            starts_in_reasoning=starts_inside,
        )
    elif grammar is not None and thinks is not None:
        grammar = answer_grammar(grammar, thinks, starts_in_reasoning=starts_inside)
    elif grammar is None:
        is_free, thinks = True, family
        if calls is not None:
            grammar = _call_grammar(tools, calls, family, starts_inside=starts_inside)
    return ChatPlan(
        prompt_of(chat),
        ParsePlan(
            reasoning=thinks,
            tools=calls,
            tool_specs=tools.specs,
            is_parallel=tools.is_parallel,
            shows_reasoning=reasoning.is_shown,
            streams_reasoning=reasoning.is_streamed,
            starts_inside=None if is_free else starts_inside,
        ),
        grammar,
        reasoning_params(reasoning, parsers, tools=calls, may_reason=is_free or thinks is not None),
        (_call_markers(parsers.tools) if bans_calls else ()) + _banned_openings(reasoning, parsers),
    )


def plan_of_body(body: ChatBody, parsers: ParserNames, grammar: Grammar | None) -> ChatPlan:
    """Plans the chat of a body of OpenAI's API."""
    tools, choice = _tools_of(body)
    chat = chat_of(body, tools, _reasoning_of(body))
    plan = plan_chat(chat, parsers, grammar=grammar, bans_calls=choice.mode == "none")
    last = chat.messages[-1]
    has_echo = body.echo and last.role == "assistant"
    return replace(
        plan,
        prefix=text_of(last, where="messages") if has_echo else "",
        has_functions=bytes(body.functions) != b"null",
    )


def prompt_of_body(body: TokenizeBody) -> ChatPrompt:
    tools = choose_tools(read_tools(body.tools), read_choice(body.tool_choice))
    return prompt_of(chat_of(body, tools, ReasoningOptions(effort=body.reasoning_effort)))


def _tools_of(body: ChatBody) -> tuple[ToolUse, ToolChoice]:
    functions = read_functions(body.functions)
    if functions and bytes(body.tools) != b"null":
        raise InvalidRequest(
            "Invalid 'functions': 'tools' are given, too. Send only one of them.",
            param="functions",
            code="invalid_value",
        )
    if functions or body.function_call is not None:
        choice = read_function_choice(body.function_call)
        return choose_tools(functions, choice, is_parallel=False, param="functions"), choice
    choice = read_choice(body.tool_choice)
    is_parallel = body.parallel_tool_calls is not False
    return choose_tools(read_tools(body.tools), choice, is_parallel=is_parallel), choice


def _reasoning_of(body: ChatBody) -> ReasoningOptions:
    given, thinking = body.reasoning or Reasoning(), body.thinking
    budget = reasoning_budget(
        {
            **{name: getattr(body, name) for name in BUDGETS},
            "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
            "reasoning.max_tokens": given.max_tokens,
        }
    )
    is_enabled = given.enabled if thinking is None else thinking.type == "enabled"
    effort = body.reasoning_effort or given.effort
    return ReasoningOptions(
        is_enabled=False if budget == 0 else is_enabled,
        effort=effort,
        max_tokens=reasoning_limit(budget, is_enabled=is_enabled, effort=effort),
        is_separate=body.separate_reasoning is not False,
        is_shown=body.include_reasoning is not False and not given.exclude,
        is_streamed=body.stream_reasoning is not False,
    )


def _call_grammar(
    tools: ToolUse, parser: str | None, reasoning: str | None, *, starts_inside: bool
) -> Grammar | None:
    """Returns the grammar of calls that must come or, if a tool is strict, of those that may."""
    if parser is None:
        raise InvalidRequest(
            "Unsupported value for 'tool_choice': this server cannot make the model call a tool, "
            "because no tool-call parser fits its chat template; see --tool-call-parser.",
            param="tool_choice",
            code="unsupported_value",
        )
    return tool_grammar(
        parser,
        tools.specs,
        tools.mode,
        parallel=tools.is_parallel,
        reasoning=reasoning,
        starts_in_reasoning=starts_inside,
    )


def _banned_openings(options: ReasoningOptions, parsers: ParserNames) -> tuple[str, ...]:
    """Returns the texts that begin reasoning, if the client wants none. WHY: ended at once, a model
    that has begun to think would go on in the content.
    """
    if options.max_tokens != 0 or parsers.reasoning is None:
        return ()
    family = REASONING_PARSERS[parsers.reasoning]
    return family.opens if family.parsed_by is None else ()


def _call_markers(parser: str | None) -> tuple[str, ...]:
    """Returns the special tokens of calls. WHY all: a model that may not begin a call may still
    write the rest of it.
    """
    family = None if parser is None else TOOL_PARSERS[parser]
    return () if family is None or family.has_reasoning else family.markers
