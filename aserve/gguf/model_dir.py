"""Makes a model directory of a GGUF file: settings in Hugging Face's format, links to the file and
to those that belong to it, and a table that says which of its tensors is which of the model's.

It is kept in the user's cache, and made anew when the file or this package has changed.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
from gguf import GGMLQuantizationType

from aserve.config import cache_home
from aserve.errors import ConfigError
from aserve.gguf.metadata import Metadata, StoredBlocks, read_metadata
from aserve.gguf.settings import config_of, family_of, generation_config_of, tokenizer_config_of
from aserve.gguf.table import TABLE, file_name, make_table

# What is stored as numbers, by kind: the rest is quantized.
NUMBERS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

logger = logging.getLogger(__name__)


def gguf_model_dir(path: Path) -> Path:
    """Returns the model directory of a GGUF file. Raises ConfigError."""
    folder = cache_home() / "aserve" / "gguf" / f"{path.stem}-{_digest(path)}"
    if (folder / TABLE).is_file():
        return folder
    began_s = time.monotonic()
    file = read_metadata(path)
    files = _files(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            made = Path(parent) / folder.name
            made.mkdir()
            for name, data in files.items():
                (made / name).write_bytes(data)
            for number, part in enumerate(file.paths):
                (made / file_name(number)).symlink_to(part.absolute())
            _put(made, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; XDG_CACHE_HOME names another folder "
            "for caches"
        ) from error
    logger.info("read the metadata of %s in %.1f s", path, time.monotonic() - began_s)
    return folder


def _put(made: Path, folder: Path) -> None:
    """Moves a finished directory to its place, where another process may have been faster."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / TABLE).is_file():
            raise


def _files(file: Metadata) -> dict[str, bytes]:
    kinds = {GGMLQuantizationType(tensor.kind) for tensor in file.tensors.values()}
    is_quantized = not kinds <= NUMBERS.keys()
    halves = [NUMBERS[kind] for kind in kinds & NUMBERS.keys() if NUMBERS[kind] != "float32"]
    dtype = "bfloat16" if is_quantized else (halves or ["float32"])[0]
    table = make_table(file, family_of(file))
    config = config_of(file, dtype=dtype, is_quantized=is_quantized)
    if config["tie_word_embeddings"] and _is_quantized(file.tensors["token_embd.weight"]):
        # The embeddings are looked up widened; the head multiplies them as they are stored.
        table.tensors[HEAD] = table.tensors[EMBEDDING]
        config["tie_word_embeddings"] = False
    return {
        "config.json": msgspec.json.encode(config),
        "generation_config.json": msgspec.json.encode(generation_config_of(file)),
        "tokenizer_config.json": msgspec.json.encode(tokenizer_config_of(file)),
        TABLE: msgspec.json.encode(table),
    }


def _is_quantized(tensor: StoredBlocks) -> bool:
    return tensor.kind not in NUMBERS


def _digest(path: Path) -> str:
    """Returns a name for this state of the file and of the code that reads it, whose sources are
    not there in a single binary."""
    stat, ours = path.stat(), version("aserve")
    digest = hashlib.sha256(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {ours}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
