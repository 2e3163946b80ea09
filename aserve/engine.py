"""The embeddable API: an engine in this process, without HTTP, for async and synchronous programs.

    async with Engine(model="some/dir") as engine:
        async for chunk in engine.generate("Once upon a time", max_tokens=40):
            ...

    with Engine() as engine:
        answers = engine.generate_sync(["one", "two"], temperature=0.8, seed=7)

It installs no signal handlers and does not read ASERVE_* variables. Options are those of the
command line, sampling fields those of the HTTP API. A plain `with` runs the loop in a thread of its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.errors import AserveError, ConfigError, EngineDead, ErrorInfo, InvalidRequest
from aserve.frontend import Frontend
from aserve.host.threads import LoopThread, in_thread
from aserve.http.openai.call import request_of, sampling_of, seed_source
from aserve.http.openai.conversation import template_variables
from aserve.http.openai.json_values import encode_json
from aserve.http.openai.limits import RANGES, check_limits, check_within
from aserve.http.openai.schema import GenerationBody
from aserve.load import Loaded, load
from aserve.messages.base import MAX_INT32, ArrayF32, FinishReason, array_f32, array_i32
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import (
    EMBED,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from aserve.messages.scored import PromptToken, TokenLogprob
from aserve.options.option import unknown_option
from aserve.parsers.events import ParsedEvent
from aserve.parsers.registry import kept_tokens, make_parser, opens_reasoning
from aserve.tiny import MODEL_DIR
from aserve.unread import merge

T = TypeVar("T")

# Text, token ids, or the messages of a chat.
PromptLike: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

LONG_LIST = 32  # prompts: more get a progress bar on a terminal
# Fields of the HTTP body that are not for sampling.
NOT_SAMPLING = frozenset(
    {"model", "stream", "stream_options", "return_token_ids", "include_timings"}
)


class SamplingFields(GenerationBody, kw_only=True):
    """The fields of `generate` beside the prompt, with the ranges and defaults of the HTTP API."""

    logprobs: int | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None


class GenerationError(AserveError):
    """The engine ended the request with an error; `reason` has its code, status and message."""

    def __init__(self, reason: ErrorInfo) -> None:
        super().__init__(reason.message, param=reason.param, code=reason.code)
        self.reason = reason

    def info(self) -> ErrorInfo:
        return self.reason


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    prompt: tuple[PromptToken, ...] = ()  # with prompt_logprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """With `n` there are several choices; `text` is the first one's."""

    choices: tuple[Choice, ...]
    seed: int

    @property
    def text(self) -> str:
        return self.choices[0].text


class Engine:
    """An engine that loads when it is entered and ends when it is left, once. `options` are named
    as in config.py.

    NOTE: call the async methods on the loop that entered it, and the `_sync` ones in a plain
    `with`.
    """

    def __init__(
        self,
        resolved: Resolved | None = None,
        *,
        loader: Callable[[Resolved], Loaded] = load,
        **options: object,
    ) -> None:
        if resolved is not None and options:
            raise ConfigError(f"options were given twice: resolved and {', '.join(options)}")
        self._resolved = resolved or _resolve(options)
        self._loader = loader
        self._frontend = Frontend(self._resolved)
        self._draw_seed = seed_source(self._resolved.debug.seed)
        self._numbers = itertools.count(1)
        self._loop_thread: LoopThread | None = None
        self._max_rows = 1  # once it has loaded, the executor's

    async def __aenter__(self) -> Engine:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._frontend.close)
            loaded = await in_thread(lambda: self._loader(self._resolved), name="load")
            self._max_rows = loaded.executor.spec.max_rows
            await self._frontend.start(loaded)
            undo.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._frontend.close()

    def __enter__(self) -> Engine:
        with contextlib.ExitStack() as undo:
            thread = LoopThread()
            undo.callback(thread.close)
            thread.call(self.__aenter__())
            undo.pop_all()
        self._loop_thread = thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread, self._loop_thread = self._running_thread(), None
        try:
            thread.call(self._frontend.close())
        finally:
            thread.close()

    @property
    def num_decodes(self) -> int:
        """The decodes since the start, each of one sequence in one step."""
        return int(self._frontend.metrics.registry.get_sample_value("aserve_decodes_total") or 0)

    def generate(self, prompt: PromptLike, **fields: object) -> AsyncGenerator[OutputChunk, None]:
        """Yields the chunks of one request as they come. Closing the generator cancels the request.

        Raises the ClientError of an invalid field, and GenerationError if the engine fails.
        """
        return self._chunks(self._request(prompt, fields))

    async def answer(self, prompt: PromptLike, **fields: object) -> Answer:
        """Returns the whole answer at once."""
        request = self._request(prompt, fields)
        chunks = [chunk async for chunk in self._chunks(request)]
        return Answer(_choices(chunks, num_choices=request.sampling.n), request.sampling.seed)

    def stream_sync(self, prompt: PromptLike, **fields: object) -> Iterator[OutputChunk]:
        """`generate` for a plain `with`."""
        return self._iterated(self.generate(prompt, **fields))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], **fields: object
    ) -> AsyncGenerator[ParsedEvent, None]:
        """Yields the parts of one answer as they come: the reasoning apart from the content, by the
        parser of the options.
        """
        parsers = self._frontend.state.parsers
        asked = _checked(fields)
        if asked.n not in (None, 1):
            raise InvalidRequest(f"a chat has one answer, and n is {asked.n}", param="n")
        tail = parsers.prompt_end(asked.chat_template_kwargs or {})
        parser = make_parser(
            parsers.reasoning, None, starts_in_reasoning=opens_reasoning(tail, parsers.reasoning)
        )
        request = self._request(messages, fields, kept=kept_tokens(parsers.reasoning, None))
        async with contextlib.aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                for event in parser.push(chunk.text):
                    yield event
        for event in parser.finish():
            yield event

    def chat_sync(
        self, messages: Sequence[Mapping[str, Any]], **fields: object
    ) -> Iterator[ParsedEvent]:
        """`chat` for a plain `with`."""
        return self._iterated(self.chat(messages, **fields))

    def generate_sync(self, prompts: Sequence[PromptLike], **fields: object) -> list[Answer]:
        """Returns answers in the order of the prompts. The first error cancels the rest and is
        raised.
        """
        prompts = _listed(prompts)
        thread = self._running_thread()
        num_choices = _checked(fields).n or 1
        with _progress_of(len(prompts)) as done:

            async def one(prompt: PromptLike) -> Answer:
                answer = await self.answer(prompt, **fields)
                done()
                return answer

            return thread.call(self._each(prompts, one, num_sequences=num_choices))

    async def embed(self, prompt: PromptLike) -> ArrayF32:
        """Returns the prompt's vector, float32 [size]: the hidden state of its last token after the
        final norm, scaled to length 1, or what a model that embeds or classifies pools.
        """
        request_id = f"request-{next(self._numbers)}"
        given = _prompt_of(prompt, SamplingFields())
        request = GenerateRequest(request_id, given, EMBED, embeds=True)
        *_, last = [chunk async for chunk in self._chunks(request)]
        return array_f32(last.embedding)

    def embed_sync(self, prompts: Sequence[PromptLike]) -> list[ArrayF32]:
        """`embed` for a plain `with`, in the order of the prompts."""
        return self._running_thread().call(self._each(_listed(prompts), self.embed))

    def _iterated(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        thread = self._running_thread()
        try:
            while (item := thread.call(_next(items))) is not None:
                yield item
        finally:
            thread.call(items.aclose())

    def _running_thread(self) -> LoopThread:
        if self._loop_thread is None:
            raise EngineDead("the engine is not running here: use it inside `with Engine(...)`")
        return self._loop_thread

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        refusal = self._frontend.state.refusal()
        if refusal is not None:
            raise refusal
        request_stream = self._frontend.gateway.open(request)
        try:
            async for chunks in request_stream.batches():
                for chunk in _without_errors(chunks):
                    yield chunk
        finally:
            request_stream.cancel()

    async def _each(
        self,
        prompts: Sequence[PromptLike],
        one: Callable[[PromptLike], Coroutine[Any, Any, T]],
        *,
        num_sequences: int = 1,
    ) -> list[T]:
        """Runs `one` for each prompt, enough at once to keep every row busy, and never more than
        may wait. Each prompt makes `num_sequences` sequences.
        """
        answers: dict[int, T] = {}
        numbered = enumerate(prompts)

        async def work() -> None:
            for index, prompt in numbered:
                answers[index] = await one(prompt)

        most = min(2 * self._max_rows, self._resolved.scheduler.max_queue)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(most // num_sequences or 1, len(prompts))):
                    group.create_task(work())
        except* AserveError as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(prompts))]

    def _request(
        self, prompt: PromptLike, fields: Mapping[str, object], *, kept: Collection[str] = ()
    ) -> GenerateRequest:
        """`kept` are the special tokens that stay in the text."""
        asked = _checked(fields)
        sampling = sampling_of(
            asked,
            max_tokens=asked.max_tokens,
            logprobs=asked.logprobs,
            draw_seed=self._draw_seed,
            defaults=self._frontend.state.defaults,
        )
        if asked.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=asked.prompt_logprobs)
        sampling = msgspec.structs.replace(sampling, kept_special_tokens=tuple(sorted(kept)))
        request_id = f"request-{next(self._numbers)}"
        return request_of(
            asked, _prompt_of(prompt, asked), sampling=sampling, request_id=request_id
        )


def _without_errors(chunks: Iterable[OutputChunk]) -> Iterator[OutputChunk]:
    for chunk in chunks:
        if chunk.error is not None:
            raise GenerationError(chunk.error)
        yield chunk


async def _next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


@contextlib.contextmanager
def _progress_of(total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each answer, which moves a bar if the list is long."""
    if total <= LONG_LIST or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)


def _resolve(options: Mapping[str, object]) -> Resolved:
    """Resolves the options. One that is None counts as not given."""
    given = {name: value for name, value in options.items() if value is not None}
    facts = Facts(default_model=str(MODEL_DIR))
    return resolve(Raw(command_line=given), facts)


def _listed(prompts: Sequence[PromptLike]) -> Sequence[PromptLike]:
    if isinstance(prompts, str):
        raise InvalidRequest("give a list of prompts here, not one text")
    return prompts


class _Message(msgspec.Struct):
    """The fields that every message of a chat has; a template may use others."""

    role: str


def _prompt_of(prompt: object, asked: SamplingFields) -> Prompt:
    """Converts the argument to a prompt. Raises InvalidRequest if it is none."""
    if isinstance(prompt, str):
        encode_json(prompt, param="prompt")
        return TextPrompt(prompt, add_special_tokens=asked.add_special_tokens is not False)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(
            "a prompt is a text, a list of token ids, or a list of messages with 'role' and "
            f"'content'; this one is of type {type(prompt).__name__}",
            param="prompt",
        )
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        check_token_ids(ids)
        return TokenPrompt(tuple(ids))
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if len(messages) < len(prompt):
        raise InvalidRequest(
            "a list of texts, or of lists of token ids, is several prompts: ask for each of them, "
            "or give the list to generate_sync or embed_sync",
            param="prompt",
        )
    data = encode_json(messages, param="messages")
    try:
        msgspec.json.decode(data, type=list[_Message])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"wrong message: {error}", param="messages") from None
    return ChatPrompt(
        data,
        variables=template_variables(asked.chat_template_kwargs),
        add_special_tokens=bool(asked.add_special_tokens),
    )


def check_token_ids(ids: Sequence[int]) -> None:
    """Raises InvalidRequest for an id that is no int32. The tokenizer checks the vocabulary."""
    wrong = next((item for item in ids if not -MAX_INT32 <= item <= MAX_INT32), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {str(wrong)[:40]} is out of range", param="prompt")


def _checked(fields: Mapping[str, object]) -> SamplingFields:
    known = set(SamplingFields.__struct_fields__) - NOT_SAMPLING
    wrong = next((name for name in fields if name not in known), None)
    if wrong is not None:
        name = ascii(wrong)[1:-1]  # a name that cannot be written may be wrong, too
        raise InvalidRequest(unknown_option(name, known).message, param=name)
    for name, value in fields.items():
        encode_json(value, param=name)
    try:
        checked = msgspec.convert(fields, SamplingFields)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"wrong sampling field: {error}") from None
    check_limits(checked)
    if checked.logprobs is not None:
        check_within(checked.logprobs, RANGES["top_logprobs"], param="logprobs")
    return checked


def _choices(chunks: list[OutputChunk], *, num_choices: int) -> tuple[Choice, ...]:
    return tuple(
        _choice([chunk for chunk in chunks if chunk.child == child]) for child in range(num_choices)
    )


def _choice(chunks: list[OutputChunk]) -> Choice:
    whole = merge(chunks)
    assert whole.finish_reason is not None, "the last chunk of a child says why it ended"
    return Choice(
        text=whole.text,
        token_ids=tuple(array_i32(whole.token_ids).tolist()),
        finish_reason=whole.finish_reason,
        logprobs=whole.logprobs,
        usage=whole.usage,
        prompt=() if whole.prompt is None else whole.prompt.tokens,
    )
