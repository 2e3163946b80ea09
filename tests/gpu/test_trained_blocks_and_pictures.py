"""The small trained models of diffusion and of pictures in the whole engine: however it runs them,
texts are those of plain torch, and captions say what is in the pictures.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.diffusion.registry import Denoising
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.picture import PixelScale, make_picture
from aserve.tiny import MODEL_DIR
from tests.engine_device import engine_device
from tests.gpu.drive import Served, request, serve
from tests.gpu.spec.test_nextn import qwen
from tests.gpu.spec.test_nextn import write as write_modules
from tools.train_models.dllm import THRESHOLD, Dllm, write
from tools.train_models.folder import MODELS_DIR, complete_folder, load_member
from tools.train_models.llada import BLOCK_SIZE, Llada
from tools.train_models.pictures import picture
from tools.train_models.vl import (
    IMAGE_PAD,
    MEAN,
    MERGE,
    PATCH,
    QUESTIONS,
    STD,
    turn_ids,
)
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.evaluate import answer_text, held_out_rows
from tools.train_tiny.tokenizer import BOS, EOS, EOT, load_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = load_tokenizer(MODEL_DIR)
PLAIN: dict[str, Any] = {"depth": 1, "lead": 1, "prefix_cache": False, "max_rows": 1}
KINDS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "chunks, mixed steps": {"page_size": 1, "num_pages": 500, "max_batched_tokens": 24},
    "retraction": {"page_size": 4, "num_pages": 25},
}
NUM_STORIES, BEGINNING, STORY_TOKENS = 5, 24, 40
NUM_PICTURES, SHARE = 20, 0.95
SCALE = PixelScale(1 / 255, (MEAN,) * 3, (STD,) * 3)


def run(folder: Path, asked: list[AdmitRequest], **options: Any) -> Served:
    settings: dict[str, Any] = {"dtype": "float64", "num_pages": 60, "max_rows": 4}
    settings |= {"depth": 2, "lead": 2}
    build = BuildOptions(folder, debug_checks=True, device=engine_device(), **settings | options)
    return serve(build_executor(build), asked, chaos=3)


# ---------------------------------------------------------------- diffusion


def stories() -> list[AdmitRequest]:
    """The last one goes on from the first one's block."""
    rows = [row[:BEGINNING] for row in held_out_rows(TOKENIZER, "story", NUM_STORIES)]
    rows.append([*rows[0], *rows[1][1:7]])
    return [request(f"r{n}", row, max_tokens=STORY_TOKENS - n) for n, row in enumerate(rows)]


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, int], list[int]]:
    """The answers in plain torch, each alone."""
    network = load_member(Dllm(), MODELS_DIR / "dllm").double()
    assert isinstance(network, Llada)
    found = {}
    for asked in stories():
        most = asked.sampling.max_tokens
        assert most is not None
        prompt = array_i32(asked.prompt_ids).tolist()
        answer = write(network, prompt, threshold=THRESHOLD, max_tokens=most)
        found[asked.request_id, 0] = answer.ids[:most]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_stories_are_those_of_plain_torch(
    kind: str, written: dict[tuple[str, int], list[int]]
) -> None:
    denoising = Denoising(threshold=THRESHOLD)
    asked = [msgspec.structs.replace(each, end_ids=(EOS, EOT)) for each in stories()]
    served = run(MODELS_DIR / "dllm", asked, denoising=denoising, **KINDS[kind])
    assert served.outputs == written
    assert (served.num_retracted > 0) is (kind == "retraction")
    assert served.num_cached >= BEGINNING // BLOCK_SIZE * BLOCK_SIZE // 16 * 16


# ---------------------------------------------------------------- pictures


def captioned() -> list[tuple[AdmitRequest, str]]:
    """Requests for the captions of held-out pictures, and the captions."""
    rng, asked = Random("engine"), []
    for number in range(NUM_PICTURES):
        shown = picture(rng, Split.HELD_OUT)
        ids = [BOS, *turn_ids(TOKENIZER, QUESTIONS[0])]
        made = make_picture(shown.pixels, side=PATCH * MERGE, scale=SCALE)
        placed = msgspec.structs.replace(made, start=ids.index(IMAGE_PAD))
        plain = request(f"r{number}", ids, max_tokens=24)
        asked.append((msgspec.structs.replace(plain, pictures=(placed,)), shown.caption))
    return asked


@pytest.fixture(scope="module")
def see(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_folder(MODELS_DIR / "vl", tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def captions(see: Path) -> Served:
    return run(see, [asked for asked, _ in captioned()], **PLAIN)


def test_captions_of_pictures_that_it_never_saw_are_exact(captions: Served) -> None:
    right = [
        answer_text(captions.outputs[asked.request_id, 0], TOKENIZER) == caption
        for asked, caption in captioned()
    ]
    assert sum(right) >= SHARE * NUM_PICTURES


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single module of multi-token prediction, under Qwen's names."""
    return write_modules(tmp_path_factory.mktemp("module") / "mtp", qwen, num_modules=1)


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "NEXTN"])
@pytest.mark.parametrize("kind", KINDS)
def test_captions_are_those_of_the_plain_engine(
    kind: str, algorithm: str | None, see: Path, module: Path, captions: Served
) -> None:
    """The first picture is asked for again at the end, and comes from the cache."""
    some = [asked for asked, _ in captioned()[:5]]
    again = msgspec.structs.replace(some[0], request_id="again")
    own = module if algorithm == "NEXTN" else None
    drafts = algorithm and SpecOptions(algorithm, draft_model_dir=own, num_steps=3)
    served = run(see, [*some, again], speculative=drafts, **KINDS[kind])
    expected = {(each.request_id, 0): captions.outputs[each.request_id, 0] for each in some}
    assert served.outputs == {**expected, ("again", 0): expected["r0", 0]}
    assert (served.num_retracted > 0) is (kind == "retraction")
    assert any(batch.verify is not None for batch in served.batches) is (drafts is not None)
    assert served.num_cached >= 16 or kind == "retraction"
