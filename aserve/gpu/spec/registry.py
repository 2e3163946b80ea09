"""The drafters by the name of their algorithm. A new one is a file in this folder and a row here.

NOTE: `--speculative-algorithm` takes its choices from here, so this file imports neither torch nor
a drafter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aserve.gpu.spec.request import DraftRequest, LoadedDrafter


def _load_in(
    module: str,
    request: DraftRequest,
    *,
    has_token_map: bool = False,
    takes_pictures: bool = False,
) -> LoadedDrafter:
    """`takes_pictures`: it drafts for models that read pictures, or refuses some of them itself."""
    if not has_token_map:
        request.refuse_token_map()
    if not takes_pictures:
        request.refuse_pictures()
    loaded: LoadedDrafter = importlib.import_module(f"aserve.gpu.spec.{module}").load(request)
    return loaded


ALGORITHMS: Mapping[str, Callable[[DraftRequest], LoadedDrafter]] = {
    "DFLASH": partial(_load_in, "dflash"),
    "EAGLE": partial(_load_in, "eagle", has_token_map=True),
    "EAGLE3": partial(_load_in, "eagle3"),
    "FROZEN_KV_MTP": partial(_load_in, "frozen_kv"),
    "NEXTN": partial(_load_in, "nextn", takes_pictures=True),
    "NGRAM": partial(_load_in, "ngram", takes_pictures=True),
    "STANDALONE": partial(_load_in, "standalone", takes_pictures=True),
}

# The methods of verification. All but the first one need the distributions of the drafts.
COUPLED, REJECTION, BLOCK = VERIFICATIONS = ("coupled", "rejection", "block")

# vLLM's names of these, for its --speculative-config.
METHODS: Mapping[str, str] = {
    "dflash": "DFLASH",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "ngram": "NGRAM",
}
