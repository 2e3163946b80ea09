"""Flags of vLLM and SGLang for which aserve has no option of the same meaning.

Their commands can be typed from memory: a flag that asks for what aserve does anyway is accepted,
one that sets an option of aserve by another kind of value sets it, and one that asks for something
else ends the start with what is possible. Flags that mean the same as one of aserve's options are
that option's aliases, in config.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from aserve.errors import ConfigError
from aserve.speculative_config import read_speculative_config

Settings = Mapping[str, str]  # by the name of aserve's option
NOTHING: Settings = {}


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """`values` are the accepted ones, with the options that each sets; a switch has none. An empty
    `values` of a flag that `takes_value` accepts no value at all. `read` returns the options of a
    value that is not one of a few.
    """

    names: tuple[str, ...]
    about: str
    values: Mapping[str, Settings] = field(default_factory=dict)
    takes_value: bool = True
    read: Callable[[str], Settings] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings; a short name such as `tp` has one dash or two."""
        short = [f"-{name}" for name in self.names if len(name) == 2]
        return (*[f"--{name}" for name in self.names], *short)


def switch(name: str, about: str) -> ForeignFlag:
    """Makes a switch that is accepted without an effect."""
    return ForeignFlag((name,), about, takes_value=False)


ONE = {"1": NOTHING}
ONE_DEVICE = "aserve runs a model on one device"
FOREIGN_FLAGS = (
    ForeignFlag(("tensor-parallel-size", "tp-size", "tp"), ONE_DEVICE, ONE),
    ForeignFlag(("pipeline-parallel-size", "pp-size", "pp"), ONE_DEVICE, ONE),
    ForeignFlag(
        ("data-parallel-size", "dp-size", "dp"), "start one server for each replica instead", ONE
    ),
    ForeignFlag(("expert-parallel-size", "ep-size", "ep"), ONE_DEVICE, ONE),
    ForeignFlag(("nnodes",), ONE_DEVICE, ONE),
    ForeignFlag(
        ("tokenizer", "tokenizer-path"), "the tokenizer is that of the model's directory; use MODEL"
    ),
    ForeignFlag(
        ("scheduling-policy", "schedule-policy"),
        "clients take turns, and each is served first come, first served; priority also allows "
        "the field `priority`",
        {"fcfs": NOTHING, "priority": {"enable_priority_scheduling": "true"}},
    ),
    ForeignFlag(
        ("sampling-defaults",),
        "see --generation-config",
        {"model": {"generation_config": "model"}, "openai": {"generation_config": "none"}},
    ),
    ForeignFlag(("stream-interval",), "each token is sent as soon as it is there", ONE),
    ForeignFlag(("cpu-offload-gb", "swap-space"), "weights stay on the device", {"0": NOTHING}),
    ForeignFlag(
        ("speculative-config",),
        "vLLM's JSON object; --speculative-algorithm and the options after it say the same",
        read=read_speculative_config,
    ),
    ForeignFlag(
        ("cudagraph-capture-sizes", "cuda-graph-bs"),
        "shapes follow from --cuda-graph-max-bs, and are captured when they are first needed",
    ),
    ForeignFlag(
        ("max-prefill-tokens",),
        "one budget holds for the prompts and rows of a step: --max-num-batched-tokens",
    ),
    ForeignFlag(("max-total-tokens",), "--num-pages has the size of the KV cache, in pages"),
    ForeignFlag(
        ("override-generation-config",),
        "defaults of sampling are in the model's generation_config.json; see --generation-config",
    ),
    ForeignFlag(("max-logprobs",), "a request may have 20 alternatives per token", {"20": NOTHING}),
    ForeignFlag(
        ("sse-keep-alive-interval",), "silent streams get a comment every 15 s", {"15": NOTHING}
    ),
    ForeignFlag(
        ("grammar-backend", "guided-decoding-backend"),
        "grammars are compiled by xgrammar",
        {"auto": NOTHING, "xgrammar": NOTHING},
    ),
    ForeignFlag(
        ("ssl-cert-reqs",), "--ssl-ca-certs requires certificates of clients", {"2": NOTHING}
    ),
    ForeignFlag(("response-role",), "answers are the assistant's", {"assistant": NOTHING}),
    ForeignFlag(("root-path",), "let the proxy in front of the server strip the path"),
    ForeignFlag(
        ("download-dir", "revision"),
        "a hub model is found by Hugging Face's client: HF_HOME has the folder, and a directory "
        "as MODEL any revision",
    ),
    ForeignFlag(("crash-dump-folder",), "--record writes what the scheduler gets, to be replayed"),
    switch("enable-ssl-refresh", "certificates that change are always read again"),
    switch("enable-sleep-mode", "/sleep is there with --admin-api-key and --processes 2"),
    switch("enable-memory-saver", "/sleep is there with --admin-api-key and --processes 2"),
    switch("enable-request-id-headers", "every answer has X-Request-Id"),
    switch("disable-log-stats", "statistics are in /metrics and never logged"),
    switch("disable-uvicorn-access-log", "requests are logged only with --access-log"),
    switch("enable-prefix-caching", "prefixes are cached unless --no-prefix-cache is given"),
    switch("enable-chunked-prefill", "long prompts always run in chunks"),
    switch("enable-mixed-chunk", "chunks of prompts always run beside decodes"),
    switch("async-scheduling", "see --overlap-depth"),
    switch("enable-metrics", "/metrics is always served"),
    switch("enable-cache-report", "usage always counts cached tokens"),
    switch("enable-prompt-tokens-details", "usage always counts cached tokens"),
    switch("enable-auto-tool-choice", "tool calls need no switch"),
    switch("disable-log-requests", "prompts are never logged"),
    switch("trust-remote-code", "aserve never runs code from a model's directory"),
)


def add_foreign_flags(parser: argparse.ArgumentParser, taken: set[str]) -> None:
    """Adds the flags that are not in `taken`, hidden from --help."""
    for foreign in FOREIGN_FLAGS:
        flags = [flag for flag in foreign.flags if flag not in taken]
        parser.add_argument(
            *flags,
            action=_Accept,
            nargs=None if foreign.takes_value else 0,
            const=foreign,
            dest=foreign.names[0].replace("-", "_"),
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Accept(argparse.Action):
    """Sets the options for which the value stands, or raises ConfigError."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        foreign = self.const
        assert isinstance(foreign, ForeignFlag)
        if not foreign.takes_value:
            return
        settings = foreign.values.get(str(values))
        if foreign.read is not None:
            try:
                settings = foreign.read(str(values))
            except ValueError as error:
                raise ConfigError(f"{option_string} {values}: {error}; {foreign.about}") from None
        if settings is None:
            raise ConfigError(f"{option_string} {values}: {_possible(foreign)}")
        for name, value in settings.items():
            setattr(namespace, name, value)


def _possible(foreign: ForeignFlag) -> str:
    if not foreign.values:
        return f"not supported: {foreign.about}"
    words = " or ".join(foreign.values)
    return f"only {words} is possible: {foreign.about}"


def foreign_rows() -> Iterator[tuple[str, str, str]]:
    """Yields flags, accepted values and meaning, for the page of options."""
    for foreign in FOREIGN_FLAGS:
        flags = ", ".join(f"`{flag}`" for flag in foreign.flags)
        values = ", ".join(f"`{value}`" for value in foreign.values)
        if foreign.read is not None:
            values = "JSON"
        yield flags, values or ("none" if foreign.takes_value else "switch"), foreign.about
