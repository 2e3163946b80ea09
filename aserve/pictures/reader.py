"""Reads the pictures of a chat: from their files to the pixels that the engine encodes.

Every limit is checked before the work that it bounds: the number of pictures, the bytes of each,
the pixels that its header announces, so that a small file cannot unfold into gigabytes, and the
scans of a JPEG, each of which passes over all its pixels. It runs in a thread, and Pillow decodes
and resizes without the interpreter lock.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from PIL import Image
from PIL.ExifTags import Base

from aserve.errors import ContextTooLong, InvalidRequest
from aserve.messages.requests import ChatPrompt, Prompt
from aserve.picture import Picture, PictureSource, make_picture
from aserve.pictures.settings import PictureSettings
from aserve.pictures.source import (
    NO_DOMAINS,
    MediaDomains,
    check_source,
    invalid_picture,
    is_remote,
)

MAX_PICTURES = 16  # of one request
MAX_PIXELS = 50_000_000  # of one picture, decoded
MAX_PIXELS_IN_ALL = 200_000_000  # of the pictures of one request
MAX_SCANNED = 20 * MAX_PIXELS  # pixels of a JPEG times its scans: encoders write about 10
MAX_PARTS = 100_000  # of a file's parts, such as the segments of a JPEG
# The segments of a JPEG that have a length, and its end. None begins within the data of a scan.
SEGMENT = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe]")
SCAN, END = b"\xff\xda", b"\xff\xd9"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Errors that Pillow raises for damaged files, or for files that unfold too far.
FAULTS = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, ArithmeticError, TypeError),
    struct.error,
    *(Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError),
)

Turn = Image.Transpose
# Makes a picture upright, by its EXIF orientation.
TURNS = {
    2: Turn.FLIP_LEFT_RIGHT,
    3: Turn.ROTATE_180,
    4: Turn.FLIP_TOP_BOTTOM,
    5: Turn.TRANSPOSE,
    6: Turn.ROTATE_270,
    7: Turn.TRANSVERSE,
    8: Turn.ROTATE_90,
}


class PictureReader:
    __slots__ = ("_settings", "domains")

    def __init__(
        self, settings: PictureSettings | None = None, domains: MediaDomains = NO_DOMAINS
    ) -> None:
        """Without settings the model reads no pictures. MediaFetcher fetches from `domains`."""
        self._settings = settings
        self.domains = domains

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures."""
        return self._settings is not None

    def check(self, prompt: ChatPrompt) -> None:
        """Raises a ClientError for what can be seen without decoding."""
        for number, source in enumerate(prompt.pictures):
            if self._settings is None:
                raise InvalidRequest(
                    "This model supports text input only; received unsupported content type "
                    f"'{source.kind[:40]}'.",
                    param=source.param,
                    code="unsupported_content_type",
                )
            if number == MAX_PICTURES:
                raise InvalidRequest(
                    f"the request has {len(prompt.pictures)} pictures; at most {MAX_PICTURES} are "
                    "allowed",
                    param=source.param,
                    code="too_many_images",
                )
            check_source(source, self.domains)

    def written(self, prompt: ChatPrompt, text: str) -> str:
        """Returns the text of a chat as it is tokenized, with what the model expects around each
        picture that the chat template wrote."""
        settings = self._settings
        if settings is None or settings.written is None or not prompt.pictures:
            return text
        return text.replace(*settings.written)

    def placed(
        self, prompt: Prompt, prompt_ids: list[int], *, max_len: int
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Returns the ids with a placeholder for each token of a picture, and the pictures with
        their places. A prompt of more than `max_len` tokens is refused before it is decoded."""
        if not isinstance(prompt, ChatPrompt) or not prompt.pictures:
            return prompt_ids, ()
        self.check(prompt)
        assert self._settings is not None
        settings, files = self._settings, [_file_of(source) for source in prompt.pictures]
        num_tokens, num_pixels = len(prompt_ids), 0
        for source, data in zip(prompt.pictures, files, strict=True):
            with _opened(source, data) as image:
                num_tokens += settings.num_tokens(*image.size)
                num_pixels += image.width * image.height
            if num_pixels > MAX_PIXELS_IN_ALL:
                raise invalid_picture(
                    source,
                    f"the pictures up to this one have {num_pixels} pixels, and at most "
                    f"{MAX_PIXELS_IN_ALL} are allowed in one request",
                )
            if num_tokens > max_len:
                raise ContextTooLong(
                    f"This model's maximum context length is {max_len} tokens. However, your "
                    f"messages have at least {num_tokens} tokens, those of pictures included.",
                    param=source.param,
                )
        pictures = [
            _picture(source, data, settings)
            for source, data in zip(prompt.pictures, files, strict=True)
        ]
        return _place(prompt_ids, pictures, settings)


def _place(
    prompt_ids: list[int], pictures: list[Picture], settings: PictureSettings
) -> tuple[list[int], tuple[Picture, ...]]:
    """A chat template writes one token for each picture."""
    num_shown = prompt_ids.count(settings.token_id)
    if num_shown != len(pictures):
        raise InvalidRequest(
            f"the messages have {len(pictures)} pictures, but the model's chat template shows "
            f"{num_shown}",
            param="messages",
            code="chat_template_error",
        )
    ids: list[int] = []
    placed: list[Picture] = []
    for prompt_id in prompt_ids:
        if prompt_id != settings.token_id:
            ids.append(prompt_id)
            continue
        placed.append(msgspec.structs.replace(pictures[len(placed)], start=len(ids)))
        ids += settings.ids_of(placed[-1])
    return ids, tuple(placed)


def _file_of(source: PictureSource) -> bytes:
    assert not is_remote(source), "a MediaFetcher fetches it before it is read"
    if source.data:
        return source.data
    try:
        return base64.b64decode(source.url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise invalid_picture(source, "its data is not base64") from None


@contextmanager
def _opened(source: PictureSource, data: bytes) -> Iterator[Image.Image]:
    """Reads the header only, and checks the number of pixels, and of scans."""
    try:
        image = Image.open(_Parts(data), formats=FORMATS)
    except FAULTS:
        raise invalid_picture(
            source, f"it is none of {', '.join(FORMATS)}, or is damaged"
        ) from None
    with image:
        if not 0 < image.width * image.height <= MAX_PIXELS:
            size = f"{image.width} x {image.height}"
            raise invalid_picture(
                source, f"it has {size} pixels, and at most {MAX_PIXELS} are allowed"
            )
        if image.format in ("JPEG", "MPO"):
            _check_scans(source, data, image.width * image.height)
        yield image


def _check_scans(source: PictureSource, data: bytes, num_pixels: int) -> None:
    """NOTE: what follows the end is not read. Telephones put a film there."""
    num_scans = start = 0
    for _ in range(MAX_PARTS):
        found = SEGMENT.search(data, start)
        if found is None or found[0] == END:
            break
        num_scans += found[0] == SCAN
        start = found.end() + max(2, int.from_bytes(data[found.end() : found.end() + 2], "big"))
    else:
        raise invalid_picture(source, f"it has more than {MAX_PARTS} segments")
    if num_scans * num_pixels > MAX_SCANNED:
        raise invalid_picture(
            source,
            f"it has {num_scans} scans of {num_pixels} pixels, and at most {MAX_SCANNED} pixels "
            "are read in all scans",
        )


def _picture(source: PictureSource, data: bytes, settings: PictureSettings) -> Picture:
    with _opened(source, data) as image:
        try:
            image.load()
            turn = _turn_of(image)
            upright = (image if turn is None else image.transpose(turn)).convert("RGB")
        except FAULTS:
            raise invalid_picture(source, "it is damaged") from None
    resized = upright.resize(
        settings.resized(*upright.size), resample=Image.Resampling(settings.resample)
    )
    return make_picture(
        np.asarray(resized),
        side=settings.side,
        scale=settings.scale,
        num_breaks=settings.num_breaks,
        sees_itself=settings.sees_itself,
    )


def _turn_of(image: Image.Image) -> Turn | None:
    """NOTE: EXIF data that is damaged says nothing. The pixels may be good."""
    try:
        return TURNS.get(image.getexif().get(Base.Orientation, 1))
    except FAULTS:
        return None


class _Parts(io.BytesIO):
    """A file that is read in few parts. Pillow reads each segment of a header in Python."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > MAX_PARTS:
            raise OSError(f"the file has more than {MAX_PARTS} parts")
        return super().read(size)
