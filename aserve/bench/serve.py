"""`aserve bench serve` measures any OpenAI-compatible server with a load of streamed requests.

All times are measured at the client. The CPU time of a local server is read from /proc.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from aserve.bench.cpu_time import tree_cpu_s
from aserve.bench.load import arrival_times, run_load
from aserve.bench.options import ServeOptions
from aserve.bench.result import BenchResult, progress, spread
from aserve.bench.serving_figures import figures_table, medians_of, read_goodput, serving_figures
from aserve.bench.streamed import Answer, send_request
from aserve.bench.windows import TokenWindows
from aserve.config import ModelOptions, Resolved
from aserve.errors import ConfigError
from aserve.host.threads import new_event_loop
from aserve.text.load import load_text
from aserve.tiny import MODEL_DIR

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_S = 30.0
# With these options a directory without a tokenizer gets the numeric one, as in the server.
PROMPTS = ModelOptions(load_format="dummy", generation_config="none")

Body = dict[str, object]


def run(options: ServeOptions, _resolved: Resolved) -> BenchResult:
    limits_ms = read_goodput(options.goodput)
    runs: list[Run] = []
    is_whole = False
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_measure(options, runs))
        is_whole = True
    except KeyboardInterrupt:
        if not runs:
            raise
    figures = [_figures(one, limits_ms) for one in runs]
    medians = medians_of(figures)
    errors = [answer.error for one in runs for answer in one.answers if answer.error]
    return BenchResult(
        {
            **medians,
            "spread": round(spread([one["output_throughput"] for one in figures]), 3),
            **_settings(options, runs[0].model),
            "runs": figures,
        },
        (figures_table(f"{options.url}, medians of {len(runs)} repeats", medians),),
        tuple(f"a request failed: {error}" for error in errors[:3]),
        is_whole,
    )


class Run(msgspec.Struct, frozen=True):
    """One repeat. `cpu_s` is the CPU time of the server's processes, if it is known."""

    model: str
    answers: list[Answer]
    duration_s: float
    cpu_s: float | None


async def _measure(options: ServeOptions, runs: list[Run]) -> None:
    """Adds the repeats to `runs`, each when it has ended."""
    tokenizer = load_text(Path(options.tokenizer or MODEL_DIR), PROMPTS).tokenizer
    windows = TokenWindows(tokenizer, seed=options.seed)
    total = options.num_warmups + options.repeats * options.num_prompts
    async with _open_session(options) as session:
        model = options.model or await _first_model(session, options.url)
        prefix = windows.text(options.shared_prefix_len) if options.shared_prefix_len else ""

        def bodies(count: int) -> list[Body]:
            texts = (prefix + windows.text(options.input_len) for _ in range(count))
            return [_body(text, model, options) for text in texts]

        with progress("requests", total) as done:
            client = Client(session, options, model, done=done)
            if options.num_warmups:
                await client.run(bodies(options.num_warmups), [0.0] * options.num_warmups)
            for repeat in range(options.repeats):
                arrivals_s = _arrival_times(options, repeat)
                runs.append(await client.run(bodies(options.num_prompts), arrivals_s))


class Client:
    """Sends the requests to one server. `run` is one repeat."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        options: ServeOptions,
        model: str,
        *,
        done: Callable[[], None],
    ) -> None:
        self._session = session
        self._options = options
        self._model = model
        self._url = options.url.rstrip("/") + PATHS[options.endpoint]
        self._done = done

    async def run(self, bodies: Sequence[Body], arrivals_s: Sequence[float]) -> Run:
        pid = self._options.server_pid
        cpu_s = tree_cpu_s(pid) if pid else 0.0
        answers, duration_s = await run_load(
            [functools.partial(send_request, self._session, self._url, body) for body in bodies],
            arrivals_s,
            max_concurrency=self._options.max_concurrency,
            done=self._done,
        )
        if all(answer.error for answer in answers):
            raise ConfigError(f"every request to {self._url} failed: {answers[0].error}")
        return Run(self._model, answers, duration_s, tree_cpu_s(pid) - cpu_s if pid else None)


def _open_session(options: ServeOptions) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else None,
    )


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url.rstrip("/") + "/v1/models", raise_for_status=True) as response:
            return msgspec.json.decode(await response.read(), type=_Models).data[0].id
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, IndexError) as error:
        raise ConfigError(f"{url} does not list its models ({error}); give --model") from None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _body(text: str, model: str, options: ServeOptions) -> Body:
    prompt: Body = {"prompt": text}
    if options.endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {
        "model": model,
        **prompt,
        "max_tokens": options.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _settings(options: ServeOptions, model: str) -> dict[str, object]:
    """Returns the options for the JSON output, which has no infinity, without the API key."""
    settings = dataclasses.asdict(options) | {"model_id": model}
    if math.isinf(options.request_rate):
        settings["request_rate"] = "inf"
    return {name: value for name, value in settings.items() if name not in ("api_key", "model")}


def _arrival_times(options: ServeOptions, repeat: int) -> list[float]:
    return arrival_times(
        options.num_prompts,
        rate=options.request_rate,
        burstiness=options.burstiness,
        seed=options.seed + repeat,
    )


def _figures(run: Run, limits_ms: dict[str, float]) -> dict[str, float]:
    figures = serving_figures(run.answers, duration_s=run.duration_s, limits_ms=limits_ms)
    if run.cpu_s is not None:
        figures["server_cpu_s_per_1k_tok"] = run.cpu_s / figures["total_output_tokens"] * 1e3
    return figures
