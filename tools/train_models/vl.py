"""Pictures: Qwen2-VL, which writes captions of coloured shapes.

Patches of 8 x 8 pixels go through a small vision transformer, four of them become one token, and a
picture of 64 x 64 pixels takes the place of 16 `<|image_pad|>`. The text model is half of the
bundled one; its positions have three axes (mrope), which are equal for text.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from aserve.tiny import MODEL_DIR
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.pictures import SIDE, Picture, picture
from tools.train_tiny.corpus.document import PLAIN, RANDOM
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.evaluate import answer_text
from tools.train_tiny.export import load_network, write_json
from tools.train_tiny.packing import Batch
from tools.train_tiny.recipe import Rates, Recipe, Stage
from tools.train_tiny.tokenizer import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    EOT,
    PAD,
    RESERVED,
    USER,
)
from tools.train_tiny.training import next_token_loss

IMAGE_PAD, VISION_START, VISION_END = (
    RESERVED.index(name) for name in ("image_pad", "vision_start", "vision_end")
)
PATCH, MERGE, FRAMES = 8, 2, 2
GRID = SIDE // PATCH
NUM_TOKENS = (GRID // MERGE) ** 2
MEAN = STD = 0.5
QUESTIONS = ("What is in the picture?", "Write a caption.")
TURNS = 2
HELD_OUT_PICTURES = 200
CAPTION_TOKENS = 40
# The template of the bundled model writes only the text of a message.
TEXT_PART = "{{ part.text if part.type == 'text' else '' }}"
ANY_PART = (
    "{{ part.text if part.type == 'text' else "
    "'<|vision_start|><|image_pad|><|vision_end|>' if part.type in ('image', 'image_url') else '' "
    "}}"
)


@dataclass(frozen=True)
class PictureBatch(Batch):
    pixels: Tensor  # float32 [patches of all pictures, 3 * frames * patch * patch]
    num_pictures: int


class Pictures:
    """Conversations about two pictures, with the ids of the chat template."""

    def __init__(self, tokenizer: Tokenizer, stage: Stage, *, seed: int) -> None:
        self.tokenizer = tokenizer
        self.stage = stage
        self.seed = seed

    def batch(self, step: int) -> PictureBatch:
        rng = Random(f"{self.seed}/{self.stage.name}/{step}")
        size = self.stage.length + 1
        rows, weights, pictures = [], [], []
        for _ in range(self.stage.rows):
            ids, row_weights = [BOS], [RANDOM]
            for _ in range(TURNS):
                shown = picture(rng, Split.TRAIN)
                prompt = turn_ids(self.tokenizer, rng.choice(QUESTIONS))
                answer = [*self.tokenizer.encode(shown.caption, add_special_tokens=False).ids, EOT]
                ids += [*prompt, *answer]
                row_weights += [0.0] * len(prompt) + [PLAIN] * len(answer)
                pictures.append(shown)
            assert len(ids) <= size
            rows.append(ids + [PAD] * (size - len(ids)))
            weights.append(row_weights + [0.0] * (size - len(ids)))
        return PictureBatch(
            torch.tensor(rows), torch.tensor(weights)[:, 1:], patches(pictures), len(pictures)
        )


class Vl(Member):
    about = (
        "Qwen2-VL in small: a vision transformer of two layers before half of the bundled model. "
        "It writes captions of pictures of 64 x 64 pixels with one or two coloured shapes. It was "
        "trained on captions alone, so its text is worse than that of the bundled model."
    )
    notes = (
        f"A picture is `<|vision_start|>`, one `<|image_pad|>` for each {PATCH * MERGE} x "
        f"{PATCH * MERGE} pixels ({NUM_TOKENS} of them), `<|vision_end|>`. "
        "`preprocessor_config.json` says how pixels are scaled; a still picture is two equal "
        "frames. Rotary channels are split by `mrope_section`. The chat template writes one "
        "`<|image_pad|>` for each picture, as the published ones do. The configuration is flat, as "
        "those of Qwen2-VL on the hub are."
    )
    recipe = Recipe(
        stages=(Stage("captions", length=108, rows=16, steps=1500, shares={}),),
        rates=Rates(muon=2e-3, adam=2e-3, warmup_steps=20, decay_part=0.5),
        tokenizer_documents=0,
        tokenizer_kinds=frozenset(),
    )
    quick = Recipe(
        stages=(Stage("captions", length=108, rows=2, steps=2, shares={}),),
        rates=Rates(warmup_steps=2),
        tokenizer_documents=0,
        tokenizer_kinds=frozenset(),
    )
    renames = (("model.language_model.", "model."), ("model.visual.", "visual."))

    def config(self) -> dict[str, object]:
        config = published_config(
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl",
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            use_sliding_window=False,
            tie_word_embeddings=True,
            image_token_id=IMAGE_PAD,
            video_token_id=RESERVED.index("unk"),
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
            vision_config={
                "model_type": "qwen2_vl",
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 128,
                "num_heads": 4,
                "mlp_ratio": 4,
                "in_channels": 3,
                "in_chans": 3,
                "patch_size": PATCH,
                "spatial_patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": FRAMES,
            },
        )
        # `rope_scaling` and `rope_theta` say it in the way of the published configurations.
        del config["rope_parameters"]
        return config

    def empty(self) -> nn.Module:
        fields: dict[str, Any] = self.config()
        model: Any = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**fields)).float()
        assert isinstance(model, nn.Module)
        return model

    def start(self, network: nn.Module) -> None:
        start(network)

    def batches(self, stage: Stage, tokenizer: Tokenizer, seed: int) -> Pictures:
        return Pictures(tokenizer, stage, seed=seed)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, PictureBatch)
        inputs = model_inputs(batch.ids[:, :-1], batch.pixels, batch.num_pictures)
        return next_token_loss(network(**inputs, use_cache=False).logits, batch)

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        count = 4 if is_quick else HELD_OUT_PICTURES
        rng = Random("captions")
        shown = [picture(rng, Split.HELD_OUT) for _ in range(count)]
        written = captions(network, tokenizer, shown)
        exact = sum(text == item.caption for text, item in zip(written, shown, strict=True))
        return [
            Figure("captions of held-out pictures, exact", f"{exact} of {count}", "95 %"),
            *(
                Figure(f"example: {item.caption}", text)
                for text, item in zip(written[:3], shown, strict=False)
            ),
        ]

    def save_more(self, folder: Path) -> None:
        template = CHAT_TEMPLATE.replace(TEXT_PART, ANY_PART)
        assert template != CHAT_TEMPLATE
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        write_json(folder / "preprocessor_config.json", preprocessor_config())


@torch.no_grad()
def start(model: Any) -> None:
    """Copies the bundled model, and of its attention the two heads that share the first KV head.

    WHY: Qwen2-VL has as many dimensions in its heads as in the hidden state, the bundled model has
    twice as many.
    """
    text = model.model.language_model
    halves = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    for name, weight in load_network(MODEL_DIR).model.named_parameters():
        kind = name.split(".")[-2]
        first_half = weight.chunk(2, dim=halves[kind])[0] if kind in halves else weight
        text.get_parameter(name).copy_(first_half)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.zero_()


def preprocessor_config() -> dict[str, object]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "min_pixels": SIDE * SIDE,
        "max_pixels": SIDE * SIDE,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }


def turn_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """Returns the ids of a user's message that has a picture before its text."""
    ids = tokenizer.encode(question, add_special_tokens=False).ids
    return [USER, VISION_START, *[IMAGE_PAD] * NUM_TOKENS, VISION_END, *ids, EOT, ASSISTANT]


def patches(pictures: list[Picture]) -> Tensor:
    """Returns the patches in the order of Qwen2-VL: those that become one token are neighbours.

    A patch is float32 [3 * frames * patch * patch], in this order.
    """
    pixels = np.stack([item.pixels for item in pictures]).astype(np.float32) / 255
    tensor = torch.from_numpy((pixels - MEAN) / STD).permute(0, 3, 1, 2)
    half = GRID // MERGE
    split = tensor.reshape(-1, 3, half, MERGE, PATCH, half, MERGE, PATCH)
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [pictures, rows, columns, 2, 2, 3, 8, 8]
    framed = ordered.unsqueeze(6).expand(*ordered.shape[:6], FRAMES, PATCH, PATCH)
    return framed.reshape(-1, 3 * FRAMES * PATCH * PATCH)


def model_inputs(ids: Tensor, pixels: Tensor, num_pictures: int) -> dict[str, Tensor]:
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, GRID, GRID]] * num_pictures),
        "mm_token_type_ids": (ids == IMAGE_PAD).int(),
    }


@torch.inference_mode()
def captions(network: nn.Module, tokenizer: Tokenizer, shown: list[Picture]) -> list[str]:
    """Returns what the model says about each picture, greedily."""
    model: Any = network
    prompt = [BOS, *turn_ids(tokenizer, QUESTIONS[0])]
    texts: list[str] = []
    for first in range(0, len(shown), 25):
        some = shown[first : first + 25]
        ids = torch.tensor([prompt] * len(some))
        new = model.generate(
            **model_inputs(ids, patches(some), len(some)),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CAPTION_TOKENS,
            do_sample=False,
            eos_token_id=[EOS, EOT],
            pad_token_id=PAD,
        )[:, ids.shape[1] :]
        texts += [answer_text(row, tokenizer) for row in new.tolist()]
    return texts
