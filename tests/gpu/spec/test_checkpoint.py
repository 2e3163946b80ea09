"""Checkpoints of drafters: names, shared tensors, and drafters that do not fit the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.load import make_loader
from aserve.gpu.spec.checkpoint import (
    DraftWeights,
    check_layer_ids,
    check_target_hidden,
    check_vocabulary,
    check_windows,
    decoder_name,
    draft_windows,
    load_draft_model,
    read_draft_config,
    read_integers,
    target_embeddings,
)
from aserve.gpu.spec.request import DraftRequest, SpecOptions
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.spec.draft_files import CONFIG, write_draft

PLAN = LoadPlan(torch.float64)
SHAPES = {"fc.weight": (128, 256), "layers.0.mlp.up_proj.weight": (96, 128), "norm.weight": (128,)}


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return make_loader(MODEL_DIR)[0].load(PLAN)


def read(weights: DraftWeights) -> dict[str, torch.Tensor]:
    shapes = {decoder_name(name): shape for name, shape in SHAPES.items()}
    return {name: weights.source.tensor(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("rename", [str, lambda name: f"model.{name}"], ids=["bare", "prefixed"])
def test_names_are_known_with_and_without_the_prefix(
    tmp_path: Path, rename: Callable[[str], str]
) -> None:
    write_draft(tmp_path, SHAPES, rename=rename)
    loaded = load_draft_model(tmp_path, PLAN, read, rename=decoder_name)
    plain = load_draft_model(write_draft(tmp_path, SHAPES), PLAN, read, rename=decoder_name)
    assert {*loaded} == {"fc.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)


def test_a_tensor_that_the_drafter_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    write_draft(tmp_path, {**SHAPES, "layers.0.self_attn.q_norm.weight": (32,)})
    with pytest.raises(ConfigError, match=r"unexpected: model.layers.0.self_attn.q_norm.weight"):
        load_draft_model(tmp_path, PLAN, read, rename=decoder_name)


def test_integer_tensors_are_read_apart_and_keep_their_values(tmp_path: Path) -> None:
    offsets = torch.tensor([0, 1, 2**40])
    write_draft(tmp_path, SHAPES, integers={"d2t": offsets, "t2d": torch.ones(3, dtype=torch.bool)})
    device = torch.device("cpu")
    read_offsets = read_integers(tmp_path, "d2t", device)
    assert read_offsets is not None
    assert torch.equal(read_offsets, offsets)
    assert read_integers(tmp_path, "hot", device) is None
    with pytest.raises(ConfigError, match="t2d is BOOL"):
        read_integers(tmp_path, "t2d", device)


def test_a_drafter_that_does_not_fit_is_refused(tmp_path: Path, target: CausalModel) -> None:
    config = read_draft_config(write_draft(tmp_path, {}, {**CONFIG, "hidden_size": 64}))
    fields = config.fields
    for call, message in (
        (lambda: target_embeddings(target, config), "hidden_size 64 differs from the model's, 128"),
        (lambda: target_embeddings(HashModel(), config), "without native code"),
        (lambda: check_vocabulary(tmp_path, 2047, target), "2047 tokens, and the model has 2048"),
        (lambda: check_target_hidden(fields, "hidden_size", 64, target), "hidden_size is 64, but"),
        (lambda: check_layer_ids(fields, (1, 6), target), r"layers \[1, 6\], but .* 0 to 5"),
        (lambda: check_windows(tmp_path, HashModel(window=8).layers, target), r"of \[8\] tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    check_layer_ids(fields, (0, 5), target)
    assert isinstance(target, Decoder)
    assert target_embeddings(target, read_draft_config(MODEL_DIR)) is target.embeddings


SLIDES = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8}, (None,)),  # as in Llama, to which it means nothing
        (SLIDES, (8,)),
        ({**SLIDES, "max_window_layers": 28}, (None,)),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, (8,)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 36}, (None,)),  # the target's
    ],
)
def test_windows_are_read_from_the_drafters_own_config(
    tmp_path: Path, fields: dict[str, object], windows: tuple[int | None]
) -> None:
    config = read_draft_config(write_draft(tmp_path, {}, {**CONFIG, **fields}))
    assert draft_windows(config.fields) == windows


def test_layers_may_be_described_in_an_object_of_their_own(tmp_path: Path) -> None:
    nested = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": CONFIG}
    assert read_draft_config(write_draft(tmp_path, {}, nested)).hidden_size == 128


def test_the_bundled_drafter_is_used_unless_another_one_is_named(
    tmp_path: Path, target: CausalModel
) -> None:
    (tmp_path / "here").mkdir()

    def dir_of(options: SpecOptions, bundled: str) -> Path:
        return DraftRequest(options, target, PLAN).model_dir(bundled=bundled)

    own = SpecOptions("STANDALONE", bundled_drafters=tmp_path)
    named = SpecOptions("STANDALONE", draft_model_dir=Path("own"), bundled_drafters=tmp_path)
    assert dir_of(own, "here") == tmp_path / "here"
    assert dir_of(named, "here") == Path("own")
    for options, bundled in ((SpecOptions("STANDALONE"), "here"), (own, "not-there")):
        with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
            dir_of(options, bundled)
