"""Flags of vLLM and SGLang for which aserve has no option of the same meaning.

Their commands can be typed from memory: a flag that asks for what aserve does anyway is accepted,
one that sets an option of aserve by another kind of value sets it, and one that asks for something
else ends the start with what is possible. Flags that mean the same as one of aserve's options are
that option's aliases, in config.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from aserve.errors import ConfigError
from aserve.options.speculative_config import read_speculative_config

Settings = Mapping[str, str]  # by the name of aserve's option
NOTHING: Settings = {}


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """`values` are the accepted ones, with the options that each sets; a switch has none, but the
    options that it `sets` itself. An empty `values` of a flag that `takes_value` accepts no value
    at all. `read` returns the options of a value that is not one of a few; one that `takes_many`
    gets them joined by blanks. A switch that `is_refused` ends the start.
    """

    names: tuple[str, ...]
    about: str
    values: Mapping[str, Settings] = field(default_factory=dict)
    takes_value: bool = True
    sets: Settings = field(default_factory=dict)
    read: Callable[[str], Settings] | None = None
    is_refused: bool = False
    takes_many: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings; a short name such as `tp` has one dash or two."""
        short = [f"-{name}" for name in self.names if len(name) == 2]
        return (*[f"--{name}" for name in self.names], *short)


def switch(name: str, about: str, *, sets: Settings = NOTHING) -> ForeignFlag:
    """Makes a switch. Most are accepted without an effect."""
    return ForeignFlag((name,), about, takes_value=False, sets=sets)


def refused(name: str, about: str) -> ForeignFlag:
    """Makes a switch that ends the start, because aserve cannot do what it asks for."""
    return ForeignFlag((name,), about, takes_value=False, is_refused=True)


# The fields of vLLM's structured_outputs_config, with the values that mean what aserve does.
STRUCTURED_OUTPUTS: Mapping[str, tuple[object, ...]] = {
    "backend": ("auto", "xgrammar"),
    "disable_fallback": (False, True),  # there is one backend
    "disable_any_whitespace": (False,),  # at most two blanks are between two tokens of JSON
    "disable_additional_properties": (False,),
    "enable_in_reasoning": (False,),
    "reasoning_parser_plugin": ("",),
}


def read_structured_outputs_config(value: str) -> Settings:
    """Returns the options by name. Raises ValueError for what they cannot say."""
    try:
        given = msgspec.json.decode(value, type=dict[str, object])
    except msgspec.DecodeError as error:
        example = '{"backend": "xgrammar"}'
        raise ValueError(f"it is not a JSON object ({error}), such as {example}") from None
    parser = given.pop("reasoning_parser", "")
    for name, asked in given.items():
        if name not in STRUCTURED_OUTPUTS:
            known = ", ".join(("reasoning_parser", *STRUCTURED_OUTPUTS))
            raise ValueError(f"the field {name!r} is not known (known: {known})")
        if asked not in STRUCTURED_OUTPUTS[name]:
            possible = " or ".join(map(json.dumps, STRUCTURED_OUTPUTS[name]))
            raise ValueError(f"only {possible} is possible as {name}")
    return {"reasoning_parser": str(parser)} if parser else NOTHING


def read_graph_sizes(value: str) -> Settings:
    """Returns the option for sizes between blanks or commas, also as a list of JSON. Raises
    ValueError."""
    sizes = value.strip("[] ").replace(",", " ").split()
    if not sizes or not all(size.isdecimal() for size in sizes):
        raise ValueError("it is not a list of numbers, such as 1 2 4 8")
    return {"cuda_graph_max_bs": str(max(map(int, sizes)))}


ONE = {"1": NOTHING}
FOREIGN_FLAGS = (
    ForeignFlag(("master-addr", "master-port"), "--dist-init-addr HOST:PORT says both"),
    ForeignFlag(
        ("scheduling-policy", "schedule-policy"),
        "clients take turns, and each is served first come, first served, whatever prefixes are "
        "cached; priority also allows the field `priority`",
        {"fcfs": NOTHING, "lpm": NOTHING, "priority": {"enable_priority_scheduling": "true"}},
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
    switch(
        "speculative-use-rejection-sampling",
        "see --speculative-verification",
        sets={"speculative_verification": "rejection"},
    ),
    ForeignFlag(
        ("cudagraph-capture-sizes", "cuda-graph-bs"),
        "the largest of them is --cuda-graph-max-bs; the sizes below it follow from it",
        read=read_graph_sizes,
        takes_many=True,
    ),
    ForeignFlag(("max-total-tokens",), "--num-pages has the size of the KV cache, in pages"),
    ForeignFlag(("max-logprobs",), "a request may have 20 alternatives per token", {"20": NOTHING}),
    ForeignFlag(
        ("sse-keep-alive-interval", "sse-ping-interval"),
        "silent streams get a comment every 15 s",
        {"15": NOTHING},
    ),
    ForeignFlag(
        ("grammar-backend", "guided-decoding-backend", "structured-outputs-config.backend"),
        "grammars are compiled by xgrammar",
        {"auto": NOTHING, "xgrammar": NOTHING},
    ),
    ForeignFlag(
        ("structured-outputs-config",),
        "vLLM's JSON object; its field `reasoning_parser` is --reasoning-parser",
        read=read_structured_outputs_config,
    ),
    ForeignFlag(
        ("compilation-config", "torch-compile-max-bs"),
        "models run in kernels that are compiled ahead, on CUDA also in graphs; see --eager and "
        "--cuda-graph-max-bs",
    ),
    ForeignFlag(
        ("task", "runner"),
        "the model's directory says whether it generates, embeds or classifies: its architecture, "
        "and modules.json; a model that generates also embeds",
        {"auto": NOTHING, "generate": NOTHING, "embed": NOTHING, "pooling": NOTHING},
    ),
    ForeignFlag(("tokenizer-mode",), "the tokenizer is that of tokenizer.json", {"auto": NOTHING}),
    ForeignFlag(
        ("chat-template-content-format",),
        "the texts of a message's parts are joined to one for the template",
        {"auto": NOTHING, "string": NOTHING},
    ),
    ForeignFlag(
        ("hf-overrides", "json-model-override-args", "rope-scaling", "rope-theta"),
        "MODEL may be a changed copy of config.json",
    ),
    ForeignFlag(
        ("max-log-len",), "--log-requests-level 2 shows 2048 characters of a text, and 3 all of it"
    ),
    ForeignFlag(
        ("log-requests-format",),
        "--log-format json is for all of the log",
        {"text": {"log_format": "text"}, "json": {"log_format": "json"}},
    ),
    ForeignFlag(
        ("ssl-cert-reqs",), "--ssl-ca-certs requires certificates of clients", {"2": NOTHING}
    ),
    ForeignFlag(("response-role",), "answers are the assistant's", {"assistant": NOTHING}),
    ForeignFlag(
        ("download-dir", "revision", "tokenizer-revision"),
        "a hub model is found by Hugging Face's client: HF_HOME has the folder, and a directory "
        "as MODEL any revision",
    ),
    ForeignFlag(("hf-token",), "Hugging Face's client reads it from the variable HF_TOKEN"),
    ForeignFlag(
        ("max-num-queued-tokens",),
        "--max-prompt-queue bounds the prompts that wait, and --max-queue the sequences",
    ),
    ForeignFlag(
        ("max-seq-len-to-capture",),
        "CUDA graphs hold sequences of any length; see --cuda-graph-max-bs",
    ),
    ForeignFlag(
        ("num-continuous-decode-steps",), "each decode is a step of its own", {"1": NOTHING}
    ),
    ForeignFlag(
        ("schedule-conservativeness",), "a sequence that finds no room for KV waits and goes on"
    ),
    ForeignFlag(("max-cpu-loras",), "--max-loras adapters are loaded, all on the device"),
    ForeignFlag(("lora-dtype",), "adapters have the dtype of the model", {"auto": NOTHING}),
    ForeignFlag(
        ("lora-target-modules",), "an adapter may change every linear layer", {"all": NOTHING}
    ),
    ForeignFlag(
        ("tokenizer-worker-num", "detokenizer-worker-num"),
        "--frontends N has a tokenizer and a detokenizer in each of N processes",
        {"1": NOTHING},
    ),
    ForeignFlag(("config-format",), "config.json", {"auto": NOTHING, "hf": NOTHING}),
    ForeignFlag(("weight-version",), "/update_weight_version sets it"),
    ForeignFlag(
        ("trace-modules",),
        "spans are those of requests; see --otlp-traces-endpoint",
        {"request": NOTHING},
    ),
    ForeignFlag(
        ("collect-detailed-traces",), "spans are those of requests; see --otlp-traces-endpoint"
    ),
    ForeignFlag(
        ("disable-access-log-for-endpoints", "uvicorn-access-log-exclude-prefixes"),
        "--access-log leaves out the probes and /metrics",
    ),
    ForeignFlag(("log-requests-target",), "the log goes to stderr"),
    ForeignFlag(("decode-log-interval",), "statistics are in /metrics and never logged"),
    ForeignFlag(
        ("allowed-methods", "allowed-headers"),
        "pages of --allowed-origins may use the methods of every route, and all headers",
        {'["*"]': NOTHING},
    ),
    ForeignFlag(("ssl-keyfile-password",), "the private key has no password"),
    ForeignFlag(
        ("allowed-local-media-path",), "no client can name a file of the server as a picture"
    ),
    ForeignFlag(
        ("middleware", "logits-processors"), "aserve runs no code that a flag or a request names"
    ),
    ForeignFlag(("tool-server",), "the client runs the tools"),
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
    switch("disable-log-requests", "requests are logged only with --log-requests"),
    switch("no-enable-log-requests", "requests are logged only with --log-requests"),
    switch(
        "disable-overlap-schedule", "the same as --overlap-depth 1", sets={"overlap_depth": "1"}
    ),
    switch("enable-server-load-tracking", "/load always counts"),
    switch("enable-trace", "spans are sent with --otlp-traces-endpoint"),
    switch("enable-tokenizer-info-endpoint", "/tokenizer_info is always served"),
    switch("enable-response-store", "responses are kept; see --max-stored-responses"),
    switch("enable-offline-docs", "/docs needs nothing from outside"),
    switch("enable-multimodal", "pictures are read if the model takes them"),
    switch("is-embedding", "the model's directory says whether it embeds"),
    switch("headless", "a node whose --node-rank is not 0 serves no clients"),
    switch("skip-server-warmup", "the warm-up is one step"),
    switch(
        "disable-frontend-multiprocessing", "the same as --processes 1", sets={"processes": "1"}
    ),
    refused("disable-fastapi-docs", "a proxy can hide /docs and /openapi.json"),
    refused("trust-request-chat-template", "templates are the model's, or that of --chat-template"),
    refused("enable-per-request-metrics", "each request may set `include_timings`"),
    refused("no-enable-chunked-prefill", "long prompts always run in chunks"),
    refused("disable-cuda-graph-padding", "decodes of other sizes run in the next larger graph"),
    refused("allow-credentials", "cookies are never used, and API keys are headers"),
    refused("enable-prompt-embeds", "a prompt is text or token ids"),
    refused("enable-custom-logit-processor", "aserve runs no code that a request brings"),
    refused("enable-return-hidden-states", "hidden states are not returned"),
    refused("enable-return-routed-experts", "the choices of experts are not returned"),
    refused("return-tokens-as-token-ids", "each request may set `return_tokens_as_token_ids`"),
    refused(
        "constrained-json-disable-any-whitespace",
        "JSON has at most a line end and a blank between two of its tokens",
    ),
    refused("enable-log-outputs", "use --log-requests-level 2 or 3, which also shows the prompts"),
    refused(
        "skip-tokenizer-init",
        "the tokenizer is always loaded, because stop strings, grammars and parsers need it; token "
        "ids are taken as `prompt` or `input_ids`, and come back with `return_token_ids`, and from "
        "/generate always",
    ),
    refused(
        "enable-torch-compile",
        "models run in kernels that are compiled ahead, on CUDA also in graphs, and never in "
        "torch.compile; leave it out",
    ),
    switch("trust-remote-code", "aserve never runs code from a model's directory"),
)


def add_foreign_flags(parser: argparse.ArgumentParser, taken: set[str]) -> None:
    """Adds the flags that are not in `taken`, hidden from --help."""
    for foreign in FOREIGN_FLAGS:
        flags = [flag for flag in foreign.flags if flag not in taken]
        parser.add_argument(
            *flags,
            action=_Accept,
            nargs="+" if foreign.takes_many else None if foreign.takes_value else 0,
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
        if foreign.is_refused:
            raise ConfigError(f"{option_string}: not supported: {foreign.about}")
        if foreign.takes_many:
            assert isinstance(values, list)
            values = " ".join(values)
        settings = foreign.values.get(str(values)) if foreign.takes_value else foreign.sets
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
            values = "numbers" if foreign.takes_many else "JSON"
        is_switch = not (foreign.takes_value or foreign.is_refused)
        yield flags, values or ("switch" if is_switch else "none"), foreign.about
