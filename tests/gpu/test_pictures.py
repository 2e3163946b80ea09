"""Pictures in the whole engine, without HTTP: the tokens of transformers, however a prompt is cut,
batched, cached and retracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.device.cpu.fused_decoder import CompiledForward
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.vision_language import VisionLanguageModel
from aserve.gpu.spec.prediction import Predicted
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.weights.source import Target
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import DecodeCaps
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import DraftTree
from aserve.picture import Picture
from aserve_kernels.suffix_match import TORCH_SUFFIX_MATCH
from tests.fakes.graph_device import GraphDevice
from tests.gpu.drive import Served, captured, make_executor, request, serve
from tests.load_model import load_model
from tests.parity.picture_models import (
    IMAGE,
    KINDS,
    MAX_MODEL_LEN,
    SQUARE,
    PicturePrompt,
    random_picture,
    save_picture_model,
)

NUM_TOKENS = 12
PENALTY = 100.0  # of a placeholder in the output, which transformers takes for a picture
WIDE, HIGH, OTHER = random_picture(2, 5), random_picture(4, 3), random_picture(2, 5, seed=1)
PARTS: dict[str, tuple[int | Picture, ...]] = {
    "two": (5, WIDE, 4, HIGH, 9),
    "text": (23,),
    "one": (5, OTHER, 4),
    "last": (9, HIGH),
}


def prompts_of(kind: str) -> dict[str, PicturePrompt]:
    return {name: PicturePrompt.of(*parts, kind=kind) for name, parts in PARTS.items()}


PROMPTS = prompts_of("Qwen2VL")


class Models(dict[str, tuple[CausalModel, dict[str, list[int]]]]):
    """Each kind of model, with the greedy tokens of transformers for each prompt."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, kind: str) -> tuple[CausalModel, dict[str, list[int]]]:
        directory = self.directory / kind
        reference = save_picture_model(kind, directory).double()
        prompts = prompts_of(kind)
        expected = {name: _greedy(reference, prompt) for name, prompt in prompts.items()}
        model = load_model(directory, dtype="float64", max_model_len=MAX_MODEL_LEN)
        self[kind] = model, expected
        return self[kind]


def _greedy(reference: Any, prompt: PicturePrompt) -> list[int]:
    """From the whole text each time. WHY: `generate` places the output one picture too far behind a
    prompt that ends with a picture."""
    ids, tokens = prompt.ids, []
    for _ in range(NUM_TOKENS):
        inputs = PicturePrompt(ids, prompt.pictures, prompt.kind).inputs()
        with torch.inference_mode():
            logits = reference(**inputs, use_cache=False).logits[0, -1]
            logits[IMAGE] -= PENALTY
        tokens.append(int(logits.argmax()))
        ids = torch.cat((ids, logits.argmax()[None]))
    return tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def asked(name: str, prompt: PicturePrompt, **sampling: Any) -> AdmitRequest:
    sampling = {"max_tokens": NUM_TOKENS, "logit_bias": ((IMAGE, -PENALTY),), **sampling}
    made = request(name, prompt.ids.tolist(), **sampling)
    return msgspec.structs.replace(made, pictures=prompt.pictures)


def outputs_of(served: Served) -> dict[str, list[int]]:
    return {name: tokens for (name, _), tokens in served.outputs.items()}


class Encodings:
    """Counts the pictures that a model encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Picture] = []
        encode = VisionLanguageModel.encode

        def counted(model: VisionLanguageModel, picture: Picture) -> torch.Tensor:
            self.seen.append(picture)
            return encode(model, picture)

        monkeypatch.setattr(VisionLanguageModel, "encode", counted)


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Encodings:
    return Encodings(monkeypatch)


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"max_batched_tokens": 128},
    "chunks": {"max_batched_tokens": 9},
    "single pages": {"max_batched_tokens": 11, "page_size": 1, "num_pages": 257},
    "one step at a time": {"max_batched_tokens": 16, "depth": 1, "lead": 1},
    "without the cache": {"max_batched_tokens": 9, "prefix_cache": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_transformers(
    kind: str, setting: str, models: Models, encodings: Encodings
) -> None:
    model, expected = models[kind]
    executor, prompts = make_executor(model, **SETTINGS[setting]), prompts_of(kind)
    requests = [asked(name, prompt) for name, prompt in prompts.items()]
    served = serve(executor, requests, chaos=len(setting))
    assert outputs_of(served) == expected
    assert served.num_resyncs == 0
    assert sorted(p.digest for p in encodings.seen) == sorted(
        p.digest for prompt in prompts.values() for p in prompt.pictures
    ), "each picture is encoded once"


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_steps_without_pictures_are_compiled_on_a_cpu(
    kind: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with pictures run beside them, with masks where the pictures' tokens see each other."""
    _, expected = models[kind]
    run, num_compiled = CompiledForward.run, 0

    def counted(forward: CompiledForward, batch: ForwardBatch) -> torch.Tensor:
        nonlocal num_compiled
        num_compiled += 1
        return run(forward, batch)

    monkeypatch.setattr(CompiledForward, "run", counted)
    directory = models.directory / kind
    build = BuildOptions(directory, dtype="float32", max_batched_tokens=16, max_rows=4)
    requests = [asked(name, prompt) for name, prompt in prompts_of(kind).items()]
    served = serve(build_executor(build), requests)
    assert outputs_of(served) == expected
    assert NUM_TOKENS < num_compiled < len(served.batches)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Gemma3"])
def test_rows_that_make_way_take_their_pictures_up_again(kind: str, models: Models) -> None:
    model, expected = models[kind]
    executor = make_executor(model, num_pages=24, max_batched_tokens=16)
    served = serve(executor, [asked(name, prompt) for name, prompt in prompts_of(kind).items()])
    assert outputs_of(served) == expected
    assert served.num_retracted


@pytest.mark.parametrize(("kind", "before"), [("Qwen2VL", 8), ("Qwen3_5", 0)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_equal_pictures_hit_the_cache_and_others_do_not(
    page_size: int, kind: str, before: int, models: Models, encodings: Encodings
) -> None:
    """The prompts have the same ids. All that is shared with the other picture is the text before
    it, behind which nobody left a recurrent state, and all pages of the same one are there."""
    model, _ = models[kind]
    parts = (8, WIDE, 7)
    prompt, other = PicturePrompt.of(*parts), PicturePrompt.of(8, OTHER, 7)
    assert torch.equal(prompt.ids, other.ids)
    alone = [
        outputs_of(serve(make_executor(model, prefix_cache=False), [asked("a", each)]))["a"]
        for each in (prompt, other)
    ]
    assert alone[0] != alone[1]
    encodings.seen.clear()
    settings: dict[str, Any] = {"max_rows": 1, "num_pages": 257, "checkpoint_interval": 4}
    executor = make_executor(model, page_size=page_size, **settings)
    requests = [asked("a", prompt), asked("b", other), asked("c", prompt)]
    served = serve(executor, requests)
    assert outputs_of(served) == dict(zip("abc", [*alone, alone[0]], strict=True))
    whole = len(prompt.ids) - 1
    assert served.num_cached == before + whole // page_size * page_size
    assert [p.digest for p in encodings.seen] == [WIDE.digest, OTHER.digest]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefix_may_end_in_a_picture_that_sees_itself(page_size: int, models: Models) -> None:
    """The last token of the second prompt is the picture's."""
    model, _ = models["Gemma3"]
    requests = [
        asked(name, PicturePrompt.of(*parts, kind="Gemma3"))
        for name, parts in (("a", (8, WIDE, 7)), ("b", (8, WIDE)))
    ]
    alone = [
        outputs_of(serve(make_executor(model, prefix_cache=False), [each])) for each in requests
    ]
    executor = make_executor(model, max_rows=1, page_size=page_size, num_pages=257)
    served = serve(executor, requests)
    assert outputs_of(served) == alone[0] | alone[1]
    assert served.num_cached == (8 + SQUARE**2 - 1) // page_size * page_size


def test_positions_go_on_behind_the_pictures_at_every_length(models: Models) -> None:
    """A prompt that holds the first outputs continues as if it had made them."""
    model, expected = models["Qwen3VL"]
    prompt, tokens = PROMPTS["two"], expected["two"]
    for num in range(1, NUM_TOKENS):
        ids = torch.cat((prompt.ids, torch.tensor(tokens[:num])))
        longer = PicturePrompt(ids, prompt.pictures, prompt.kind)
        left = asked("a", longer, max_tokens=NUM_TOKENS - num)
        served = serve(make_executor(model, max_batched_tokens=16), [left])
        assert outputs_of(served) == {"a": tokens[num:]}


@pytest.mark.parametrize("pace", [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("Qwen3_5")])
def test_b23_windows_behind_pictures_have_their_positions_beside_rows_of_text(
    kind: str, pace: tuple[int, int], models: Models
) -> None:
    """Every third predicted token is wrong."""
    model, expected = models[kind]
    requests = []
    for name, prompt in prompts_of(kind).items():
        guess = [token + (place % 3 == 2) for place, token in enumerate(expected[name])]
        made = asked(name, prompt)
        requests.append(msgspec.structs.replace(made, prediction_ids=pack_i32(guess)))
    settings: dict[str, Any] = {"max_batched_tokens": 64, "depth": pace[0], "lead": pace[1]}
    executor = make_executor(model, mode=Predicted(None, TORCH_SUFFIX_MATCH), **settings)
    served = serve(executor, requests)
    assert outputs_of(served) == expected
    accepted = NUM_TOKENS * len(requests) - sum(
        len(array_i32(batch.sample_rows)) for batch in served.batches
    )
    assert accepted > NUM_TOKENS // 2


def test_trees_of_drafts_are_refused_because_their_positions_have_one_axis(models: Models) -> None:
    model, _ = models["Qwen2VL"]
    mode = Autoregressive()
    mode.caps = DecodeCaps(max_tokens_per_step=3, tree=DraftTree(max_depth=1))
    with pytest.raises(ConfigError, match="three axes runs without draft trees"):
        make_executor(model, mode=mode)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Gemma3", "Mistral3"])
def test_decodes_behind_pictures_are_replayed_with_their_positions(
    kind: str, models: Models
) -> None:
    """A captured step reads the offsets of its own rows."""
    (model, expected), prompts = models[kind], prompts_of(kind)
    device = GraphDevice()
    executor = make_executor(
        model, device=device, attention="torch-ref", debug_checks=False, graph_rows=1, max_rows=1
    )
    requests = [asked(name, prompts[name], logit_bias=()) for name in ("last", "two")]
    served = serve(captured(executor), requests)
    assert outputs_of(served) == {name: expected[name] for name in ("last", "two")}
    assert device.num_replays > NUM_TOKENS


@pytest.mark.parametrize("part", ["model", "model.language_model"])
def test_rows_with_adapters_have_the_tokens_of_a_merged_model(part: str, tmp_path: Path) -> None:
    """Beside rows without, by the names that PEFT gave these models before and gives them now."""
    reference = save_picture_model("Qwen2VL", tmp_path).double()
    tables = LoraTables(max_loras=1, max_rank=4)
    target = Target(wrap=tables.wrap)
    model = load_model(tmp_path, dtype="float64", max_model_len=MAX_MODEL_LEN, target=target)
    expected = {"one": _greedy(reference, PROMPTS["one"])}
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(reference.model.language_model.layers):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            weight = layer.get_submodule(name).weight
            a, b = (
                0.3 * torch.randn(4, n, generator=generator).double() for n in weight.shape[::-1]
            )
            weight.data += 2 * b.T @ a
            place = f"base_model.model.{part}.layers.{index}.{name}.lora_"
            tensors |= {f"{place}A.weight": a, f"{place}B.weight": b.T.contiguous()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    tables.write(1, tables.read(tmp_path))
    requests = [asked("one", PROMPTS["one"])]
    for name in ("two", "text", "last"):
        expected[name] = _greedy(reference, PROMPTS[name])
        made = asked(name, PROMPTS[name])
        requests.append(msgspec.structs.replace(made, lora_slot=1, namespace="lora-1"))
    for size in (9, 128):
        served = serve(make_executor(model, loras=tables, max_batched_tokens=size), requests)
        assert outputs_of(served) == expected
    vision = "base_model.model.model.visual.blocks.0.attn.qkv.lora_"
    rank = {f"{vision}A.weight": torch.ones(4, 32), f"{vision}B.weight": torch.ones(96, 4)}
    save_file(tensors | rank, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"no adapters for visual\.blocks\.0\.attn\.qkv"):
        tables.read(tmp_path)
