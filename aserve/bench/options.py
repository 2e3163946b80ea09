"""The options of the benchmarks, one record each. The command line makes flags of their fields.

This module imports no benchmark, so that `aserve bench --help` is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.options.option import Limits, option

LIST = Limits(metavar="N,N,...")
SECRET = Limits(metavar="KEY", is_secret=True)
STEP_MS = Limits(low=0.1, high=60_000)
MICROSECONDS = Limits(low=0, high=1e6)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    repeats: int = option(3, "repeats; the longest tick of all repeats is shown", Limits(low=1))


@dataclass(frozen=True, slots=True)
class ClusterSimOptions:
    devices: str = option("1,8,64,512", "sizes of clusters, one measurement each", LIST)
    seconds: float = option(
        4.0, "virtual time of each run, a quarter of it warm-up", Limits(low=0.1, high=3600)
    )
    clients: int = option(16, "clients for each device, one request at a time each", Limits(low=1))
    input_len: int = option(64, "tokens of a prompt behind its shared prefix", Limits(low=1))
    output_len: int = option(64, "tokens of an answer on average", Limits(low=1))
    policy: str = option(
        "cache_aware",
        "policy of the routers",
        Limits(choices=("cache_aware", "least_load", "round_robin")),
    )
    request_us: float = option(500.0, "CPU time of a router per request", MICROSECONDS)
    chunk_us: float = option(30.0, "CPU time of a router per streamed token", MICROSECONDS)
    link_us: float = option(100.0, "latency between router and device", MICROSECONDS)
    host_us: float = option(300.0, "a tick of the scheduler, hidden behind steps", MICROSECONDS)
    seed: int = option(0, "seed of prompts and lengths", Limits(low=0))

    @property
    def warm_up_s(self) -> float:
        """The time over which the clients begin."""
        return self.seconds / 8


@dataclass(frozen=True, slots=True)
class FairnessOptions:
    rows: int = option(64, "sequences that run at once", Limits(low=2))
    step_ms: float = option(10.0, "duration of a step of the device", STEP_MS)
    prompt_len: int = option(16, "tokens of a prompt", Limits(low=1))
    flood_requests: int = option(300, "open requests of the flood", Limits(low=1))
    flood_tokens: int = option(100, "tokens of each answer of the flood", Limits(low=2))
    light_clients: int = option(9, "clients that send one request at a time", Limits(low=1))
    light_requests: int = option(4, "requests of each light client", Limits(low=1))
    light_tokens: int = option(32, "tokens of each answer of a light client", Limits(low=2))


@dataclass(frozen=True, slots=True)
class GroupedOptions:
    """The defaults are the experts of Qwen3-30B-A3B."""

    tokens: str = option("1,8,64,512", "tokens of a forward, one measurement each", LIST)
    experts: int = option(128, "experts of the layer", Limits(low=1))
    top_k: int = option(8, "experts of each token", Limits(low=1))
    hidden: int = option(2048, "size of a token's hidden state", Limits(low=2))
    intermediate: int = option(768, "outputs of each expert", Limits(low=2))
    dtype: str = option(
        "bfloat16", "dtype of weights and tokens", Limits(choices=("float32", "bfloat16"))
    )
    repeats: int = option(9, "repeats of each implementation, in turns", Limits(low=1))


@dataclass(frozen=True, slots=True)
class HostStepOptions:
    rows: str = option("16,64,256,1024", "running requests, one measurement each", LIST)
    steps: int = option(100, "measured steps of a repeat", Limits(low=1))
    repeats: int = option(3, "repeats; their medians and spread are shown", Limits(low=1))


@dataclass(frozen=True, slots=True)
class RequestMemoryOptions:
    running: int = option(1024, "requests that run", Limits(low=2))
    waiting: int = option(10_000, "requests that wait", Limits(low=1))


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    tokens: int = option(32_768, "tokens of a forward pass", Limits(low=1))
    rows: int = option(1024, "rows of logits", Limits(low=1))
    context_len: int = option(4096, "tokens in the context of a row", Limits(low=1))


@dataclass(frozen=True, slots=True)
class LoraBenchOptions:
    rows: str = option("8,32", "sequences that decode together, one measurement each", LIST)
    adapters: int = option(8, "LoRA adapters in each batch", Limits(low=1))
    rank: int = option(16, "rank of each adapter", Limits(low=1))
    input_len: int = option(16, "tokens of each prompt", Limits(low=1))
    output_len: int = option(48, "tokens of each answer", Limits(low=3))
    repeats: int = option(5, "repeats with adapters and without, in turns", Limits(low=1))


@dataclass(frozen=True, slots=True)
class SpeculateOptions:
    algorithms: str | None = option(
        None,
        "drafters, each compared with plain decoding; default: that of --speculative-algorithm",
        Limits(metavar="NAME,NAME,..."),
    )
    rows: str = option("1,4,16,64", "sequences that decode together, one measurement each", LIST)
    output_len: int = option(96, "tokens of each answer at most", Limits(low=3))
    temperature: float = option(0.0, "temperature of the answers", Limits(low=0, high=2))
    task: str = option(
        "stories",
        "what the prompts ask for; recall, json and code repeat parts of the prompt",
        Limits(choices=("stories", "recall", "json", "code")),
    )
    prompt: str | None = option(None, "the prompt of all answers, in place of those of the task")
    repeats: int = option(5, "repeats of each engine, in turns", Limits(low=1))
    processes: int = option(
        1, "processes that run each engine, and are counted together", Limits(low=1, high=16)
    )


@dataclass(frozen=True, slots=True)
class TwoBatchesOptions:
    ranks: int = option(2, "logical ranks, each with a part of the experts", Limits(low=1, high=16))
    rows: int = option(64, "sequences that decode on each rank", Limits(low=2, high=1024))
    repeats: int = option(9, "forwards in one piece and in two halves, in turns", Limits(low=1))


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    ranks: int = option(2, "ranks, or stages, that share the threads", Limits(low=2, high=16))
    rows: str = option("1,8,32", "sequences that decode together, one measurement each", LIST)
    output_len: int = option(32, "tokens of each answer", Limits(low=3))
    repeats: int = option(5, "repeats of each engine, in turns", Limits(low=1))


@dataclass(frozen=True, slots=True)
class RelayOptions:
    rows: int = option(8, "sequences that decode together", Limits(low=1, high=256))
    steps: int = option(200, "measured steps of a repeat", Limits(low=1, high=900))
    repeats: int = option(3, "repeats, each with an idle and with a busy loop", Limits(low=1))


@dataclass(frozen=True, slots=True)
class RouteOptions:
    requests: int = option(500, "small requests, alone and together", Limits(low=1))
    streams: int = option(16, "streams at once", Limits(low=1, high=1024))
    chunks: int = option(500, "chunks of a stream", Limits(low=1))
    repeats: int = option(3, "turns of the cost; medians are shown", Limits(low=1))
    stand_in_port: int = option(
        0, "port of the server that answers at once; 0: any free one", Limits(low=0, high=65535)
    )
    other: str | None = option(
        None,
        "another router, in front of --stand-in-port, to be measured in turns",
        Limits(metavar="URL"),
    )
    other_pid: int | None = option(None, "process of --other, for its CPU time", Limits(low=1))
    groups: int = option(9, "prefixes on two real servers; 0: without servers", Limits(low=0))
    turns: int = option(6, "prompts with the same prefix", Limits(low=1))


@dataclass(frozen=True, slots=True)
class DisaggBenchOptions:
    transfer_mib: int = option(512, "bytes that each transport brings, in MiB", Limits(low=1))
    transports: str = option(
        "tcp,shm", "transports to measure: tcp, shm, nixl", Limits(metavar="NAME,NAME,...")
    )
    repeats: int = option(5, "repeats of each transfer; the best is shown", Limits(low=1))
    servers: str = option(
        "one,two", "servers to measure: one, two", Limits(metavar="NAME,NAME,...")
    )
    prompts: int = option(20, "prompts to one and to two servers; 0: no servers", Limits(low=0))
    prompt_len: int = option(1000, "tokens of a prompt", Limits(low=2))
    beside: str = option(
        "nothing,memory,prompts",
        "what goes on while streams run: nothing, a process that copies memory, long prompts",
        Limits(metavar="NAME,NAME,..."),
    )
    streams: int = option(4, "streams that run at once", Limits(low=1))
    turns: int = option(2, "turns in which they run beside each of these", Limits(low=1))
    output_len: int = option(400, "tokens of a stream", Limits(low=2))
    sleep_ms: float = option(
        0.0,
        "each step of a server that answers sleeps so long, as if on a GPU",
        Limits(low=0, high=60_000),
    )
    seconds: float = option(
        15.0,
        "after so long a measurement of servers ends with what came",
        Limits(low=0.1, high=86_400),
    )
    server_options: str = option(
        "", "options of all servers, such as a model, in one text", Limits(metavar="TEXT")
    )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    results: str = option(
        "scaling.json",
        "outputs of `aserve bench scaling`; each is one line in the charts",
        Limits(metavar="FILE,FILE,..."),
    )
    labels: str | None = option(
        None, "names of the lines; default: the processors", Limits(metavar="NAME,NAME,...")
    )
    comparison: str | None = option(
        None,
        "JSON file with figures of several engines, drawn as bars instead of --results",
        Limits(metavar="FILE"),
    )
    out: str = option(".", "directory for the charts", Limits(metavar="DIR"))


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    contexts: str = option("128,1000,4000", "prompt lengths before a decode step", LIST)
    decode_rows: int = option(1, "sequences that decode together", Limits(low=1))
    prefills: str = option("512,2048,8192", "lengths of prefilled prompts", LIST)
    rows: str = option("16,64,256,1024", "running requests of a host step", LIST)
    models: str | None = option(
        None, "models to start; default: that of --model", Limits(metavar="MODEL,...")
    )
    steps: int = option(16, "decode steps of a repeat", Limits(low=1))
    repeats: int = option(3, "repeats; their medians are shown", Limits(low=1))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    url: str = option("http://127.0.0.1:8000", "address of the server", Limits(metavar="URL"))
    model: str | None = option(None, "name of the model; default: the first one of the server")
    api_key: str | None = option(None, "sent as `Authorization: Bearer KEY`", SECRET)
    endpoint: str = option("completions", "API to call", Limits(choices=("completions", "chat")))
    tokenizer: str | None = option(
        None, "model directory with the tokenizer for the prompts; default: the bundled model"
    )
    num_prompts: int = option(64, "requests of a repeat", Limits(low=1))
    input_len: int = option(64, "tokens of a prompt", Limits(low=1))
    output_len: int = option(64, "tokens of an answer; the end of text is ignored", Limits(low=1))
    shared_prefix_len: int = option(0, "tokens that all prompts begin with", Limits(low=0))
    max_concurrency: int = option(16, "requests that are open at once", Limits(low=1))
    request_rate: float = option(
        math.inf, "requests that begin per second; inf: as soon as one may", Limits(low=1e-3)
    )
    burstiness: float = option(
        1.0, "shape of the gamma distribution of arrival gaps; 1: Poisson", Limits(low=1e-3)
    )
    goodput: str | None = option(
        None, "latency limits of good requests", Limits(metavar="ttft:MS,tpot:MS,e2el:MS")
    )
    server_pid: int | None = option(
        None, "process of a local server, to report its CPU time", Limits(low=1)
    )
    num_warmups: int = option(16, "requests before the first repeat", Limits(low=0))
    repeats: int = option(3, "repeats, each with other prompts", Limits(low=1))
    seed: int = option(0, "seed of the prompts and arrival times", Limits(low=0))


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    preset: str | None = option(
        None,
        "peers: batches of 1, 8 and 32, and a long prompt, for comparisons with other engines",
        Limits(choices=("peers",)),
    )
    scenario: str | None = option(
        None, "scenarios of the preset to run; default: all", Limits(metavar="NAME,NAME,...")
    )
    num_prompts: int = option(32, "requests of a repeat", Limits(low=1))
    input_len: int = option(128, "tokens of a prompt", Limits(low=1))
    output_len: int = option(64, "tokens of an answer; the end of text is ignored", Limits(low=1))
    max_concurrency: int = option(256, "requests that are open at once", Limits(low=1))
    request_rate: float = option(
        math.inf, "requests that begin per second; inf: as soon as one may", Limits(low=1e-3)
    )
    prefix_cache: bool = option(False, "keep the KV of earlier prompts, as the server does")
    beside: str | None = option(
        None,
        "measure batches, alternating with this engine",
        Limits(choices=("transformers",)),
    )
    beside_dtype: str = option(
        "bfloat16",
        "dtype of the other engine's weights",
        Limits(choices=("float32", "bfloat16", "float16")),
    )
    repeats: int = option(3, "repeats, each with other prompts", Limits(low=1))
    prompt_seed: int = option(0, "seed of the prompts", Limits(low=0))


@dataclass(frozen=True, slots=True)
class OneBatchOptions:
    batch_sizes: str = option("1,8,32", "prompts in the batch", LIST)
    input_lens: str = option("128", "tokens of each prompt", LIST)
    output_len: int = option(32, "tokens of each answer", Limits(low=2))
    limits: str | None = option(
        None, "file with the machine's limits; default: measured quickly", Limits(metavar="FILE")
    )
    repeats: int = option(3, "repeats, each with other prompts", Limits(low=1))
    prompt_seed: int = option(0, "seed of the prompts", Limits(low=0))


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    rows: str = option("1", "sequences that decode together, one measurement each", LIST)
    input_len: int = option(64, "tokens of each prompt", Limits(low=1))
    output_len: int = option(48, "tokens of each answer", Limits(low=8))
    repeats: int = option(7, "repeats of both kinds of steps, in turns", Limits(low=1))


@dataclass(frozen=True, slots=True)
class OverlapSimOptions:
    step_ms: str = option("0.4,2,10", "durations of a step", Limits(metavar="MS,MS,..."))
    rows: str = option("1,64,256", "sequences that run at once", LIST)
    steps: int = option(100, "tokens of each sequence, one per step", Limits(low=2))
    no_http: bool = option(False, "leave out the runs behind the HTTP server")
    processes: str = option("1", "processes of the server: 1, 2 or 1,2", LIST)
    repeats: int = option(1, "repeats; medians and spread are shown", Limits(low=1))


@dataclass(frozen=True, slots=True)
class HttpCostOptions:
    clients: int = option(64, "clients that stream at once", Limits(low=1))
    steps: int = option(400, "tokens of each answer, one per step", Limits(low=2))
    step_ms: float = option(10.0, "duration of a step in milliseconds", STEP_MS)
    repeats: int = option(1, "repeats; medians are shown", Limits(low=1))


@dataclass(frozen=True, slots=True)
class HostileOptions:
    size: int = option(8_000_000, "bytes of a body, before compression", Limits(low=1 << 20))
    copies: int = option(4, "copies of a body that are sent at once", Limits(low=1))
    settle: float = option(30.0, "seconds until memory is compared", Limits(low=0, high=86_400))
    processes: str = option("1,2", "processes of the server: 1, 2 or 1,2", LIST)


def integers(text: str, *, flag: str, high: int = 1 << 24) -> tuple[int, ...]:
    """Parses a list such as `1,8,32`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: must be positive integers separated by commas")
    if max(numbers) > high:
        raise ConfigError(f"{flag} {text}: {max(numbers)} is more than {high}")
    return numbers


def numbers(text: str, *, flag: str) -> tuple[float, ...]:
    """Parses a list such as `0.4,2,10`."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not all(0 < number < math.inf for number in found or (0,)):
        raise ConfigError(f"{flag} {text}: must be positive numbers separated by commas")
    return found
