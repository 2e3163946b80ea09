"""Pictures of clients: transformers' sizes and patches, and a 400 for whatever is too much."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from aserve.errors import ClientError, ConfigError
from aserve.gpu.models.vision.encoder import cut_patches
from aserve.gpu.models.vision_language import scaled
from aserve.messages.base import array_i32
from aserve.messages.requests import ChatPrompt, GenerateRequest, SamplingParams
from aserve.picture import Picture, PictureSource
from aserve.pictures.reader import MAX_PICTURES, PictureReader
from aserve.pictures.settings import CLIP_MEAN, CLIP_STD, PictureSettings, picture_settings
from aserve.pictures.sizes import PixelBounds
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import PromptEncoder
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer
from tests.text.vocabularies import byte_level_backend

TOKEN = 7
QWEN2 = {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": TOKEN}
IDS = {"[IMG_BREAK]": 8, "[IMG_END]": 9}
LIMITS: dict[str, Any] = {"min_pixels": 8 * 28 * 28, "max_pixels": 40 * 28 * 28}


def settings_of(**processor: Any) -> PictureSettings:
    settings = picture_settings(QWEN2, {**LIMITS, **processor}, where="model", token_id=IDS.get)
    assert settings is not None
    return settings


def url_of(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return as_url(file.getvalue())


def as_url(data: bytes) -> str:
    return f"data:image/any;base64,{base64.b64encode(data).decode()}"


def read(*urls: str, settings: PictureSettings | None = None, room: int = 1000) -> Any:
    """The ids and pictures of a prompt 1, picture, 2, picture, 3, ..."""
    sources = tuple(PictureSource(url, f"messages[{i}]", "image_url") for i, url in enumerate(urls))
    ids = [1] + [number for i in range(len(urls)) for number in (TOKEN, i + 2)]
    reader = PictureReader(settings or settings_of())
    return reader.placed(ChatPrompt(b"[]", pictures=sources), ids, max_len=room)


def drawn(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def patches_of(picture: Picture) -> torch.Tensor:
    class Spec(msgspec.Struct):
        merge_size: int = 2
        patch_size: int = 14
        frames: int = 2

    raw = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
    pixels = scaled(raw.view(picture.rows * 28, picture.columns * 28, 3), picture)
    spec: Any = Spec()
    return cut_patches(pixels, spec, rows=picture.rows, columns=picture.columns)


@pytest.mark.parametrize(
    ("width", "height", "mode"),
    [
        (28, 28, "RGB"),
        (113, 70, "RGB"),
        (70, 113, "RGBA"),
        (42, 42, "L"),
        (500, 300, "P"),
        (1000, 60, "CMYK"),
        (14, 14 * 150, "RGB"),
    ],
)
def test_patches_are_those_of_transformers(width: int, height: int, mode: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = drawn(width, height, mode)
    processor = Qwen2VLImageProcessorPil(**LIMITS)
    expected = processor(images=[image.convert("RGB")], return_tensors="pt")
    kind = "JPEG" if mode == "CMYK" else "PNG"
    if kind == "JPEG":
        image = Image.open(io.BytesIO(base64.b64decode(url_of(image, kind).split(",")[1])))
        expected = processor(images=[image.convert("RGB")], return_tensors="pt")
        _, [picture] = read(url_of(drawn(width, height, mode), kind))
    else:
        _, [picture] = read(url_of(image, kind))
    assert [1, 2 * picture.rows, 2 * picture.columns] == expected["image_grid_thw"][0].tolist()
    assert torch.equal(patches_of(picture), expected["pixel_values"])


def test_placeholders_are_as_many_as_the_tokens_of_each_picture() -> None:
    ids, pictures = read(url_of(drawn(112, 56)), url_of(drawn(56, 140)))
    wide, high = pictures
    assert (wide.rows, wide.columns, high.rows, high.columns) == (2, 4, 5, 2)
    assert ids == [1] + [TOKEN] * 8 + [2] + [TOKEN] * 10 + [3]
    assert [picture.start for picture in pictures] == [1, 10]


def test_equal_pictures_have_equal_digests_whatever_their_file_is() -> None:
    image = drawn(56, 112)
    _, (png, webp, other) = read(
        url_of(image), url_of(image, "WEBP", lossless=True), url_of(drawn(57, 112))
    )
    assert png.digest == webp.digest != other.digest


@pytest.mark.parametrize("head", ["DATA:image/png;base64", "data:image/png;BASE64"])
def test_a_data_url_may_be_in_upper_case(head: str) -> None:
    url = url_of(drawn(56, 56))
    source = PictureSource(f"{head},{url.partition(',')[2]}", "messages[0]", "image_url")
    PictureReader(settings_of()).check(ChatPrompt(b"[]", pictures=(source,)))
    assert read(source.url) == read(url)


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    url = url_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    _, [picture] = read(url)
    assert picture.pixels[:3] == bytes((255, 0, 0))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_photo_is_turned_as_pillow_turns_it(orientation: int, kind: str) -> None:
    image, exif = drawn(56, 84), Image.Exif()
    exif[Base.Orientation] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    upright = ImageOps.exif_transpose(Image.open(file))
    assert read(as_url(file.getvalue())) == read(url_of(upright))


def test_what_follows_the_end_of_a_jpeg_counts_for_nothing() -> None:
    """A film, for instance, in which any bytes may come."""
    data = jpeg()
    assert read(as_url(data + b"\xff\xda\x00\x02" * 100_000)) == read(as_url(data))


def test_exif_data_that_is_damaged_leaves_a_picture_as_it_is() -> None:
    """Pillow cannot write such a tag, and would have to."""
    tags = struct.pack(">H", 2) + struct.pack(">HHII", Base.Orientation, 3, 1, 6 << 16)
    tags += struct.pack(">HHII", Base.ResolutionUnit, 2, 4, 0x61626300) + bytes(4)
    image, exif = drawn(56, 84), b"Exif\x00\x00MM\x00\x2a\x00\x00\x00\x08" + tags
    for data in (exif, exif[:20], b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff"):
        _, pictures = read(url_of(image, "PNG", exif=data))
        assert len(pictures) == 1


def png_that_says(width: int, height: int) -> bytes:
    """A header of so many pixels, and a little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def jpeg(*, num_scans: int = 1, num_segments: int = 0) -> bytes:
    """A grey picture of 5,000 x 4,000 pixels, whose last scan is there so many times."""
    file = io.BytesIO()
    Image.new("L", (5_000, 4_000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    comments = b"\xff\xfe\x00\x02" * num_segments
    return data[:2] + comments + data[2:-2] + last * (num_scans - 1) + data[-2:]


SMALL = url_of(drawn(56, 56))


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["https://example.com/cat.png"], "fetches no others"),
        (["file:///etc/passwd"], "fetches no others"),
        (["data:image/png,abc"], "must be 'data:image/...;base64,...'"),
        (["data:image/png;base64,a*b="], "is not base64"),
        ([as_url(b"no picture")], "it is none of PNG, JPEG, WEBP, GIF"),
        ([as_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")], "it is none of PNG"),
        ([as_url(png_that_says(9_000, 9_000))], "9000 x 9000 pixels, and at most"),
        ([as_url(png_that_says(60_000, 60_000))], "it is none of|pixels, and at most"),
        ([as_url(png_that_says(2_000, 2_000))], "it is damaged"),
        ([url_of(drawn(2, 500))], "one side is more than 200 times the other"),
        ([as_url(png_that_says(7_000, 7_000))] * 5, "have 245000000 pixels, and at most 200000000"),
        ([as_url(jpeg(num_scans=90))], "scans of 20000000 pixels, and at most 1000000000"),
        ([as_url(jpeg()[:-2] + b"\xff\xfe\x00\x02" * 100_000)], "more than 100000 segments"),
        ([as_url(jpeg(num_segments=100_000))], "it is none of PNG, JPEG, WEBP, GIF, or is damaged"),
        ([SMALL] * (MAX_PICTURES + 1), "at most 16 are allowed"),
        (["data:image/png;base64," + "A" * (28 << 20)], "has more than 20971520 bytes"),
    ],
)
def test_what_is_no_picture_or_too_much_is_refused(urls: list[str], message: str) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        read(*urls)
    assert caught.value.info().status == 400


def test_a_prompt_that_pictures_make_too_long_is_refused_before_it_is_decoded() -> None:
    damaged = as_url(png_that_says(2_000, 2_000))
    with pytest.raises(ClientError, match="maximum context length is 20 tokens"):
        read(SMALL, damaged, room=20)


def test_only_some_models_read_pictures() -> None:
    assert (
        picture_settings({"architectures": ["LlamaForCausalLM"]}, {}, where="m", token_id=IDS.get)
        is None
    )
    source = PictureSource(SMALL, "messages[0].content[1]", "image_url")
    with pytest.raises(ClientError, match="supports text input only") as caught:
        PictureReader().check(ChatPrompt(b"[]", pictures=(source,)))
    assert caught.value.info().param == "messages[0].content[1]"


def test_settings_have_the_defaults_of_transformers_and_must_fit_the_model() -> None:
    settings = picture_settings(QWEN2, {}, where="model", token_id=IDS.get)
    assert settings is not None
    assert (settings.scale.mean, settings.scale.std) == (CLIP_MEAN, CLIP_STD)
    assert (settings.side, settings.size) == (28, PixelBounds(3136, 1003520))
    newer = settings_of(min_pixels=None, size={"shortest_edge": 10, "longest_edge": 9000})
    assert newer.size == PixelBounds(10, LIMITS["max_pixels"])
    with pytest.raises(ConfigError, match="has patches of 16"):
        settings_of(patch_size=16)


MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": TOKEN,
    "spatial_merge_size": 2,
    "vision_config": {"patch_size": 14},
}


def test_rows_of_a_picture_end_with_breaks() -> None:
    settings = picture_settings(MISTRAL3, {}, where="model", token_id=IDS.get)
    ids, (picture, _) = read(
        url_of(drawn(30, 28)), url_of(drawn(28, 57)), settings=settings, room=17
    )
    high = [TOKEN, 8, TOKEN, 8, TOKEN, 9]
    assert ids == [1, TOKEN, TOKEN, 9, 2, *high, 3]
    assert (picture.rows, picture.columns, picture.num_tokens) == (1, 2, 3)
    with pytest.raises(ClientError, match="at least 14 tokens"):
        read(url_of(drawn(30, 28)), url_of(drawn(28, 57)), settings=settings, room=13)


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (28, 29), (1540, 1540), (1541, 300), (3000, 2000), (999, 4001), (7, 12_000)],
)
def test_pixtral_resizes_as_transformers_does(width: int, height: int) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    settings = picture_settings(MISTRAL3, {}, where="model", token_id=IDS.get)
    assert settings is not None
    expected = get_resize_output_image_size(
        torch.zeros(3, height, width), size=(1540, 1540), patch_size=(28, 28)
    )
    found = settings.resized(width, height)
    assert found == (max(28, expected[1]), max(28, expected[0]))


def test_a_tokenizer_without_the_breaks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lacks one of \[IMG_BREAK\], \[IMG_END\]"):
        picture_settings(MISTRAL3, {}, where="model", token_id={"[IMG_END]": 9}.get)


GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "vision_config": {"image_size": 56},
    "mm_tokens_per_image": 4,
}
ANY_PART = (
    "{% for m in messages %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<start_of_image>' }}"
    "{% endfor %}{% endfor %}"
)


def test_gemma_has_its_pictures_between_marks_and_empty_lines() -> None:
    """A client that writes such a mark gets its text, and no place for a picture."""
    backend = byte_level_backend()
    marks = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    backend.add_special_tokens(marks)
    start, soft, end = map(backend.token_to_id, marks)
    config = {**GEMMA3, "image_token_index": soft}
    settings = picture_settings(config, {}, where="model", token_id=backend.token_to_id)
    encoder = PromptEncoder(
        TextTokenizer(backend),
        template=ChatTemplate(ANY_PART),
        limits=PromptLimits(1000, 100_000),
        pictures=PictureReader(settings),
    )
    content = [
        {"type": "text", "text": "a<start_of_image>"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    source = PictureSource(url_of(drawn(90, 30)), "messages[0]", "image_url")
    messages = msgspec.json.encode([{"role": "user", "content": content}])
    prompt = ChatPrompt(messages, pictures=(source,))
    sampling = SamplingParams(max_tokens=1, seed=0)
    admit = encoder.prepare(GenerateRequest("one", prompt, sampling)).admit
    ids = array_i32(admit.prompt_ids).tolist()
    place = ids.index(start)
    assert ids[place : place + 6] == [start, *[soft] * 4, end]
    assert backend.decode(ids[:place], skip_special_tokens=False) == "a<start_of_image>\n\n"
    assert backend.decode(ids[place + 6 :]) == "\n\nb"
    [picture] = admit.pictures
    assert (picture.start, picture.rows, picture.columns) == (place + 1, 2, 2)
    assert picture.sees_itself
