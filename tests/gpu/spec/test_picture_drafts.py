"""Drafters of the bundled model beside pictures: the model stands behind the vision transformer of
Mistral Small 3, whose pictures leave rotary positions as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.picture import Picture
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import Served, request, serve
from tests.parity.picture_models import random_picture

PROMPTS = json.loads((DRAFTERS_DIR / "expected_acceptance.json").read_bytes())["prompts"]
IMAGE, BREAK = 20, 21
NUM_TOKENS = 24
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "DFLASH": {},
    "EAGLE": {},
    "EAGLE with a static tree": {"token_tree": "static"},
    "EAGLE3 with a dynamic tree": {"topk": 2, "num_steps": 4, "num_draft_tokens": 8},
    "FROZEN_KV_MTP": {},
    "NEXTN": {},
    "NGRAM": {},
    "STANDALONE": {},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as the text model of Mistral Small 3, with a random vision transformer."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    directory = tmp_path_factory.mktemp("mistral3")
    text = json.loads((MODEL_DIR / "config.json").read_bytes())
    text |= {"model_type": "mistral", "sliding_window": None}
    torch.manual_seed(2)
    config: Any = Mistral3Config(text_config=text, vision_config=VISION, image_token_index=IMAGE)
    model = Mistral3ForConditionalGeneration(config)
    for weight in model.model.multi_modal_projector.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    own = load_file(MODEL_DIR / "model.safetensors")
    tensors = load_file(file) | {
        f"language_model.{name}": tensor.float() for name, tensor in own.items()
    }
    save_file(tensors, file)
    return directory


def asked(name: str, before: list[int], picture: Picture, after: list[int]) -> AdmitRequest:
    placed = msgspec.structs.replace(picture, start=len(before), num_breaks=1)
    ids = [*before, *([IMAGE] * picture.columns + [BREAK]) * picture.rows, *after]
    made = request(name, ids, max_tokens=NUM_TOKENS)
    return msgspec.structs.replace(made, pictures=(placed,))


ASKED = [
    asked("first", PROMPTS[0][:1], random_picture(2, 3), PROMPTS[0][1:]),
    asked("last", PROMPTS[1], random_picture(3, 2), []),
    request("text", PROMPTS[2], max_tokens=NUM_TOKENS),
]


def run(model_dir: Path, drafter: str | None, **options: Any) -> Served:
    speculative = None
    if drafter is not None:
        algorithm = drafter.split()[0]
        speculative = SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR, **DRAFTERS[drafter])
    build = BuildOptions(
        model_dir, dtype="float64", debug_checks=True, speculative=speculative, **options
    )
    return serve(build_executor(build), ASKED, chaos=1)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Served:
    return run(model_dir, None, depth=1, lead=1, max_rows=1, prefix_cache=False)


@pytest.mark.parametrize("max_batched_tokens", [11, 512])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_tokens_are_those_of_the_plain_engine(
    drafter: str, max_batched_tokens: int, model_dir: Path, plain: Served
) -> None:
    served = run(model_dir, drafter, max_rows=4, max_batched_tokens=max_batched_tokens)
    assert served.outputs == plain.outputs
    num_windows = sum(len(array_i32(batch.sample_rows)) for batch in served.batches)
    assert num_windows < NUM_TOKENS * len(ASKED), "some drafts are accepted"


def test_pictures_matter_to_the_tokens(model_dir: Path, plain: Served) -> None:
    other = asked("last", PROMPTS[1], random_picture(3, 2, seed=5), [])
    build = BuildOptions(model_dir, dtype="float64", max_rows=1)
    served = serve(build_executor(build), [other])
    assert served.outputs["last", 0] != plain.outputs["last", 0]
