"""What the command line says reaches the engine that is built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from aserve.cli import make_parser
from aserve.config import Facts, Raw, Resolved, resolve
from aserve.engine import Engine
from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions
from aserve.gpu.spec.request import SpecOptions
from aserve.load import build_options, load, load_executor, vocabulary_of
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.progress import OnStage
from aserve.text.tokenizer import TextTokenizer
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.fakes.executor import SPEC, FakeExecutor
from tests.fakes.toy_device import expected_outputs

WORDS = (
    *("--load-format", "dummy", "--model-impl", "native", "--dtype", "float16"),
    *("--quantization", "int8", "--max-model-len", "101", "--kv-cache-dtype", "fp8"),
    *("--page-size", "8", "--num-pages", "102", "--gpu-memory-utilization", "0.5"),
    *("--no-prefix-cache", "--max-num-seqs", "103", "--max-num-batched-tokens", "104"),
    *("--max-queue", "105", "--overlap-depth", "4", "--overlap-lead", "3", "--debug-checks"),
    *("--attention-backend", "triton", "--device", "cuda", "--deterministic"),
    *("--cuda-graph-max-bs", "106", "--threads", "2"),
    *("--piecewise-cuda-graph-max-tokens", "107"),
)
BUILT = BuildOptions(
    model_dir=Path("of-no-model"),
    load_format="dummy",
    model_impl="native",
    dtype="float16",
    quantization="int8",
    max_model_len=101,
    kv_dtype="fp8",
    page_size=8,
    num_pages=102,
    memory_share=0.5,
    prefix_cache=False,
    max_rows=103,
    max_batched_tokens=104,
    max_waiting=105,
    depth=4,
    lead=3,
    debug_checks=True,
    attention="triton",
    device="cuda",
    deterministic=True,
    graph_rows=106,
    piece_tokens=107,
    threads=2,
)


def built(words: Sequence[str], model_dir: Path = Path("of-no-model")) -> BuildOptions:
    given = vars(make_parser().parse_args(["serve", *words]))
    del given["command"]
    resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))
    return build_options(resolved, model_dir)


def test_every_option_of_an_engine_gets_there() -> None:
    assert built(WORDS) == BUILT


def test_eager_captures_nothing() -> None:
    for word in ("--eager", "--enforce-eager"):
        assert built([word, "--cuda-graph-max-bs", "48"]).graph_rows == 0


def test_the_bundled_model_comes_with_drafters_and_another_model_does_not() -> None:
    words = ["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "2"]
    words += ["--speculative-verification", "block"]
    for model_dir, drafters in ((MODEL_DIR, DRAFTERS_DIR), (Path("of-no-model"), None)):
        options = built(words, model_dir).speculative
        assert options == SpecOptions(
            "STANDALONE", bundled_drafters=drafters, topk=2, verification="block"
        )


def test_a_map_of_tokens_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "freq.pt"
    words = ["--speculative-algorithm", "EAGLE", "--speculative-token-map", str(path)]
    with pytest.raises(ConfigError, match="does not exist"):
        built(words, MODEL_DIR)
    path.touch()
    options = built(words, MODEL_DIR).speculative
    assert options is not None
    assert options.token_map == path


async def test_a_device_may_have_an_executor_that_is_not_torchs() -> None:
    loaded: list[Path] = []

    def load_stand_in(_resolved: Resolved, model_dir: Path, _on_stage: OnStage) -> FakeExecutor:
        loaded.append(model_dir)
        return FakeExecutor()

    loader = partial(load, executors={"stand-in": load_stand_in})
    prompt = [5, 6, 7]
    async with Engine(loader=loader, model=str(MODEL_DIR), device="stand-in") as engine:
        answer = await engine.answer(prompt, seed=3, max_tokens=6, ignore_eos=True)
    sampling = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    request = AdmitRequest("a", pack_i32(prompt), sampling)
    assert list(answer.choices[0].token_ids) == expected_outputs(request, 0, SPEC)
    assert loaded == [MODEL_DIR]


def test_a_device_that_no_registry_names_is_refused_with_the_known_ones() -> None:
    resolved = resolve(Raw(command_line={"device": "tpu"}), Facts(default_model=str(MODEL_DIR)))
    with pytest.raises(ConfigError, match="'tpu' is not supported; supported: auto, cpu, cuda"):
        load_executor(resolved, MODEL_DIR)


def test_a_grammar_may_use_the_special_tokens_of_calls_but_no_others() -> None:
    texts = ["a", "<pad>", "[TOOL_CALLS]", "<|call|>", "</s>"]
    tokenizer = SimpleNamespace(
        vocab_size=5,
        special_ids={1, 2, 3, 4},
        eos_ids=(3, 4),  # the end of a call in harmony ends an answer, too
        token_bytes=lambda token_id: texts[token_id].encode(),
    )
    vocabulary = vocabulary_of(cast(TextTokenizer, tokenizer), 8)
    assert vocabulary.tokens == (b"a", b"", b"[TOOL_CALLS]", b"", b"")
