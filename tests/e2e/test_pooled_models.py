"""Whole servers of models that generate nothing: an embedding model, a classifier, and a
cross-encoder behind two frontends. Their numbers are those of transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from torch import Tensor

from tests.e2e.served import served
from tests.e2e.server_process import ServerProcess
from tests.parity.real_model import options
from tests.text.vocabularies import bert_backend

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "initializer_range": 0.3,
}
LABELS = {"id2label": {0: "bad", 1: "fair", 2: "good"}}
PROMPTS = {"prompts": {"query": "q ", "none": ""}, "default_prompt_name": "none"}
QUERY, DOCUMENTS = "a b c", ["d e", "a b c d", "x y z x y z"]
Post = Callable[..., Any]


def save(name: str, folder: Path, **fields: Any) -> Any:
    """Writes the whole directory of a model, and returns the model of transformers."""
    import transformers

    model_class: Any = getattr(transformers, name)
    config = transformers.BertConfig(**FIELDS, **fields)
    torch.manual_seed(5)
    model = model_class(config).eval()
    model.save_pretrained(folder)
    bert_backend().save(str(folder / "tokenizer.json"))
    return model


def logits(model: Any, first: str, second: str | None = None) -> Tensor:
    encoded = bert_backend().encode(first, second)
    ids, types = torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])
    with torch.inference_mode():
        output: Tensor = model(ids, token_type_ids=types).logits[0]
    return output


async def post(client: ClientSession, path: str, **body: Any) -> Any:
    async with client.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def refusal(client: ClientSession, path: str, **body: Any) -> str:
    async with client.post(path, json=body) as answer:
        assert answer.status == 400, await answer.text()
        error = (await answer.json())["error"]
        return str(error["code"])


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedder")
    model = save("BertModel", folder)
    modules = [{"path": "1_Pooling" * (kind == "Pooling"), "type": f"st.{kind}"} for kind in KINDS]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    return folder, model


KINDS = ("Transformer", "Pooling", "Normalize")


@pytest.fixture
async def client(embedder: tuple[Path, Any]) -> AsyncIterator[ClientSession]:
    async with served(options(model=str(embedder[0]), dtype="float32", port=0)) as session:
        yield session


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("classifier")
    return folder, save("BertForSequenceClassification", folder, **LABELS)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    folder = tmp_path_factory.mktemp("cross-encoder")
    model = save("BertForSequenceClassification", folder, num_labels=1)
    with ServerProcess(str(folder), "--dtype", "float32", "--frontends", "2") as process:
        assert process.address, process.text
        yield process.address, model


async def test_many_texts_are_embedded_as_transformers_does(
    client: ClientSession, embedder: tuple[Path, Any]
) -> None:
    """Texts of every length in one call, by each spelling of the same input."""
    letters = " ".join("abcdefghijklmnopqrst")
    texts = [letters[: 2 * i + 1] for i in range(20)] * 3
    ids = [bert_backend().encode(text).ids for text in texts]
    answers = [await post(client, "/v1/embeddings", input=given) for given in (texts, ids)]
    short = await post(
        client, "/v1/embeddings", input=texts, encoding_format="base64", dimensions=8
    )
    for index, own in enumerate(ids):
        with torch.inference_mode():
            hidden = embedder[1](torch.tensor([own])).last_hidden_state[0].mean(dim=0)
        expected = (hidden / hidden.norm()).numpy()
        for answer in answers:
            assert answer["data"][index]["embedding"] == pytest.approx(expected, abs=1e-5)
        first = np.frombuffer(base64.b64decode(short["data"][index]["embedding"]), "<f4")
        assert first == pytest.approx(expected[:8] / np.linalg.norm(expected[:8]), abs=1e-5)
    assert answers[0]["usage"] == answers[1]["usage"]


async def test_a_prompt_goes_before_each_text(client: ClientSession) -> None:
    named, plain = [
        await post(client, "/v1/embeddings", input=given, **more)
        for given, more in ((["a", "b"], {"prompt_name": "query"}), (["q a", "q b"], {}))
    ]
    assert named["data"] == plain["data"]
    assert await refusal(client, "/v1/embeddings", input="a", prompt_name="x") == "invalid_value"


async def test_a_truncated_text_keeps_its_start_and_its_special_tokens(
    client: ClientSession,
) -> None:
    cut, plain = [
        await post(client, "/v1/embeddings", input=text, truncate_prompt_tokens=5)
        for text in ("a b c d e f", "a b c")
    ]
    assert cut == plain
    pooled = await post(client, "/pooling", input="a b c")
    assert pooled["data"][0]["data"] == plain["data"][0]["embedding"]


async def test_an_embedding_model_says_that_it_does_nothing_else(client: ClientSession) -> None:
    chat = [{"role": "user", "content": "a"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/generate": {"text": "a"},
    }
    for path, body in bodies.items():
        assert await refusal(client, path, **body) == "model_does_not_generate"
        streamed = await refusal(client, path, **body, stream=True)
        assert streamed == "model_does_not_generate"
    assert await refusal(client, "/classify", input="a") == "model_does_not_classify"
    too_long = await refusal(client, "/v1/embeddings", input="a " * 30)
    assert too_long == "context_length_exceeded"


async def test_a_prompt_longer_than_a_step_is_refused_with_the_option(
    embedder: tuple[Path, Any],
) -> None:
    """A text of an encoder is never cut into chunks."""
    resolved = options(model=str(embedder[0]), port=0, max_num_batched_tokens=8)
    async with served(resolved) as client:
        assert await post(client, "/v1/embeddings", input="a b c d e f")
        async with client.post("/v1/embeddings", json={"input": "a b c d e f g"}) as answer:
            message = (await answer.json())["error"]["message"]
    assert answer.status == 400
    assert "9 tokens are more than the 8 of a step" in message
    assert "--max-num-batched-tokens" in message


async def test_a_classifier_names_the_label_and_its_probabilities(
    classifier: tuple[Path, Any],
) -> None:
    folder, model = classifier
    async with served(options(model=str(folder), dtype="float32", port=0)) as client:
        answer = await post(client, "/v1/classify", input=DOCUMENTS)
        raw = await post(client, "/pooling", input=DOCUMENTS, use_activation=False)
        assert await refusal(client, "/v1/embeddings", input="a") == "model_does_not_embed"
        assert await refusal(client, "/score", text_1="a", text_2="b") == "invalid_value"
    for text, entry, scores in zip(DOCUMENTS, answer["data"], raw["data"], strict=True):
        expected = logits(model, text)
        assert scores["data"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert entry["probs"] == pytest.approx(expected.softmax(0).tolist(), abs=1e-4)
        assert entry["label"] == ("bad", "fair", "good")[int(expected.argmax())]
        assert entry["num_classes"] == 3


async def test_a_cross_encoder_scores_and_ranks_pairs(cross_encoder: tuple[str, Any]) -> None:
    """Each request has a connection of its own, so that any of the frontends gets it."""
    address, model = cross_encoder
    expected = [float(logits(model, QUERY, text).sigmoid()) for text in DOCUMENTS]
    order = np.argsort(expected)[::-1].tolist()
    assert max(expected) - min(expected) > 1e-3
    for _ in range(8):
        async with ClientSession(address) as client:
            scored = await post(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
            ranked = await post(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
            cut = await post(
                client, "/score", text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=7
            )
            too_long = await refusal(client, "/score", text_1="a " * 20, text_2="b " * 20)
        assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=1e-4)
        assert [each["index"] for each in ranked["results"]] == order
        assert cut["usage"]["prompt_tokens"] == 7 * len(DOCUMENTS)
        assert too_long == "context_length_exceeded"
