"""Hashes the files of a model directory. Each file is read once in a process, and again only if it
has changed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from aserve.receipts.record import ModelDigest

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
CONFIG = ("config.json", "adapter_config.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
LOGGED_S = 1.0  # hashing that takes longer is logged

logger = logging.getLogger(__name__)


class Digests:
    """Computes digests, and remembers those of files by their size and time. `of` blocks for as
    long as reading the files takes, so call it in a thread, one call at a time.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}

    def of(
        self, folder: Path, *, has_weights: bool = True, tokenizer: str | None = None
    ) -> ModelDigest:
        """Returns the hashes of the files. Without `has_weights` the model's weights are random,
        and not those in the folder. `tokenizer` is the folder of another tokenizer.
        """
        began_s = time.monotonic()
        digest = ModelDigest(
            self._of_files(_files(folder, WEIGHTS) if has_weights else ()),
            self._of_files(_files(folder, CONFIG)),
            self._of_files(_files(folder if tokenizer is None else Path(tokenizer), TOKENIZER)),
        )
        seconds = time.monotonic() - began_s
        if seconds > LOGGED_S:
            logger.info("hashed the weights for receipts path=%s seconds=%.1f", folder, seconds)
        return digest

    def _of_files(self, paths: Iterable[Path]) -> str:
        """The hash of the names and hashes of the files, or nothing if there are none."""
        lines = [f"{self.of_file(path)}  {path.name}\n" for path in paths]
        return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""

    def of_file(self, path: Path) -> str:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            with path.open("rb") as file:
                self._known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._known[key]


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})
