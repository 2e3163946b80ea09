"""Models that read pictures equal transformers without pictures, too, by older and newer names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aserve.errors import ConfigError
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of
from tests.parity.references import (
    BASE,
    GEMMA3,
    MAX_MODEL_LEN,
    MINISTRAL3,
    PROMPT_LEN,
    VOCAB_SIZE,
)

pytestmark = pytest.mark.slow  # each reference takes a moment to make

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (GEMMA3, {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}),
    "Mistral3": ({"sliding_window": None}, {"model_type": "pixtral", "head_dim": 16, **VISION}),
}


def save(kind: str, directory: Path, **fields: Any) -> Any:
    """`fields` are others of the text model."""
    text, vision = KINDS[kind]
    model_class: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    config_class = model_class.config_class
    is_tied = kind == "Gemma3"
    texts = {**BASE, **text, **fields}
    more = {"mm_tokens_per_image": 4} if kind == "Gemma3" else {}
    config = config_class(
        text_config=texts, vision_config=vision, tie_word_embeddings=is_tied, **more
    )
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model.save_pretrained(directory)
    return model


def newer_name(name: str) -> str:
    """The name in checkpoints that newer versions of transformers have written."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    is_head = name.startswith("language_model.")
    return name.removeprefix("language_model.") if is_head else f"model.{name}"


@pytest.mark.parametrize("has_newer_names", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_model_that_reads_pictures_equals_transformers(
    kind: str, has_newer_names: bool, tmp_path: Path
) -> None:
    reference = save(kind, tmp_path)
    path = tmp_path / "model.safetensors"
    if has_newer_names:
        save_file({newer_name(name): tensor for name, tensor in load_file(path).items()}, path)
    assert_alike(tmp_path, reference)


def test_ministral_3_is_the_text_of_mistral_3(tmp_path: Path) -> None:
    assert_alike(tmp_path, save("Mistral3", tmp_path, model_type="ministral3", **MINISTRAL3))


def assert_alike(directory: Path, reference: Any) -> None:
    ids = torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = reference(ids.unsqueeze(0)).logits[0]
    ours = load_model(directory, dtype="float32", max_model_len=MAX_MODEL_LEN)
    torch.testing.assert_close(logits_of(ours, ids), expected, atol=1e-4, rtol=0.0)


def test_a_text_model_of_another_type_is_refused(tmp_path: Path) -> None:
    save("Mistral3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = "mistral4"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model_type .*mistral4.*mistral or ministral3"):
        load_model(tmp_path, dtype="float32", max_model_len=MAX_MODEL_LEN)
