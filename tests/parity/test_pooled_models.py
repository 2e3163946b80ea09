"""Encoders, embedding models and classifiers against transformers, through the whole engine: rows
of different lengths share steps, and prompts of decoders come in chunks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import ArrayF32
from tests.gpu.drive import request, serve
from tests.load_model import load_model
from tests.parity.references import BASE, VOCAB_SIZE

pytestmark = pytest.mark.slow  # each reference takes a moment to make

MAX_LEN = 72
BERT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "type_vocab_size": 2,
    "initializer_range": 0.2,
}
ROBERTA = {**BERT, "max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1}
DECODER = {**BASE, "pad_token_id": 0}
LABELS = {"num_labels": 3}
FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: 1000.0, SLIDING: 100.0}
MODERN = {
    **{name: value for name, value in BERT.items() if name != "type_vocab_size"},
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    "num_hidden_layers": 4,
    "local_attention": 13,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()
    },
}
BIASED = {f"{part}_bias": True for part in ("attention", "classifier", "mlp", "norm")}
# The class of transformers, its fields, and the pooling of a model without a head.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertModel", BERT, "cls"),
    "bert-classifier": ("BertForSequenceClassification", {**BERT, **LABELS}, ""),
    "roberta": ("RobertaModel", ROBERTA, "cls"),
    "roberta-classifier": ("RobertaForSequenceClassification", {**ROBERTA, **LABELS}, ""),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA, "cls"),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}, ""),
    "modernbert": ("ModernBertModel", MODERN, "cls"),
    "modernbert-classifier": (
        "ModernBertForSequenceClassification",
        {**MODERN, **LABELS, "classifier_pooling": "mean"},
        "",
    ),
    "modernbert-biased": (
        "ModernBertForSequenceClassification",
        {**MODERN, **BIASED, "num_labels": 1, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]},
        "",
    ),
    "llama": ("LlamaModel", DECODER, "last"),
    "llama-classifier": ("LlamaForSequenceClassification", {**DECODER, **LABELS}, ""),
    "mistral": ("MistralModel", DECODER, "last"),
    "mistral-classifier": ("MistralForSequenceClassification", {**DECODER, **LABELS}, ""),
    "qwen2": ("Qwen2Model", DECODER, "last"),
    "qwen2-score": ("Qwen2ForSequenceClassification", {**DECODER, "num_labels": 1}, ""),
    "qwen3": ("Qwen3Model", DECODER, "last"),
    "qwen3-classifier": ("Qwen3ForSequenceClassification", {**DECODER, **LABELS}, ""),
    "gemma2-score": (
        "Gemma2ForSequenceClassification",
        {**DECODER, "num_labels": 1, "query_pre_attn_scalar": 24, "sliding_window": 24},
        "",
    ),
}
POOL: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(dim=0),
    "last": lambda hidden: hidden[-1],
}
PROMPTS = [  # without padding tokens, to which transformers gives no positions
    torch.randint(2, VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(num)).tolist()
    for num in (1, 2, 17, 70)
]


@dataclass(frozen=True)
class Kept:
    directory: Path
    model: Any  # of transformers


KeptOf = Callable[[str], Kept]


@pytest.fixture(scope="module")
def kept_of(tmp_path_factory: pytest.TempPathFactory) -> KeptOf:
    made: dict[str, Kept] = {}

    def kept_of(kind: str) -> Kept:
        if kind not in made:
            made[kind] = _make(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return kept_of


def _make(kind: str, directory: Path) -> Kept:
    import transformers

    name, fields, _ = KINDS[kind]
    model_class: Any = getattr(transformers, name)
    config = model_class.config_class(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.2)
    model.save_pretrained(directory)
    return Kept(directory, model)


def embeddings(executor: TorchExecutor, prompts: list[list[int]]) -> list[ArrayF32]:
    is_causal = not executor.spec.whole_prompts
    requests = [
        msgspec.structs.replace(request(str(i), prompt, embeds=True), is_causal=is_causal)
        for i, prompt in enumerate(prompts)
    ]
    found = serve(executor, requests).embeddings
    return [found[str(i), 0][0] for i in range(len(prompts))]


def executor_of(directory: Path, **options: Any) -> TorchExecutor:
    defaults = {"max_batched_tokens": 96, "num_pages": 200, "max_rows": 5, "debug_checks": True}
    return build_executor(BuildOptions(directory, dtype="float32", **{**defaults, **options}))


@torch.inference_mode()
def expected(kept: Kept, prompt: list[int], pooling: str) -> Tensor:
    """What transformers computes: logits, or the pooled hidden states scaled to length 1."""
    output = kept.model(torch.tensor([prompt]))
    if not pooling:
        logits: Tensor = output.logits[0]
        return logits
    return torch.nn.functional.normalize(POOL[pooling](output.last_hidden_state[0]), dim=0)


def assert_equal(kept: Kept, executor: TorchExecutor, pooling: str) -> None:
    for prompt, vector in zip(PROMPTS, embeddings(executor, PROMPTS), strict=True):
        reference = expected(kept, prompt, pooling)
        torch.testing.assert_close(torch.tensor(vector), reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pooled_model_equals_transformers(kind: str, kept_of: KeptOf) -> None:
    kept, (_, _, pooling) = kept_of(kind), KINDS[kind]
    executor = executor_of(kept.directory)
    assert executor.spec.task == ("embed" if pooling else "classify")
    assert_equal(kept, executor, pooling)


def test_an_older_config_of_modernbert_means_the_same(kept_of: KeptOf, tmp_path: Path) -> None:
    """That of the published checkpoints, whose language model has a head besides."""
    kept = kept_of("modernbert")
    config = json.loads((kept.directory / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    thetas = {"global_rope_theta": THETAS[FULL], "local_rope_theta": THETAS[SLIDING]}
    write_json(tmp_path / "config.json", {**config, **thetas, "global_attn_every_n_layers": 3})
    weights = load_file(kept.directory / "model.safetensors")
    named = {f"model.{name}": values for name, values in weights.items()}
    head = {"head.norm.weight": torch.ones(48), "decoder.bias": torch.zeros(VOCAB_SIZE)}
    save_file({**named, **head}, tmp_path / "model.safetensors")
    assert_equal(kept, executor_of(tmp_path), "cls")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *itertools.product(["bert", "qwen3"], ["paged-cpu", "paged-sdpa", "torch-ref"]),
        *itertools.product(["modernbert"], ["paged-sdpa", "torch-ref"]),
    ],
)
def test_no_page_size_and_no_backend_changes_an_embedding(
    kind: str, attention: str, page_size: int, kept_of: KeptOf
) -> None:
    """Steps of 72 tokens, so that a prompt of a decoder is cut and one of an encoder is not."""
    kept, (_, _, pooling) = kept_of(kind), KINDS[kind]
    options = {"attention": attention, "page_size": page_size, "num_pages": 20 * 16 // page_size}
    assert_equal(kept, executor_of(kept.directory, max_batched_tokens=72, **options), pooling)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def module_of(kind: str, path: str = "") -> dict[str, object]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def with_modules(
    kept: Kept, directory: Path, *kinds: str, pooling: dict[str, object] | None = None
) -> Path:
    """A copy of the model with the files of sentence-transformers."""
    directory.mkdir(exist_ok=True)
    for path in kept.directory.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    modules = [module_of("Transformer"), module_of("Pooling", "1_Pooling")]
    write_json(directory / "modules.json", [*modules, *map(module_of, kinds)])
    write_json(directory / "1_Pooling" / "config.json", pooling or {})
    return directory


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize(
    ("named", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_is_that_of_the_files(
    kind: str, named: dict[str, object], mode: str, kept_of: KeptOf, tmp_path: Path
) -> None:
    kept = kept_of(kind)
    directory = with_modules(kept, tmp_path / "model", pooling=named)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 70})
    executor = executor_of(directory, max_batched_tokens=72)  # not all of them fit in one step
    assert executor.spec.whole_prompts == (kind == "bert" or mode != "last")
    assert executor.spec.max_model_len == 70
    for prompt, vector in zip(PROMPTS, embeddings(executor, PROMPTS), strict=True):
        assert abs(np.linalg.norm(vector) - 1) > 1e-2  # there is no module Normalize
        own = torch.tensor(vector / np.linalg.norm(vector))
        torch.testing.assert_close(own, expected(kept, prompt, mode), atol=1e-4, rtol=1e-4)


def test_a_language_model_with_modules_embeds_with_a_head_and_without(
    kept_of: KeptOf, tmp_path: Path
) -> None:
    """Qwen3-Embedding: the architecture generates, and the file has the bare model's names."""
    kept = kept_of("qwen3")
    pooling: dict[str, object] = {"pooling_mode_lasttoken": True}
    directory = with_modules(kept, tmp_path / "model", "Normalize", pooling=pooling)
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", {**config, "architectures": ["Qwen3ForCausalLM"]})
    assert_equal(kept, executor_of(directory), "last")
    path = directory / "model.safetensors"
    named = {f"model.{name}": values for name, values in load_file(path).items()}
    save_file({**named, "lm_head.weight": torch.zeros(VOCAB_SIZE, 48)}, path)
    assert_equal(kept, executor_of(directory), "last")


def with_dense(directory: Path, **fields: object) -> dict[str, Tensor]:
    """Adds a Dense module to the files, and returns its tensors."""
    modules = json.loads((directory / "modules.json").read_text())
    write_json(directory / "modules.json", [*modules, module_of("Dense", "2_Dense")])
    config = {"in_features": 48, "out_features": 20, "bias": True, **fields}
    write_json(directory / "2_Dense" / "config.json", config)
    drawn = torch.Generator().manual_seed(4)
    shapes = {"linear.weight": (20, 48), "linear.bias": (20,)}
    tensors = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    save_file(tensors, directory / "2_Dense" / "model.safetensors")
    return tensors


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_a_dense_module_makes_vectors_of_another_size(
    activation: str, kept_of: KeptOf, tmp_path: Path
) -> None:
    kept = kept_of("bert")
    directory = with_modules(kept, tmp_path / "model", pooling={"pooling_mode": "mean"})
    name = f"torch.nn.modules.activation.{activation}"
    tensors = with_dense(directory, activation_function=name)
    for prompt, vector in zip(PROMPTS, embeddings(executor_of(directory), PROMPTS), strict=True):
        with torch.inference_mode():
            pooled = kept.model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        own = tensors["linear.weight"] @ pooled + tensors["linear.bias"]
        own = own.tanh() if activation == "Tanh" else own
        torch.testing.assert_close(torch.tensor(vector), own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"in_features": 40}, "its in_features are 40, but it gets vectors of 48"),
        ({"bias": False}, "its tensors are .*linear.bias"),
        ({"activation_function": "torch.nn.Softmax"}, "activation_function is 'torch.nn.Softmax'"),
    ],
)
def test_a_dense_module_that_does_not_fit_is_refused(
    fields: dict[str, object], complaint: str, kept_of: KeptOf, tmp_path: Path
) -> None:
    directory = with_modules(kept_of("bert"), tmp_path / "model", pooling={"pooling_mode": "mean"})
    with_dense(directory, **fields)
    with pytest.raises(ConfigError, match=complaint):
        load_model(directory)


@pytest.mark.parametrize(
    ("kinds", "pooling", "complaint"),
    [
        (("WordWeights",), {"pooling_mode_mean_tokens": True}, "modules.json: type is"),
        (
            ("Normalize", "Dense"),
            {"pooling_mode": "mean"},
            "are not in the order Transformer, Pool",
        ),
        ((), {"pooling_mode_max_tokens": True}, "the pooling mode is max_tokens; expected one of"),
        ((), {}, "the pooling mode is none"),
        ((), {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is False"),
    ],
)
def test_modules_that_are_not_supported_are_refused(
    kinds: tuple[str, ...],
    pooling: dict[str, object],
    complaint: str,
    kept_of: KeptOf,
    tmp_path: Path,
) -> None:
    directory = with_modules(kept_of("bert"), tmp_path / "model", *kinds, pooling=pooling)
    with pytest.raises(ConfigError, match=complaint):
        load_model(directory)


def test_an_encoder_has_no_positions_beyond_those_it_learnt(kept_of: KeptOf) -> None:
    directory = kept_of("roberta").directory
    assert load_model(directory).max_model_len == MAX_LEN
    with pytest.raises(ConfigError, match=f"positions for {MAX_LEN} tokens"):
        load_model(directory, max_model_len=MAX_LEN + 1)


def test_a_pair_has_two_segments(kept_of: KeptOf) -> None:
    """Ids of the second segment are larger by the size of the vocabulary."""
    kept, prompt, num_first = kept_of("bert-classifier"), PROMPTS[2], 9
    segments = [0] * num_first + [1] * (len(prompt) - num_first)
    ids = [i + VOCAB_SIZE * segment for i, segment in zip(prompt, segments, strict=True)]
    [vector] = embeddings(executor_of(kept.directory), [ids])
    with torch.inference_mode():
        types = torch.tensor([segments])
        logits = kept.model(torch.tensor([prompt]), token_type_ids=types).logits[0]
        plain = kept.model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.tensor(vector), logits, atol=1e-4, rtol=1e-4)
    assert (logits - plain).abs().max() > 1e-2


def test_a_reward_model_scores_the_last_token(kept_of: KeptOf, tmp_path: Path) -> None:
    """Its code is in the model's directory, so the reference is written out here."""
    kept = kept_of("qwen2-score")
    directory = with_modules(kept, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", {**config, "architectures": ["Qwen2ForRewardModel"]})
    weights = load_file(kept.directory / "model.safetensors")
    del weights["score.weight"]
    drawn = torch.Generator().manual_seed(3)
    names = {"score.0": (48, 48), "score.2": (1, 48)}
    for name, shape in names.items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=drawn)
        weights[f"{name}.bias"] = torch.randn(shape[:1], generator=drawn)
    save_file(weights, directory / "model.safetensors")
    for prompt, vector in zip(PROMPTS, embeddings(executor_of(directory), PROMPTS), strict=True):
        with torch.inference_mode():
            hidden = kept.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        inner = (weights["score.0.weight"] @ hidden + weights["score.0.bias"]).relu()
        reward = weights["score.2.weight"] @ inner + weights["score.2.bias"]
        torch.testing.assert_close(torch.tensor(vector), reward, atol=1e-3, rtol=1e-4)


def test_nothing_is_drafted_for_a_model_that_generates_nothing(kept_of: KeptOf) -> None:
    speculative = SpecOptions("NGRAM", num_steps=3)
    with pytest.raises(ConfigError, match="generates nothing that could be drafted"):
        executor_of(kept_of("qwen3").directory, speculative=speculative)
