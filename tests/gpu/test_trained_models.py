"""The small trained models of tests/models in the whole engine: however it runs them, each request
gets the tokens that transformers finds most likely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from aserve.engine import Engine
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.hisparse.config import HiSparseConfig
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.engine_device import engine_device
from tests.gpu.drive import Served, request, serve
from tools.train_models.folder import MODELS_DIR, complete_folder

pytestmark = pytest.mark.slow

DRAFTERS = {"moe": "NGRAM", "mla": "NEXTN", "dsa": "NGRAM"}
STORY = "One day Sam and Mia found a red boat near the lake. fox=3729\n"
PROMPTS = ["Once upon a time", STORY * 2, "What is 27 plus 15?", STORY * 2 + "They"]
PLAIN: dict[str, Any] = {"depth": 1, "lead": 1, "prefix_cache": False, "max_rows": 1}
OVERLAP: dict[str, Any] = {"depth": 2, "lead": 2}
# Rows of up to 68 tokens in 100 slots.
RETRACTION: dict[str, Any] = {**OVERLAP, "page_size": 4, "num_pages": 26}
CHUNKS: dict[str, Any] = {**OVERLAP, "page_size": 1, "num_pages": 400, "max_batched_tokens": 24}
KINDS: dict[str, dict[str, Any]] = {
    "overlap": OVERLAP,
    "chunks, mixed steps": CHUNKS,
    "retraction": RETRACTION,
    "two batches": {**OVERLAP, "two_batches": True},
}


class Trained(NamedTuple):
    name: str
    folder: Path
    plain: Served  # of the plain engine

    def run(
        self, asked: list[AdmitRequest] | None = None, *, drafts: bool = False, **options: Any
    ) -> Served:
        settings: dict[str, Any] = {"dtype": "float64", "num_pages": 60, "max_rows": 4, **options}
        if drafts:
            settings["speculative"] = SpecOptions(DRAFTERS[self.name])
        build = BuildOptions(self.folder, debug_checks=True, device=engine_device(), **settings)
        return serve(build_executor(build), asked or asks(), chaos=3)


def asks() -> list[AdmitRequest]:
    """Greedy ones, and the last prompt at a temperature."""
    encode = load_tokenizer(MODEL_DIR).encode
    prompts = [[1, *encode(text, with_special=False)] for text in PROMPTS]
    warm = request("warm", prompts[-1], max_tokens=14, temperature=0.8, seed=4)
    return [*(request(f"r{n}", ids, max_tokens=18) for n, ids in enumerate(prompts)), warm]


@pytest.fixture(scope="module", params=DRAFTERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    made = Trained(request.param, complete_folder(MODELS_DIR / request.param, folder), Served())
    return made._replace(plain=made.run(**PLAIN))


def test_the_plain_engine_gives_the_greedy_tokens_of_transformers(trained: Trained) -> None:
    """Each token is the most likely one behind all tokens before it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        trained.folder, dtype=torch.float64, experts_implementation="eager"
    )
    for asked in asks()[:-1]:
        prompt = array_i32(asked.prompt_ids).tolist()
        tokens = trained.plain.outputs[asked.request_id, 0]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        assert tokens == logits.argmax(-1).tolist()
        assert len(set(tokens)) >= 6
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3  # rounding changes no token


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_plain_engine(trained: Trained, kind: str, *, drafts: bool) -> None:
    served = trained.run(drafts=drafts, **KINDS[kind])
    assert served.outputs == trained.plain.outputs
    assert (served.num_retracted > 0) is (kind == "retraction")
    assert served.num_cached > 60  # prompts share their first sentences
    lens = [set(array_i32(batch.query_lens).tolist()) for batch in served.batches]
    assert any(min(each) < 6 < max(each) for each in lens)  # decodes beside prompts
    has_drafts = any(batch.verify is not None for batch in served.batches)
    assert has_drafts is drafts
    num_windows = sum(len(batch.rows) // 4 for batch in served.batches)
    num_tokens = sum(len(tokens) for tokens in served.outputs.values())
    if (trained.name, kind, drafts) == ("mla", "overlap", True):
        assert num_tokens > 1.6 * num_windows  # the NextN layer is trained to be accepted


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", ["overlap", "chunks, mixed steps", "retraction"])
def test_kv_in_the_hosts_memory_changes_no_token(
    trained: Trained, kind: str, *, drafts: bool
) -> None:
    """HiSparse with 40 hot rows for prompts of up to 50 tokens, of which a query sees 32."""
    if trained.name != "dsa":
        return
    hisparse = HiSparseConfig(device_buffer_size=40)
    served = trained.run(drafts=drafts, hisparse=hisparse, **KINDS[kind])
    assert served.outputs == trained.plain.outputs
    assert (served.num_retracted > 0) is (kind == "retraction")
    assert served.num_cached > 60


def test_draft_trees_attend_to_latents(trained: Trained) -> None:
    """NextN with two branches drafts trees."""
    if trained.name != "mla":
        return
    tree = SpecOptions("NEXTN", topk=2, num_steps=2, num_draft_tokens=4)
    served = trained.run(**OVERLAP, speculative=tree)
    assert served.outputs == trained.plain.outputs
    plans = [batch.verify for batch in served.batches if batch.verify is not None]
    assert any(plan.tree is not None for plan in plans)


def test_compiled_kernels_give_the_same_tokens(trained: Trained) -> None:
    """In float32 the CPU attends and multiplies grouped experts by kernels of its own."""
    greedy = asks()[:-1]
    served = trained.run(greedy, dtype="float32", **OVERLAP)
    assert served.outputs == {
        key: tokens for key, tokens in trained.plain.outputs.items() if key[0] != "warm"
    }


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pages_that_come_up_from_host_memory_change_no_token(trained: Trained, policy: str) -> None:
    """The second time a prompt comes, others have taken its pages. Rows are longer than the number
    of keys that a query of the sparse model sees."""
    story = load_tokenizer(MODEL_DIR).encode(STORY * 4, with_special=False)
    prompts = [[1, *story[start : start + 60]] for start in (0, 9, 17)]
    asked = [request(f"r{n}", ids, max_tokens=12) for n, ids in enumerate(prompts)]
    expected = trained.run(asked, **PLAIN | {"num_pages": 90}).outputs
    options: dict[str, Any] = {"model": str(trained.folder), "dtype": "float64", "page_size": 1}
    options |= {"num_pages": 90, "hicache_size": 0.01, "hicache_write_policy": policy}
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with Engine(**options) as engine:
        for _ in range(2):
            for number, prompt in enumerate(prompts):
                [made] = engine.generate_sync([prompt], **fields)
                assert list(made.choices[0].token_ids) == expected[f"r{number}", 0]
        registry = engine._frontend.metrics.registry
        labels = {"tier": "host", "direction": "up"}
        assert registry.get_sample_value("aserve_kv_tier_bytes_total", labels)
