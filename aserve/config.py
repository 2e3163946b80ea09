"""Defines every option once, as fields of frozen records with help text and limits.

The command line, its --help, ASERVE_* variables and --config files all come from these fields.
`resolve` is pure. Defaults that depend on the machine or the model (dtype `auto`, the number of KV
pages) are chosen later, where both are known.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from aserve.errors import ConfigError
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.diffusion.registry import ALGORITHMS as DENOISING
from aserve.gpu.spec.registry import ALGORITHMS, COUPLED, VERIFICATIONS
from aserve.options.node_options import NodeOptions, check_nodes
from aserve.options.option import (
    ENV_PREFIX,
    Limits,
    Option,
    option,
    options_of,
    parse_value,
    unknown_option,
)
from aserve.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

if TYPE_CHECKING:
    from aserve.messages.executor import TierPolicy

T = TypeVar("T")

ACCESS, CLIENT_LIMITS = "Access", "Limits of clients"  # headings in --help
TEST_PREFIX = "ASERVE_TEST_"  # read by the test suite, never an option


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str | None = option(
        None,
        "a model directory in Hugging Face format, its config.json, a GGUF file, or a hub id, also "
        "with the name of a GGUF file behind it; default: the bundled model",
        Limits(metavar="MODEL", aliases=("model-path",)),
    )
    tokenizer: str | None = option(
        None,
        "a directory with the tokenizer and the chat template, where they are not the model's own",
        Limits(metavar="DIR", aliases=("tokenizer-path",)),
    )
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights from config.json alone",
        Limits(choices=("auto", "dummy")),
    )
    model_impl: str = option(
        "auto",
        "the code that runs the model; auto: aserve's own if it has the architecture, else that of "
        "transformers with aserve's attention",
        Limits(choices=("auto", "native", "transformers")),
    )
    dtype: str = option(
        "auto",
        "dtype of weights and KV; auto: the fastest one on this machine; a CPU with AVX2 and no "
        "instructions for bfloat16 multiplies such weights in float32, unless the model is tiny",
        Limits(
            choices=("auto", "float32", "float64", "bfloat16", "float16"),
            value_aliases={"half": "float16", "float": "float32"},
        ),
    )
    quantization: str | None = option(
        None,
        "rounds the weights of linear layers while they are loaded: int8, and fp8 on CUDA, to a "
        "byte each, int4 to half a byte, with a scale for each 128",
        Limits(choices=("int8", "int4", "fp8")),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens; default: the model's",
        Limits(low=1, aliases=("context-length",)),
    )
    allow_auto_truncate: bool = option(
        False,
        "a prompt that does not fit in --max-model-len loses its end, and max_tokens is lowered to "
        "what fits; without this option such requests get a 400",
    )
    generation_config: str = option(
        "model",
        "source of the default sampling parameters of requests: the model's "
        "generation_config.json, or none",
        Limits(choices=("model", "none"), value_aliases={"auto": "model", "vllm": "none"}),
    )
    override_generation_config: str = option(
        "{}",
        "JSON object of default sampling parameters, named as in generation_config.json, which go "
        "before those of --generation-config",
        Limits(metavar="JSON", aliases=("preferred-sampling-params",)),
    )
    default_chat_template_kwargs: str = option(
        "{}",
        "JSON object of variables of the chat template, for requests without such variables of "
        "their own (chat_template_kwargs, reasoning_effort)",
        Limits(metavar="JSON"),
    )
    chat_template: str | None = option(
        None,
        "a chat template instead of the model's: a file, the template itself, or qwen3-reranker",
        Limits(metavar="FILE"),
    )
    tool_call_parser: str = option(
        "auto",
        "the parser of tool calls; auto: the one that fits the chat template; none: calls stay in "
        f"the content; others: {', '.join(TOOL_PARSERS)}",
        Limits(metavar="NAME"),
    )
    reasoning_parser: str = option(
        "auto",
        "the parser of reasoning; auto: the one that fits the chat template; none: reasoning stays "
        f"in the content; others: {', '.join(REASONING_PARSERS)}",
        Limits(metavar="NAME"),
    )
    allow_special_tokens_in_content: bool = option(
        False,
        "special tokens in the messages of a chat are control tokens; otherwise they are text, and "
        "no message can open another role's turn",
    )
    served_model_name: str | None = option(
        None,
        "the names that clients may give as `model`, with spaces or commas between them; answers "
        "have the first one unless the client gave another; default: the directory's or the hub id",
        Limits(metavar="NAME", is_list=True, takes_many=True),
    )


@dataclass(frozen=True, slots=True)
class KvOptions:
    kv_cache_dtype: str = option(
        "auto",
        "dtype of KV; auto: that of the model, or bfloat16 where float32 models have weights of "
        "bfloat16 (CPUs without instructions for it); fp8 takes half the bytes of float16",
        Limits(
            choices=("auto", "float32", "bfloat16", "float16", "fp8"),
            value_aliases={"fp8_e4m3": "fp8"},
        ),
    )
    page_size: int = option(
        16, "tokens in a page of KV", Limits(low=1, high=64, aliases=("block-size",))
    )
    num_pages: int | None = option(
        None,
        "pages of KV; default: on a GPU what --gpu-memory-utilization leaves, else a quarter of "
        "free memory, at most 4 GiB",
        Limits(low=2, aliases=("num-gpu-blocks-override",)),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "part of a GPU's memory that aserve may use; KV gets what the model and the largest step "
        "leave of it",
        Limits(low=0.01, high=1, aliases=("mem-fraction-static",)),
    )
    no_prefix_cache: bool = option(
        False,
        "do not keep the KV of earlier prompts for reuse",
        Limits(aliases=("disable-radix-cache", "no-enable-prefix-caching")),
    )
    num_state_checkpoints: int | None = option(
        None,
        "copies of the states of recurrent layers behind which other prompts begin; default: what "
        "a quarter of the memory for KV holds; 0: such a model has no prefix cache",
        Limits(low=0),
    )
    enable_hierarchical_cache: bool = option(
        False,
        "keep KV that the prefix cache evicts in host memory, and bring it back when a prompt "
        "begins with it",
    )
    hicache_size: float | None = option(
        None,
        "GiB of host memory for KV below the prefix cache; turns --enable-hierarchical-cache on",
        Limits(low=0, aliases=("kv-offloading-size",)),
    )
    hicache_ratio: float = option(
        2.0,
        "host memory for KV, in parts of the device's, where --hicache-size is not given; at most "
        "half of the memory that is free",
        Limits(low=0.001),
    )
    hicache_write_policy: str = option(
        "write_through",
        "pages go down when they enter the prefix cache (write_through), or when they are evicted "
        "(write_back)",
        Limits(choices=("write_through", "write_back")),
    )
    hicache_storage: str | None = option(
        None,
        "a directory, or a URL for fsspec, that keeps the pages of host memory, also for other "
        "servers with the same model; turns --enable-hierarchical-cache on",
        Limits(metavar="PATH|URL", is_secret=True),
    )
    hicache_storage_size: float | None = option(
        None,
        "GiB of files in the directory of --hicache-storage, those of other models and servers "
        "included; beyond that the least recently used ones are deleted",
        Limits(low=0),
    )
    enable_hisparse: bool = option(
        False,
        "keep the KV of a model with sparse attention in the host's memory, and what it reads most "
        "on the device",
    )
    hisparse_config: str = option(
        "{}",
        "JSON object: device_buffer_size (hot rows per request, twice the model's top_k if left "
        "out), host_to_device_ratio (memory for KV, 2), backup_interval (steps, 1)",
        Limits(metavar="JSON"),
    )

    @property
    def tier_policy(self) -> TierPolicy:
        """Returns when pages go down to the tiers below the prefix cache, if there are any."""
        asked = (self.hicache_size, self.hicache_storage)
        if not self.enable_hierarchical_cache and asked == (None, None):
            return "off"
        return "write_back" if self.hicache_write_policy == "write_back" else "write_through"


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    max_num_seqs: int | None = option(
        None,
        "sequences that run at once; default: 256 on a GPU, else 64",
        Limits(low=1, high=65536, aliases=("max-running-requests",)),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens in one step; longer prompts run in chunks; default: 8192 on a GPU, else 2048",
        Limits(low=1, high=1 << 20, aliases=("chunked-prefill-size", "max-prefill-tokens")),
    )
    max_mixed_prefill_tokens: int | None = option(
        None,
        "prefill tokens in a step that also decodes; up to 8 times as many when prefills outnumber "
        "decodes; a lower cap gives steadier streams and more steps; default: no cap, but 60 for a "
        "small model on a CPU",
        Limits(low=1, high=1 << 20, former="mixed_prompt_tokens"),
    )
    max_queue: int = option(
        512,
        "sequences that may wait; more are answered 429",
        Limits(low=1, aliases=("max-queued-requests", "max-num-queued-reqs")),
    )
    max_prompt_queue: int = option(
        64 << 20,
        "characters and token ids of prompts that may wait to be tokenized; more are answered 429",
        Limits(low=1),
    )
    overlap_depth: int | None = option(
        None,
        "steps in flight at most; 1: no overlap; default: 2, and in a pipeline one for each stage, "
        "or 1 if the stages share the cores of a machine",
        Limits(low=1, high=8, former="depth"),
    )
    overlap_lead: int = option(
        2,
        "steps in flight that may sample for one sequence; at most --overlap-depth",
        Limits(low=1, high=8, former="lead"),
    )


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """Options of structured output. A server has a worker process from its start. More are started
    when a grammar comes and no worker is idle, and end after some idle minutes.
    """

    grammar_workers: int = option(
        2, "grammars that compile at once; 0: no structured output", Limits(low=0, high=64)
    )
    grammar_timeout: float = option(
        10.0, "seconds that compiling one grammar may take", Limits(low=0.01, high=3600)
    )
    grammar_memory: int = option(
        512 << 20, "bytes that compiling one grammar may take", Limits(low=1 << 20)
    )
    grammar_cache: int = option(
        256 << 20, "bytes of compiled grammars that are kept for reuse", Limits(low=0)
    )
    grammar_mask_time: float = option(
        2.0,
        "seconds of processor time that the masks of one request may take beyond 2 ms each",
        Limits(low=0.01, high=3600),
    )
    grammar_client_mask_time: float = option(
        10.0, "the same for all requests of one client within a minute", Limits(low=0.01, high=60)
    )


@dataclass(frozen=True, slots=True)
class LoraOptions:
    enable_lora: bool = option(
        False,
        "requests may name a LoRA adapter as `model`; adapters come by --lora-modules, and by "
        "/v1/load_lora_adapter with the admin API key",
    )
    lora_modules: str | None = option(
        None,
        "adapters in PEFT's format to load at the start, with spaces or commas between them; "
        "implies --enable-lora",
        Limits(metavar="NAME=PATH", is_list=True, takes_many=True, aliases=("lora-paths",)),
    )
    max_loras: int = option(
        8,
        "adapters that may be loaded, and so be mixed in a batch",
        Limits(low=1, high=1024, aliases=("max-loras-per-batch", "max-loaded-loras")),
    )
    max_lora_rank: int = option(16, "largest rank of an adapter", Limits(low=1, high=1024))

    @property
    def max_slots(self) -> int:
        """The adapters that have room on the device; 0 without LoRA."""
        return self.max_loras if self.enable_lora or self.lora_modules else 0


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    speculative_algorithm: str | None = option(
        None,
        "draft several tokens ahead, and verify them in one step; by default, answers "
        "stay the same, token for token",
        Limits(choices=tuple(ALGORITHMS)),
    )
    speculative_draft_model_path: str | None = option(
        None,
        "the draft model, a directory or a hub id",
        Limits(metavar="MODEL", aliases=("speculative-draft-model",)),
    )
    speculative_num_steps: int | None = option(
        None,
        "tokens that are drafted one after the other; default: the drafter's",
        Limits(low=1, high=32),
    )
    speculative_topk: int | None = option(
        None,
        "branches at each node of a draft tree; default: 1, a chain",
        Limits(low=1, high=32, aliases=("speculative-eagle-topk",)),
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "tokens of a sequence that one step verifies, its last known one included; default: the "
        "steps + 1 of a chain",
        Limits(low=2, high=64),
    )
    speculative_verification: str = option(
        COUPLED,
        "which drafts are accepted. coupled: those that plain decoding would draw; rejection: "
        "mostly more, with other answers of the same distribution; block: still more",
        Limits(choices=VERIFICATIONS),
    )
    speculative_token_tree: str | None = option(
        None,
        "the same draft tree for every step: static for EAGLE-1's own, or a list of paths as in "
        "vLLM, such as [(0,), (1,), (0, 0)]; default: a chain, or the tree of the branches",
        Limits(metavar="PATHS"),
    )
    speculative_token_map: str | None = option(
        None,
        "a file of the token ids that EAGLE drafts, a tensor or list that torch saved, or "
        "OWNER/MODEL/FILE of the hub; default: all",
        Limits(metavar="FILE"),
    )
    speculative_min_match_len: int | None = option(
        None,
        "the shortest suffix of a sequence that is looked up in it for a draft; default: 1 token",
        Limits(low=1, high=64, aliases=("speculative-ngram-min-match-window-size",)),
    )
    speculative_max_match_len: int | None = option(
        None,
        "the longest suffix of a sequence that is looked up in it for a draft; default: 12 tokens",
        Limits(low=1, high=64, aliases=("speculative-ngram-max-match-window-size",)),
    )
    speculative_shared_table_size: int | None = option(
        None,
        "n-grams of outputs that stay for drafts of other requests with the same API key, cache "
        "salt and adapter; new ones replace old ones; 0: none; default: 65536",
        Limits(low=0, high=1 << 24, aliases=("speculative-ngram-capacity",)),
    )


@dataclass(frozen=True, slots=True)
class DiffusionOptions:
    dllm_algorithm: str | None = option(
        None,
        "how a diffusion language model fills its blocks. LowConfidence, the default: the tokens "
        "that are likelier than the threshold, or the likeliest; JointThreshold: it edits, too",
        Limits(choices=tuple(DENOISING)),
    )
    dllm_algorithm_config: str | None = option(
        None,
        "settings of the algorithm, in YAML or JSON: threshold, and of JointThreshold "
        "edit_threshold, max_post_edit_steps and penalty_lambda; a threshold above 1 fills one "
        "token in each pass",
        Limits(metavar="FILE"),
    )


@dataclass(frozen=True, slots=True)
class DisaggregationOptions:
    disaggregation_mode: str = option(
        "null",
        "prefill: this engine also computes prompts for others and sends them the KV; decode: it "
        "fetches the KV of its prompts from prefill engines",
        Limits(choices=("null", "prefill", "decode")),
    )
    disaggregation_prefill: str | None = option(
        None, "the prefill engines of --disaggregation-mode decode", Limits(metavar="HOST:PORT,...")
    )
    disaggregation_host: str = option(
        "127.0.0.1", "address on which a prefill engine listens for decode engines"
    )
    disaggregation_bootstrap_port: int = option(
        8998, "port on which a prefill engine listens for decode engines", Limits(1, 65535)
    )
    disaggregation_transfer_backend: str = option(
        "auto",
        "how KV travels between prefill and decode engines: tcp; shm: memory that both map, on one "
        "machine; nixl: read by NIXL, on both sides; auto: shm where both sides can, else tcp",
        Limits(choices=("auto", "tcp", "shm", "nixl")),
    )
    disaggregation_key: str | None = option(
        None,
        "a secret that both sides must have; what travels is not encrypted",
        Limits(metavar="KEY", is_secret=True),
    )


@dataclass(frozen=True, slots=True)
class MachineOptions:
    device: str = option(
        "auto",
        "what the model runs on: auto, cpu, cuda, mlx (Apple silicon; needs aserve[mlx]), or the "
        "device of an installed package; auto: a CUDA device, if torch finds one",
    )
    attention_backend: str = option(
        "auto",
        "attention backend; auto: the fastest one of the device that supports the model",
        Limits(choices=("auto", *BACKENDS)),
    )
    deterministic: bool = option(
        False,
        "a request gets the same bits alone, in a batch, in chunks or computed again (slower)",
        Limits(aliases=("enable-deterministic-inference",)),
    )
    enable_two_batch_overlap: bool = option(
        False,
        "run each forward of a model with experts as two halves, of which one computes while the "
        "other's rows travel between ranks",
        Limits(aliases=("enable-dbo",)),
    )
    threads: int | None = option(
        None,
        "threads that compute on the CPU, at most as many as there are processors; default: one "
        "for a small model, else OMP_NUM_THREADS, else the cores within the container's limit",
        Limits(low=1, high=1024),
    )
    tensor_parallel_size: int = option(
        1,
        "ranks among which the heads and inner elements of each layer are divided: processes on "
        "the CPU, or with a GPU each",
        Limits(low=1, high=64, aliases=("tp-size", "tp")),
    )
    pipeline_parallel_size: int = option(
        1,
        "stages among which the layers are divided, each with the ranks of "
        "--tensor-parallel-size; as many steps are in flight",
        Limits(low=1, high=64, aliases=("pp-size", "pp")),
    )
    ranks_timeout: float = option(
        600.0,
        "seconds that ranks wait for each other while they start, load the model, new weights or "
        "an adapter, after which the engine ends",
        Limits(low=1, high=86400, aliases=("dist-timeout", "distributed-timeout-seconds")),
    )
    enable_dp_attention: bool = option(
        False,
        "data-parallel attention: --data-parallel-size ranks in one engine, in place of as many "
        "servers. Each has rows, pages and a prefix cache of its own and whole attention layers; "
        "MLPs and experts are divided among them",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "ranks on GPUs sum by NCCL alone, and not through each other's memory, where they can",
    )


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    expert_parallel_size: int = option(
        1,
        "ranks among which whole experts are divided; the other layers are divided by "
        "--tensor-parallel-size among the same ranks, or are on each of them",
        Limits(low=1, high=64, aliases=("ep-size", "ep")),
    )
    enable_expert_parallel: bool = option(
        False,
        "divide whole experts among the ranks of --tensor-parallel-size",
        Limits(aliases=("enable-ep-moe",)),
    )
    all2all_backend: str = option(
        "allgather_reducescatter",
        "how tokens get to experts of other ranks. allgather_reducescatter: each rank computes its "
        "experts for all tokens, and the ranks add up the results; deepep_high_throughput: rows "
        "travel in DeepEP's normal mode; deepep_low_latency: in its low-latency mode, where a rank "
        "has at most 128 tokens",
        Limits(
            choices=("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"),
            aliases=("moe-a2a-backend",),
            value_aliases={
                "none": "allgather_reducescatter",
                "naive": "allgather_reducescatter",
                "deepep": "deepep_low_latency",
            },
        ),
    )
    enable_eplb: bool = option(
        False,
        "move experts between ranks by the measured load",
        Limits(aliases=("eplb",)),
    )
    eplb_num_redundant_experts: int = option(
        0,
        "copies of the experts with the most tokens in each layer, which take these in turns; "
        "needs --enable-eplb",
        Limits(low=0, high=1024, aliases=("ep-num-redundant-experts", "num-redundant-experts")),
    )
    eplb_step_interval: int = option(
        1000,
        "forwards between two placements of the experts",
        Limits(low=1, high=1_000_000, aliases=("eplb-rebalance-num-iterations",)),
    )


@dataclass(frozen=True, slots=True)
class GraphOptions:
    eager: bool = option(
        False,
        "run each step operator by operator, without CUDA graphs",
        Limits(aliases=("enforce-eager", "disable-cuda-graph")),
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "sequences in the largest decode step that is a CUDA graph; default: 256",
        Limits(low=1, high=4096, aliases=("max-cudagraph-capture-size",)),
    )
    cuda_graph_capture: str = option(
        "lazy",
        "lazy captures a graph between two steps, once a step has missed it; "
        "eager captures all at the start",
        Limits(choices=("lazy", "eager")),
    )
    disable_piecewise_cuda_graph: bool = option(
        False,
        "run the forwards of prompts and of mixed steps operator by operator; without it CUDA "
        "graphs hold what is between the attention of their layers",
    )
    piecewise_cuda_graph_max_tokens: int = option(
        2048,
        "tokens of the largest forward that CUDA graphs hold in pieces",
        Limits(low=1, high=1 << 20),
    )

    @property
    def piece_tokens(self) -> int | None:
        """Tokens of the largest forward in pieces; None: no forward is captured."""
        if self.eager:
            return None
        return 0 if self.disable_piecewise_cuda_graph else self.piecewise_cuda_graph_max_tokens


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one", Limits(low=0, high=65535))
    uds: str | None = option(
        None, "listen on this Unix socket instead of a port", Limits(metavar="FILE")
    )
    ssl_certfile: str | None = option(
        None, "serve HTTPS with this certificate (PEM, with its chain)", Limits(metavar="FILE")
    )
    ssl_keyfile: str | None = option(
        None, "the certificate's private key, if --ssl-certfile lacks it", Limits(metavar="FILE")
    )
    ssl_ca_certs: str | None = option(
        None,
        "clients need a certificate that one of these authorities has signed",
        Limits(metavar="FILE"),
    )
    api_key: str | None = option(
        None,
        "clients must send `Authorization: Bearer KEY` or `X-Api-Key: KEY`; several keys with "
        "commas between them, or the option again; `ps` shows them to every user of the machine, "
        "unlike --api-key-file",
        Limits(metavar="KEY", is_secret=True, is_list=True, group=ACCESS),
    )
    api_key_file: str | None = option(
        None,
        "file of keys that clients may send, one per line",
        Limits(metavar="FILE", group=ACCESS),
    )
    admin_api_key: str | None = option(
        None,
        "the key of the admin routes, which only exist with this option; its requests may also set "
        "`priority`",
        Limits(metavar="KEY", is_secret=True, group=ACCESS),
    )
    enable_priority_scheduling: bool = option(
        False,
        "requests of any client may set `priority`; without it they get a 400",
        Limits(group=ACCESS),
    )
    shared_prefix_cache: bool = option(
        False,
        "requests of different API keys share cached prefixes; `cached_tokens` then tells a client "
        "which prompts others have sent",
        Limits(group=ACCESS),
    )
    max_sequences_per_request: int | None = option(
        None,
        "prompts times n of one request at most; default: --max-num-seqs",
        Limits(low=1, high=65536, group=CLIENT_LIMITS),
    )
    public_metrics: bool = option(
        False, "with --api-key: /metrics needs no key", Limits(group=ACCESS)
    )
    enable_force_include_usage: bool = option(
        False,
        "streams of chat and completions end with the usage, also without "
        "stream_options.include_usage",
        Limits(aliases=("stream-response-default-include-usage",)),
    )
    log_requests: bool = option(
        False,
        "log a line when a request comes and one when it ends; --log-requests-level says how much",
        Limits(aliases=("enable-log-requests",)),
    )
    log_requests_level: int = option(
        1,
        "0: ids, sizes, times and the outcome; 1: also sampling parameters; 2: also the first 2048 "
        "characters of prompts and outputs; 3: all of them",
        Limits(low=0, high=3),
    )
    access_log: bool = option(
        False, "log a line for each request: id, route, status, client and times; no content"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send a span of each request to this OpenTelemetry collector, for example "
        "http://localhost:4318/v1/traces; needs `aserve[otel]`; spans have no prompts or answers",
        Limits(metavar="URL", is_secret=True),
    )
    metrics_compat: str | None = option(
        None,
        "/metrics also has the names that dashboards for vLLM or SGLang read",
        Limits(choices=("vllm", "sglang")),
    )
    max_body_size: int = option(
        8 << 20,
        "largest request body in bytes, also when decompressed",
        Limits(low=1024, group=CLIENT_LIMITS),
    )
    files_dir: str | None = option(
        None,
        "folder of /v1/files and /v1/batches, which only exist with this option; batches run while "
        "the engine has nothing else to do, and go on after a restart",
        Limits(metavar="DIR"),
    )
    files_size: int = option(
        8 << 30, "most bytes of files in --files-dir", Limits(low=1024, group=CLIENT_LIMITS)
    )
    max_file_size: int = option(
        200 << 20, "largest file of /v1/files in bytes", Limits(low=1024, group=CLIENT_LIMITS)
    )
    max_connections: int = option(
        4096,
        "open connections; above it idle ones are closed, and if there are none, new ones get 503",
        Limits(low=1, high=1 << 20, group=CLIENT_LIMITS),
    )
    header_timeout: float = option(
        20.0,
        "seconds for a request's line and headers to arrive",
        Limits(low=0.01, high=3600, group=CLIENT_LIMITS),
    )
    body_timeout: float = option(
        30.0,
        "seconds for a request's body to arrive, and one more for each 64 KiB of it",
        Limits(low=0.01, high=3600, group=CLIENT_LIMITS),
    )
    keep_alive_timeout: float = option(
        75.0,
        "seconds that a connection may stay open without a request",
        Limits(low=0.01, high=86400, group=CLIENT_LIMITS),
    )
    allowed_hosts: str | None = option(
        None,
        "names, separated by commas, that requests may have as Host; *: any; default: local names "
        "if --host is a loopback address, else any",
        Limits(metavar="NAMES", is_list=True, group=ACCESS),
    )
    root_path: str | None = option(
        None,
        "the path under which a proxy serves this server, and which it takes away from requests; "
        "/openapi.json names it",
        Limits(metavar="PATH", group=ACCESS),
    )
    allowed_origins: str | None = option(
        None,
        "origins, separated by commas, whose pages may use the API (CORS) and open a websocket; "
        "*: any; default: the server's own",
        Limits(metavar="ORIGINS", is_list=True, group=ACCESS),
    )
    allow_media_domains: str | None = option(
        None,
        "hosts, separated by commas, from which pictures are fetched whose image_url is no data "
        "URL; only at public addresses, and without redirects; default: nothing is fetched",
        Limits(
            metavar="DOMAINS",
            is_list=True,
            takes_many=True,
            aliases=("allowed-media-domains",),
            group=ACCESS,
        ),
    )
    max_answer_logprobs: int = option(
        1 << 20,
        "log-probabilities in one answer at most: prompts x n x tokens x (1 + alternatives)",
        Limits(low=1024, group=CLIENT_LIMITS),
    )
    write_timeout: float = option(
        60.0,
        "seconds that a client may read nothing of its answer, before its connection is closed",
        Limits(low=0.1, high=86400, group=CLIENT_LIMITS),
    )
    max_unread_bytes: int = option(
        16 << 20,
        "memory for what one client has not yet read of its answer; beyond it the connection is "
        "closed",
        Limits(low=1 << 16, group=CLIENT_LIMITS),
    )
    max_stored_responses: int = option(
        4096,
        "responses kept for previous_response_id; 0 keeps none",
        Limits(low=0, group=CLIENT_LIMITS),
    )
    max_stored_bytes: int = option(
        256 << 20, "memory for the responses that are kept", Limits(low=0, group=CLIENT_LIMITS)
    )
    resume_ttl: float = option(
        60.0,
        "seconds that a resumable stream is kept, and goes on, without a reader; 0 keeps none",
        Limits(low=0, high=86400, group=CLIENT_LIMITS),
    )
    max_resume_bytes: int = option(
        256 << 20,
        "memory for the events of resumable streams; beyond it old events are forgotten",
        Limits(low=1 << 16, group=CLIENT_LIMITS),
    )
    processes: str = option(
        "auto",
        "1: clients and engine in one process; 2: the engine in a process of its own; "
        "auto: 2 on a CUDA device",
        Limits(choices=("auto", "1", "2")),
    )
    frontends: int = option(
        1,
        "processes with HTTP, tokenizer and detokenizer that share the port before one engine "
        "process; more than 1 implies --processes 2",
        Limits(low=1, high=64, aliases=("api-server-count",)),
    )
    replicas: int = option(
        1,
        "servers with an engine each, as child processes behind a router on the port; each has its "
        "share of the GPUs or cores, and is started again if it dies",
        Limits(low=1, high=256, aliases=("data-parallel-size", "dp-size", "dp")),
    )
    max_engine_restarts: int = option(
        5,
        "with an engine in a process of its own, or with --replicas: restarts in a row, after "
        "which its next death ends the server, or leaves the other replicas; a process that was up "
        "for a minute begins a new row; 0: no restart",
        Limits(low=0, high=1 << 20),
    )
    drain_timeout: float = option(
        30.0,
        "seconds that open requests get to finish after SIGTERM; a second signal ends them at once",
        Limits(low=0, high=86400, aliases=("shutdown-timeout",)),
    )
    sleep_idle_seconds: float | None = option(
        None,
        "idle seconds after which the engine sleeps: its process ends, which frees all its memory, "
        "and the next request starts it again and waits for it; implies --processes 2; default: "
        "it never sleeps",
        Limits(low=0.1, high=86400 * 365),
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds without the end of a running step, after which /livez and /health report the "
        "engine as stuck",
        Limits(low=0.1, high=86400),
    )
    profile_dir: str | None = option(
        None,
        "folder for the traces of /start_profile and /stop_profile, which need it",
        Limits(metavar="DIR"),
    )


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of the router in front of replicas."""

    policy: str = option(
        "cache_aware",
        "cache_aware: the replica that has computed most of the prompt, unless its load is too "
        "high; least_load: the fewest open requests; round_robin: each in turn; session: the same "
        "replica for the same session",
        Limits(choices=("cache_aware", "least_load", "round_robin", "session")),
    )
    cache_threshold: float = option(
        0.3,
        "cache_aware: least part of a prompt that must match; below it a hash chooses the replica",
        Limits(low=0, high=1),
    )
    balance_abs_threshold: int = option(
        64,
        "cache_aware: a replica that has a prefix gets no more of it if its load is more than this "
        "number of requests above the lowest one, and more than --balance-rel-threshold times it",
        Limits(low=0),
    )
    balance_rel_threshold: float = option(
        1.5,
        "see --balance-abs-threshold",
        Limits(low=1, high=1e6),
    )
    max_prefix_blocks: int = option(
        1 << 18,
        "cache_aware: blocks of 256 bytes of prompts that are remembered for each replica, about "
        "150 bytes of memory each",
        Limits(low=1),
    )
    session_header: str = option(
        "X-Session-Id",
        "header (or cookie) that names the session of a request; without it `prompt_cache_key` or "
        "`user` of the body does",
        Limits(metavar="NAME"),
    )
    health_interval: float = option(
        2.0, "seconds between two probes of a replica", Limits(low=0.05, high=3600)
    )
    max_failures: int = option(
        3,
        "failures in a row after which a replica gets no requests until a probe succeeds; a closed "
        "port counts as enough",
        Limits(low=1),
    )
    max_retries: int = option(
        2,
        "further replicas that a request is sent to, if one fails before the first byte of its "
        "answer; all retries together are at most a fifth of the requests",
        Limits(low=0, high=100),
    )
    replica_timeout: float = option(
        600.0,
        "seconds without a byte from a replica, after which its answer is given up",
        Limits(low=0.1, high=86400),
    )
    requests_per_minute: int | None = option(
        None,
        "requests per minute of one client (API key, or address without one); more get a 429",
        Limits(low=1),
    )
    tokens_per_minute: int | None = option(
        None,
        "tokens per minute of one client, prompts and outputs; more get a 429",
        Limits(low=1),
    )
    upstream_api_key: str | None = option(
        None,
        "API key that the router sends to the replicas instead of the client's; without it the "
        "client's key passes through",
        Limits(metavar="KEY", is_secret=True),
    )


@dataclass(frozen=True, slots=True)
class DebugOptions:
    debug_checks: bool = option(False, "check the engine's invariants in every step (slower)")
    seed: int | None = option(
        None,
        "seed of the generator that draws the seeds of requests without one",
        Limits(low=0, aliases=("random-seed",)),
    )
    record: str | None = option(
        None, "write every scheduler event to FILE, for `aserve replay`", Limits(metavar="FILE")
    )
    log_level: str | None = option(
        None,
        "lowest level that is logged; default: info for serve, else warning",
        Limits(choices=("debug", "info", "warning", "error"), aliases=("uvicorn-log-level",)),
    )
    log_format: str = option(
        "text",
        "json writes one object per line, with the values of a message as fields",
        Limits(choices=("text", "json")),
    )
    config: str | None = option(
        None, "read options from a TOML or YAML file, named as here", Limits(metavar="FILE")
    )


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of `generate` and `chat`."""

    max_tokens: int = option(256, "tokens of an answer at most", Limits(low=1))
    temperature: float = option(0.0, "0: greedy", Limits(low=0, high=2))
    top_p: float = option(
        1.0, "sample from the most likely tokens with this total probability", Limits(0, 1)
    )
    top_k: int = option(0, "sample from that many most likely tokens; 0: from all", Limits(low=0))
    system: str | None = option(None, "system message of a chat", Limits(metavar="TEXT"))


@dataclass(frozen=True, slots=True)
class SelftestOptions:
    """Options of `selftest`, which the command line alone sets."""

    against: str = option("http://127.0.0.1:8000", "address of the server", Limits(metavar="URL"))
    model: str | None = option(None, "name of the model; default: the first that is listed")
    api_key: str | None = option(
        None, "API key of the server", Limits(metavar="KEY", is_secret=True)
    )
    only: str | None = option(None, "run the checks of one feature, or the one of this name")
    wait: float = option(
        10.0, "seconds to wait for a server that is starting", Limits(low=0, high=3600)
    )
    output: str | None = option(
        None, "write the results to this file as JSON, too", Limits(metavar="FILE")
    )


@dataclass(frozen=True, slots=True)
class Raw:
    """The options as the user gave them; a later field overrides an earlier one."""

    file: Mapping[str, object] = field(default_factory=dict)
    file_name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command_line: Mapping[str, object] = field(default_factory=dict)  # by field name


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that are known before anything is loaded: the bundled model and its name."""

    default_model: str
    default_name: str = "aserve-tiny"


@dataclass(frozen=True, slots=True)
class Resolved:
    """All options, checked one by one and together."""

    model_source: str
    model_names: tuple[str, ...]  # the first is the default
    model: ModelOptions
    kv: KvOptions
    scheduler: SchedulerOptions
    grammar: GrammarOptions
    lora: LoraOptions
    speculative: SpeculativeOptions
    diffusion: DiffusionOptions
    disaggregation: DisaggregationOptions
    machine: MachineOptions
    nodes: NodeOptions
    experts: ExpertOptions
    graphs: GraphOptions
    server: ServerOptions
    router: RouterOptions
    debug: DebugOptions
    prompt: PromptOptions
    dp_size: int = 1  # ranks of this engine that have rows of their own

    @property
    def expert_parallel_size(self) -> int:
        """The ranks among which whole experts are divided."""
        is_asked = self.experts.enable_expert_parallel
        dense = max(self.machine.tensor_parallel_size, self.dp_size) if is_asked else 1
        return max(self.experts.expert_parallel_size, dense)

    @property
    def num_ranks(self) -> int:
        """The processes among which the layers of a stage are divided."""
        return max(self.machine.tensor_parallel_size, self.expert_parallel_size, self.dp_size)

    @property
    def num_processes(self) -> int:
        """The ranks of all stages."""
        return self.num_ranks * self.machine.pipeline_parallel_size

    @property
    def model_name(self) -> str:
        return self.model_names[0]


def resolve(raw: Raw, facts: Facts) -> Resolved:
    """Merges the sources: the command line wins over the environment, that over the file, and that
    over the defaults. Raises ConfigError with the option, its value and its source.
    """
    values = _merged(raw)
    machine = _build(MachineOptions, values)
    scheduler = _overlap(values, num_stages=machine.pipeline_parallel_size)
    server, dp_size = _data_ranks(machine, _build(ServerOptions, values))
    _check_processes(server)
    experts = _build(ExpertOptions, values)
    _check_ranks(machine, experts, dp_size=dp_size)
    model = _build(ModelOptions, values)
    source = model.model or facts.default_model
    resolved = Resolved(
        model_source=source,
        model_names=_names_of(model) or (_model_name(source, facts),),
        model=model,
        kv=_build(KvOptions, values),
        scheduler=scheduler,
        grammar=_build(GrammarOptions, values),
        lora=_build(LoraOptions, values),
        speculative=_build(SpeculativeOptions, values),
        diffusion=_build(DiffusionOptions, values),
        disaggregation=_build(DisaggregationOptions, values),
        machine=machine,
        nodes=_build(NodeOptions, values),
        experts=experts,
        graphs=_build(GraphOptions, values),
        server=server,
        router=_build(RouterOptions, values),
        debug=_build(DebugOptions, values),
        prompt=_build(PromptOptions, values),
        dp_size=dp_size,
    )
    _check_data_ranks(resolved)
    if server.sleep_idle_seconds and resolved.disaggregation.disaggregation_mode == "prefill":
        raise ConfigError(
            "--sleep-idle-seconds with --disaggregation-mode prefill: the prompts of other engines "
            "neither keep it awake nor wake it; leave it out"
        )
    check_nodes(
        resolved.nodes,
        num_ranks=resolved.num_processes,
        num_servers=server.replicas,
        sleeps=server.sleep_idle_seconds is not None,
    )
    return resolved


def _data_ranks(machine: MachineOptions, server: ServerOptions) -> tuple[ServerOptions, int]:
    """Returns the number of data-parallel ranks beside the options of the one server that they
    are."""
    if not machine.enable_dp_attention:
        return server, 1
    if server.replicas == 1:
        raise ConfigError(
            "--enable-dp-attention needs --data-parallel-size of 2 or more, the number of ranks"
        )
    return dataclasses.replace(server, replicas=1), server.replicas


def _check_data_ranks(resolved: Resolved) -> None:
    """Refuses what data-parallel ranks cannot do yet."""
    if resolved.dp_size == 1:
        return
    given = {
        "--pipeline-parallel-size": resolved.machine.pipeline_parallel_size > 1,
        "--enable-two-batch-overlap": resolved.machine.enable_two_batch_overlap,
        "--enable-hisparse": resolved.kv.enable_hisparse,
        "--dllm-algorithm": resolved.diffusion.dllm_algorithm is not None,
        "--disaggregation-mode": resolved.disaggregation.disaggregation_mode != "null",
    }
    asked = [flag for flag, is_given in given.items() if is_given]
    if asked:
        raise ConfigError(
            f"{' and '.join(asked)} does not go with --enable-dp-attention; leave one out"
        )
    most_rows = resolved.scheduler.max_num_seqs
    if most_rows is not None and most_rows < resolved.dp_size:
        raise ConfigError(
            f"--max-num-seqs {most_rows} are the rows of all --data-parallel-size "
            f"{resolved.dp_size} ranks, of which each needs one"
        )


def _check_ranks(machine: MachineOptions, experts: ExpertOptions, *, dp_size: int) -> None:
    dense, whole = machine.tensor_parallel_size, experts.expert_parallel_size
    if dp_size > 1 and not {dense, whole} <= {1, dp_size}:
        raise ConfigError(
            f"--enable-dp-attention with --data-parallel-size {dp_size}: the MLPs and experts are "
            f"divided among these ranks, so --tensor-parallel-size {dense} and "
            f"--expert-parallel-size {whole} have to be left out, or to be {dp_size}"
        )
    dense = max(dense, dp_size)
    if len({1, dense, whole}) > 2:
        raise ConfigError(
            f"--tensor-parallel-size {dense} and --expert-parallel-size {whole}: experts are "
            "divided among the same ranks as the other layers, or these are not divided; give both "
            "the same size, or one of them"
        )
    if experts.enable_eplb and machine.enable_two_batch_overlap:
        raise ConfigError(
            "--enable-eplb moves experts where --enable-two-batch-overlap has rows in flight; "
            "leave one out"
        )
    is_alone = whole == 1 and (dense == 1 or not experts.enable_expert_parallel)
    if experts.enable_eplb and is_alone:
        raise ConfigError(
            "--enable-eplb moves experts between the ranks that they are divided among; give "
            "--expert-parallel-size N, or --tensor-parallel-size N with --enable-expert-parallel"
        )
    if experts.eplb_num_redundant_experts and not experts.enable_eplb:
        raise ConfigError(
            "--eplb-num-redundant-experts are copies that --enable-eplb places; give that, too"
        )
    if experts.enable_expert_parallel and dense == whole == 1:
        raise ConfigError(
            "--enable-expert-parallel divides experts among the ranks of --tensor-parallel-size; "
            "give that, or --expert-parallel-size alone"
        )


def _overlap(values: Mapping[str, object], *, num_stages: int) -> SchedulerOptions:
    """WHY: --overlap-depth 1 alone turns overlap off, so a lead that was not given follows it. A
    row of a pipeline is in one stage; how many steps it has is known where its ranks meet."""
    found = _build(SchedulerOptions, values)
    depth, lead = found.overlap_depth or 2, found.overlap_lead
    if num_stages > 1:
        depth = found.overlap_depth or num_stages
        lead = lead if "overlap_lead" in values else 1
        if lead > 1:
            raise ConfigError(
                f"--overlap-lead {lead} and --pipeline-parallel-size {num_stages}: the tokens of a "
                "step are known in the last stage alone, so the lead is 1"
            )
    if lead > depth:
        if "overlap_lead" in values:
            raise ConfigError(
                f"--overlap-lead {lead} is larger than --overlap-depth {depth}: "
                "a sequence cannot have more steps in flight than there are"
            )
        lead = depth
    is_known = found.overlap_depth is not None or num_stages == 1
    return dataclasses.replace(found, overlap_depth=depth if is_known else None, overlap_lead=lead)


def _check_processes(server: ServerOptions) -> None:
    given = {
        f"--frontends {server.frontends}": server.frontends > 1,
        f"--sleep-idle-seconds {server.sleep_idle_seconds}": server.sleep_idle_seconds is not None,
    }
    for what, is_apart in given.items():
        if is_apart and server.processes == "1":
            raise ConfigError(
                f"{what} needs an engine in a process of its own, so --processes 1 cannot be given "
                "with it"
            )
    if server.frontends > 1 and server.replicas > 1:
        raise ConfigError(
            "--frontends cannot be given with --replicas, of which each has a frontend of its own"
        )
    if server.frontends > 1 and server.uds is not None:
        raise ConfigError("--frontends shares a port; with --uds there is one frontend")


def shown_settings(resolved: Resolved) -> dict[str, object]:
    """Returns the values of a server's options for its clients: no secrets, and no paths but the
    model's.
    """
    parts = (
        *(resolved.model, resolved.kv, resolved.scheduler, resolved.grammar),
        *(resolved.speculative, resolved.diffusion, resolved.machine, resolved.experts),
        *(resolved.graphs, resolved.nodes),
        *(resolved.disaggregation, resolved.server, resolved.debug),
    )
    return {
        option.name: getattr(part, option.name)
        for part in parts
        for option in options_of(type(part))
        if not option.limits.is_secret and option.limits.metavar != "FILE"
    }


def read_raw(command_line: Mapping[str, object]) -> Raw:
    """Reads the environment and the --config file that it or the command line names."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and not name.startswith(TEST_PREFIX)
    }
    path = command_line.get("config") or environment.get(ENV_PREFIX + "CONFIG")
    if not path:
        return Raw(environment=environment, command_line=command_line)
    return Raw(
        file=_read_file(Path(str(path))),
        file_name=str(path),
        environment=environment,
        command_line=command_line,
    )


def set_environment(name: str, value: str, *, wins: bool = False) -> str:
    """Sets a variable for libraries that are imported later, and returns its value. A variable that
    is already set stays, unless this one `wins`.
    """
    if wins:
        os.environ[name] = value
    return os.environ.setdefault(name, value)


def system_variables(*names: str) -> dict[str, str]:
    """Returns those of these variables of other programs that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cache_home() -> Path:
    """Returns the folder for the user's caches, after the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


ALL_RECORDS: tuple[type, ...] = (
    ModelOptions,
    KvOptions,
    SchedulerOptions,
    GrammarOptions,
    LoraOptions,
    SpeculativeOptions,
    DiffusionOptions,
    DisaggregationOptions,
    MachineOptions,
    NodeOptions,
    ExpertOptions,
    GraphOptions,
    ServerOptions,
    RouterOptions,
    DebugOptions,
    PromptOptions,
)


def _merged(raw: Raw) -> dict[str, object]:
    """Returns the parsed values of the given options by field name."""
    options = tuple(options_of(*ALL_RECORDS))
    in_file = [option for option in options if option.name != "config"]
    file_keys = {name.replace("_", "-"): option for option in in_file for name in option.names}
    file_keys |= {alias: option for option in in_file for alias in option.limits.aliases}
    variables = {ENV_PREFIX + name.upper(): option for option in options for name in option.names}
    flags = {name: option for option in options for name in option.names}
    values: dict[str, object] = {}
    for key, value in raw.file.items():
        found = file_keys.get(key.replace("_", "-"))
        if found is None:
            hint = unknown_option(key, [option.key for option in in_file])
            raise ConfigError(f"{raw.file_name}: {hint.message}")
        _check_former(found, [name.replace("-", "_") for name in raw.file], where=raw.file_name)
        if found.name in values:
            raise ConfigError(f"{raw.file_name} sets {found.key} twice, the second time as {key}")
        values[found.name] = parse_value(found, value, where=f"{raw.file_name}: {key} =")
    for variable, text in raw.environment.items():
        found = variables.get(variable)
        if found is None:
            raise unknown_option(variable, [option.variable for option in options])
        given = [name.removeprefix(ENV_PREFIX).lower() for name in raw.environment]
        _check_former(found, given, where="the environment")
        values[found.name] = parse_value(found, text, where=f"{variable} =")
    for name, value in raw.command_line.items():
        found = flags.get(name)
        if found is None:
            raise unknown_option(name, [option.name for option in options])
        _check_former(found, raw.command_line, where="the command line")
        values[found.name] = parse_value(found, value, where=found.flag)
    return values


def _check_former(option: Option, given: Iterable[str], *, where: str) -> None:
    """Raises ConfigError when one source sets an option under both its names."""
    if len(option.names) > 1 and set(option.names) <= set(given):
        raise ConfigError(
            f"{where} sets {option.names[0]} and also {option.names[1]}, which is its former name; "
            f"give only {option.names[0]}"
        )


def _names_of(model: ModelOptions) -> tuple[str, ...]:
    """Returns the served names that the user gave, each once."""
    given = map(str.strip, (model.served_model_name or "").split(","))
    return tuple(dict.fromkeys(filter(None, given)))


def _model_name(source: str, facts: Facts) -> str:
    """Returns the hub id, or the last part of a path."""
    if source == facts.default_model:
        return facts.default_name
    if Path(source).name == "config.json":
        return Path(source).parent.name or source
    return Path(source).name if source.startswith(("/", ".", "~")) else source


def _build(record: type[T], values: Mapping[str, object]) -> T:
    names = (item.name for item in options_of(record))
    given = {name: values[name] for name in names if name in values}
    return record(**given)


def _read_file(path: Path) -> Mapping[str, object]:
    """Reads TOML, or YAML by the file's name. In YAML a list stands for texts with commas."""
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        return MappingProxyType(_parse_yaml(text) if is_yaml else tomllib.loads(text))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except ValueError as error:  # of TOML, YAML and UTF-8
        kind = "YAML" if is_yaml else "TOML"
        raise ConfigError(f"--config {path} is not valid {kind}: {error}") from None


def _parse_yaml(text: str) -> dict[str, object]:
    import yaml  # only for those who use it

    try:
        parsed = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(parsed, dict):
        raise ValueError("it has no options")
    return {
        str(key): ",".join(map(str, value)) if isinstance(value, list) else value
        for key, value in parsed.items()
    }
