"""The algorithms that denoise the blocks of diffusion language models, by the names that SGLang
gives them.

NOTE: `--dllm-algorithm` takes its choices from here, so this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aserve.errors import ConfigError

NAME, CONFIG = "dllm_algorithm", "dllm_algorithm_config"


class Denoising(msgspec.Struct, frozen=True):
    """The settings of a denoising pass (algorithm.py)."""

    threshold: float  # a masked position is filled if its token is likelier
    edit_threshold: float | None = None  # a filled one is replaced above it; None: never
    max_post_edit_steps: int = 0  # passes that only edit
    penalty_lambda: float = 0.0  # taken off the logit of the token before a position


ALGORITHMS: Mapping[str, Denoising] = {
    "LowConfidence": Denoising(threshold=0.95),
    "JointThreshold": Denoising(threshold=0.5, edit_threshold=0.0, max_post_edit_steps=16),
}
DEFAULT = "LowConfidence"


def denoising_of(algorithm: str | None, settings: Mapping[str, object]) -> Denoising:
    """Returns the algorithm's settings. Those that are not given have the defaults of SGLang."""
    name = algorithm or DEFAULT
    defaults = ALGORITHMS[name]
    fields = msgspec.structs.asdict(defaults)
    known = [*fields] if defaults.edit_threshold is not None else ["threshold"]
    if unknown := settings.keys() - set(known):
        raise ConfigError(
            f"--dllm-algorithm-config has {', '.join(sorted(unknown))}, which {name} does not "
            f"know; it knows {', '.join(known)}",
            param=CONFIG,
        )
    try:
        return msgspec.convert({**fields, **settings}, Denoising)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--dllm-algorithm-config: {error}", param=CONFIG) from None
