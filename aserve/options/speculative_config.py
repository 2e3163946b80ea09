"""Reads the JSON object of vLLM's `--speculative-config` as options of aserve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from aserve.gpu.spec.registry import BLOCK, COUPLED, METHODS, REJECTION

# Its fields, and the options that take their values as they are.
FIELDS: Mapping[str, str] = {
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
    "speculative_token_tree": "speculative_token_tree",
    "prompt_lookup_min": "speculative_min_match_len",
    "prompt_lookup_max": "speculative_max_match_len",
}
# Fields that change nothing here, with the values that they may have.
NEUTRAL: Mapping[str, object] = {
    "draft_tensor_parallel_size": 1,
    "draft_sample_method": "probabilistic",
}
OF_MODULES = "_mtp"  # the methods of vLLM that name the family of the modules
VERIFICATION = "rejection_sample_method"
VERIFICATIONS: Mapping[str, str] = {"standard": REJECTION, "strict": REJECTION, "block": BLOCK}
EXAMPLE = '{"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4}'


def read_speculative_config(value: str) -> Mapping[str, str]:
    """Returns the options by name. Raises ValueError for what they cannot say."""
    try:
        given = msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not a JSON object ({error}), such as {EXAMPLE}") from None
    method = given.pop("method", "draft_model" if "model" in given else None)
    settings = {"speculative_algorithm": _algorithm_of(method)}
    for name, field in given.items():
        if name in NEUTRAL and field in (None, NEUTRAL[name]):
            continue
        if name == VERIFICATION:
            settings["speculative_verification"] = _verification_of(field)
            continue
        if name not in FIELDS:
            known = ", ".join(("method", *FIELDS, VERIFICATION))
            raise ValueError(f"the field {name!r} is not known (known: {known})")
        settings[FIELDS[name]] = str(field)
    if "speculative_token_tree" in settings:  # of which vLLM counts the nodes
        num_nodes = settings.pop("speculative_num_steps", None)
        if num_nodes is not None and num_nodes.isdecimal():
            settings["speculative_num_draft_tokens"] = str(int(num_nodes) + 1)
    return settings


def _algorithm_of(method: object) -> str:
    if isinstance(method, str):
        if method in METHODS:
            return METHODS[method]
        if method.endswith(OF_MODULES):
            return METHODS["mtp"]
    known = ", ".join(sorted(METHODS))
    raise ValueError(f"the method {method!r} is not known (known: {known}, *{OF_MODULES})")


def _verification_of(field: object) -> str:
    if field is None:
        return COUPLED
    if field not in VERIFICATIONS:
        known = ", ".join(VERIFICATIONS)
        raise ValueError(f"the {VERIFICATION} {field!r} is not known (known: {known})")
    return VERIFICATIONS[str(field)]
