"""N-gram embeddings: the ids before each token are right however the engine runs the model, and
the trained model of tests/models gives the tokens of the network that it was trained as.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.models.config.model import parse_config, read_fields
from aserve.gpu.models.ngram_embedding import NgramModel
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.spec.checkpoint import decoder_of
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.weights.inventory import Inventory
from aserve.messages.base import array_i32
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import Served, serve
from tests.gpu.test_trained_models import KINDS, PLAIN, asks
from tests.load_model import load_model
from tests.parity.dense_attend import given_ids, logits_of
from tools.train_models.folder import MODELS_DIR, complete_folder, load_member
from tools.train_models.language import DOCUMENTS
from tools.train_models.ngram_emb import NgramEmb, NgramLlama, ngram_rows
from tools.train_tiny.evaluate import held_out_loss
from tools.train_tiny.tokenizer import EOS, load_tokenizer

pytestmark = pytest.mark.slow

NGRAMS = SpecOptions("NGRAM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_folder(MODELS_DIR / "ngram_emb", tmp_path_factory.mktemp("ngram") / "model")


@pytest.fixture(scope="module")
def network(folder: Path) -> NgramLlama:
    network = load_member(NgramEmb(), folder)
    assert isinstance(network, NgramLlama)
    return network.double()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Served:
    return run(folder, **PLAIN)


def run(folder: Path, **options: Any) -> Served:
    settings: dict[str, Any] = {"dtype": "float64", "num_pages": 60, "max_rows": 4, **options}
    executor = build_executor(BuildOptions(folder, debug_checks=True, **settings))
    return serve(executor, asks(), chaos=3)


def test_no_ngram_reaches_over_an_end_or_the_beginning(folder: Path, network: NgramLlama) -> None:
    """The rows of all tables, and the logits, with end-of-sequence ids at every distance."""
    model = load_model(folder, dtype="float64")
    assert isinstance(model, NgramModel)
    ids = torch.randint(3, 2048, (24,), generator=torch.Generator().manual_seed(2))
    ids[[4, 8, 9, 13, 14, 15]] = EOS
    rows = model.embedding.rows(given_ids(model, ids))
    assert torch.equal(rows, ngram_rows(ids[None], 2048)[0])
    with torch.inference_mode():
        expected = network(ids[None])[0]
    logits = logits_of(model, ids, chunks=[1, 7, 1, 1, 14])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


def test_the_plain_engine_gives_the_greedy_tokens_of_the_network(
    plain: Served, network: NgramLlama
) -> None:
    for asked in asks()[:-1]:
        prompt = array_i32(asked.prompt_ids).tolist()
        tokens = plain.outputs[asked.request_id, 0]
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        assert tokens == logits.argmax(-1).tolist()
        assert len(set(tokens)) >= 6
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3  # rounding changes no token


@pytest.mark.parametrize("drafts", [None, NGRAMS])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two batches"])
def test_b30_tokens_are_those_of_the_plain_engine(
    folder: Path, plain: Served, kind: str, drafts: SpecOptions | None
) -> None:
    served = run(folder, speculative=drafts, **KINDS[kind])
    assert served.outputs == plain.outputs
    assert (served.num_retracted > 0) is (kind == "retraction")
    assert served.num_cached > 60
    assert any(batch.verify is not None for batch in served.batches) is (drafts is not None)


def test_a_model_with_ngrams_cannot_draft(folder: Path) -> None:
    with pytest.raises(ConfigError, match="n-gram embeddings cannot draft"):
        run(folder, speculative=SpecOptions("STANDALONE", draft_model_dir=folder))


LITE = {
    "architectures": ["LongcatFlashNgramForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "eos_token_id": 2,
    "emb_neighbor_num": 4,
    "emb_split_num": 4,
    "ngram_vocab_size_ratio": 78,
}


def test_longcat_flash_lite_has_the_published_names_and_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    fields = read_fields(tmp_path)
    family = FAMILIES["LongcatFlashNgramForCausalLM"]
    inventory = Inventory(torch.float32)
    family.build(parse_config(fields, defaults=family.defaults), inventory, max_model_len=1)
    expected = {
        "model.embed_tokens.weight": (131, 24),
        "model.ngram_embeddings.embedders.11.weight": (78 * 131 + 23, 2),
        "model.ngram_embeddings.post_projs.11.weight": (24, 2),
        "model.layers.1.self_attn.1.kv_a_layernorm.weight": (8,),
        "model.layers.1.input_layernorm.0.weight": (24,),
        "model.layers.1.mlps.0.up_proj.weight": (40, 24),
        "model.layers.1.mlp.router.classifier.weight": (6, 24),
        "model.layers.1.mlp.router.e_score_correction_bias": (6,),
        "model.layers.1.mlp.experts.3.down_proj.weight": (24, 16),
    }
    assert {name: inventory.shapes.get(name) for name in expected} == expected
    assert not any("experts.4" in name or "layers.2" in name for name in inventory.shapes)
    model = load_model(tmp_path, load_format="dummy")
    decoder = decoder_of(model)
    assert decoder is not None
    assert decoder.embeddings.shape == (131, 24)  # which drafters share
    ids = torch.randint(0, 131, (12,), generator=torch.Generator().manual_seed(2))
    whole = logits_of(model, ids)
    torch.testing.assert_close(logits_of(model, ids, chunks=[5, 1, 6]), whole)


def test_the_loss_is_that_of_the_card(folder: Path) -> None:
    model = load_model(folder)

    def every_logits(ids: Tensor) -> Tensor:
        return torch.stack([logits_of(model, row) for row in ids])

    card = (MODELS_DIR / "ngram_emb" / "README.md").read_text()
    (line,) = (line for line in card.splitlines() if line.startswith("| nats per token, story ("))
    tokenizer = load_tokenizer(MODEL_DIR)
    loss = held_out_loss(every_logits, tokenizer, kind="story", num_documents=DOCUMENTS)
    assert f" {loss:.3f} |" in line
