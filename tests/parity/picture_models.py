"""Tiny random models of transformers that read pictures, and pictures for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from aserve.picture import Picture, PixelScale, make_picture

SCALE = PixelScale(1 / 255, (0.5, 0.4, 0.3), (0.3, 0.4, 0.5))
PATCH, MERGE, IMAGE = 4, 2, 150
SIDE = PATCH * MERGE
MAX_MODEL_LEN = 144
TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 100.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,  # of which rope rotates a half
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        **TEXT["rope_parameters"],
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
}
NEW_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_position_embeddings": 25,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
SQUARE = 3  # tokens on a side of all pictures of Gemma 3
GEMMA3_TEXT: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 11,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({}, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "Qwen2_5_VL": (
        {},
        {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "Qwen3VL": (
        {"head_dim": 16, "rope_parameters": {**TEXT["rope_parameters"], "mrope_interleaved": True}},
        {**NEW_VISION, "deepstack_visual_indexes": [0, 2]},
    ),
    "Qwen3_5": (HYBRID, NEW_VISION),
    "Qwen3_5Moe": ({**HYBRID, **EXPERTS}, NEW_VISION),
    "Gemma3": (
        GEMMA3_TEXT,
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SQUARE * SIDE,
        },
    ),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_parameters": ROPE},
        {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        },
    ),
}
BREAKS = {"Mistral3": (154, 155)}  # behind each row of a picture, and behind the last one
# Fields of the whole configuration.
WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "image_token_index": IMAGE,
        "mm_tokens_per_image": SQUARE**2,
        "tie_word_embeddings": True,
    },
    "Mistral3": {
        "image_token_index": IMAGE,
        "spatial_merge_size": MERGE,
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
}


def save_picture_model(kind: str, directory: Path) -> Any:
    """Returns transformers' model, which it has saved in `directory`."""
    import transformers

    text, vision = KINDS[kind]
    model_class: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = model_class.config_class(
        text_config={**TEXT, **text}, vision_config={**VISION, **vision}, **WHOLE.get(kind, IDS)
    )
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    # Wider weights of recurrent layers multiply what float32 rounds, in the reference as well.
    spread = 0.08 if kind.startswith("Qwen3_5") else 0.15
    for name, weight in model.named_parameters():
        with torch.no_grad():
            is_vector = weight.ndim == 1
            centre = 1.0 if is_vector and not name.endswith("bias") else 0.0
            torch.nn.init.normal_(weight, mean=centre, std=0.2 if is_vector else spread)
    model.save_pretrained(directory)
    return model


def random_picture(rows: int, columns: int, seed: int = 0) -> Picture:
    shape = (rows * SIDE, columns * SIDE, 3)
    pixels = np.random.default_rng((seed, rows, columns)).integers(0, 256, shape, np.uint8)
    return make_picture(pixels, side=SIDE, scale=SCALE)


@dataclass(frozen=True)
class PicturePrompt:
    ids: Tensor  # int64 [tokens]
    pictures: tuple[Picture, ...]  # with their places
    kind: str

    @classmethod
    def of(cls, *parts: int | Picture, kind: str = "Qwen2VL") -> PicturePrompt:
        """A number stands for so many tokens of text."""
        ids: list[int] = []
        pictures = []
        breaks = BREAKS.get(kind)
        for part in parts:
            if isinstance(part, int):
                ids += [3 + (7 * len(ids) + i * i) % 140 for i in range(part)]
                continue
            if kind == "Gemma3":
                part = squared(part)
            pictures.append(
                msgspec.structs.replace(
                    part,
                    start=len(ids),
                    num_breaks=0 if breaks is None else 1,
                    sees_itself=kind == "Gemma3",
                )
            )
            if breaks is None:
                ids += [IMAGE] * part.num_tokens
                continue
            rows = [[*[IMAGE] * part.columns, breaks[0]] for _ in range(part.rows)]
            rows[-1][-1] = breaks[1]
            ids += [number for row in rows for number in row]
        return cls(torch.tensor(ids), tuple(pictures), kind)

    def inputs(self) -> dict[str, Tensor]:
        """The arguments of transformers' forward."""
        if not self.pictures:
            return {"input_ids": self.ids[None]}
        if self.kind == "Mistral3":
            return {"input_ids": self.ids[None], **_pixels(self.pictures)}
        if self.kind == "Gemma3":
            return {
                "input_ids": self.ids[None],
                "pixel_values": _square_pixels(self.pictures),
                "token_type_ids": (self.ids[None] == IMAGE).int(),
            }
        patches = [_patches(picture) for picture in self.pictures]
        grids = [[1, MERGE * p.rows, MERGE * p.columns] for p in self.pictures]
        return {
            "input_ids": self.ids[None],
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (self.ids[None] == IMAGE).int(),
        }


def squared(picture: Picture) -> Picture:
    """One of the size that Gemma 3 has, with other pixels for other pictures."""
    return random_picture(SQUARE, SQUARE, seed=picture.digest[0])


def _square_pixels(pictures: tuple[Picture, ...]) -> Tensor:
    """By transformers' processor of Gemma 3."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor = Gemma3ImageProcessorPil(
        do_resize=False, image_mean=list(SCALE.mean), image_std=list(SCALE.std)
    )
    values: Tensor = processor(images=[*map(_array, pictures)], return_tensors="pt")["pixel_values"]
    return values


def _array(picture: Picture) -> Any:
    shape = (picture.rows * SIDE, picture.columns * SIDE, 3)
    return np.frombuffer(picture.pixels, np.uint8).reshape(shape)


def _pixels(pictures: tuple[Picture, ...]) -> dict[str, Tensor]:
    """By transformers' processor of Pixtral, which pads smaller pictures."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor = PixtralImageProcessorPil(
        patch_size=SIDE, do_resize=False, image_mean=list(SCALE.mean), image_std=list(SCALE.std)
    )
    made = processor(images=[*map(_array, pictures)], return_tensors="pt")
    return {name: made[name] for name in ("pixel_values", "image_sizes")}


def _patches(picture: Picture) -> Tensor:
    """By transformers' own picture processor, which finds the size as it should be."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        do_resize=False,
        image_mean=list(SCALE.mean),
        image_std=list(SCALE.std),
    )
    values: Tensor = processor(images=[_array(picture)], return_tensors="pt")["pixel_values"]
    return values
