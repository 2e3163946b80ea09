"""The checks of a request before the scheduler's state machine sees it.

WHY: a decision that raises leaves the state half changed, so an exception in it ends the engine.
What could raise because of one request is therefore looked for here, while nothing has changed yet.
"""

from __future__ import annotations

from aserve.errors import BugError
from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.requests import AdmitRequest

INT64_MAX = 2**63 - 1


def check_request(
    request: AdmitRequest, spec: EngineSpec, *, has_masks: bool, has_transfers: bool = False
) -> None:
    """Raises a BugError for what the text side promises never to send."""
    sampling = request.sampling
    max_tokens = sampling.max_tokens
    prompt_len = _check_ids(request.prompt_ids, spec, what="prompt")
    if max_tokens is None or max_tokens < 0:
        raise BugError(f"max_tokens is {max_tokens}, and was not resolved")
    if not 0 < prompt_len <= spec.max_model_len - max_tokens:
        raise BugError(
            f"a prompt of {prompt_len} tokens and {max_tokens} new ones are not within 1 and "
            f"{spec.max_model_len}"
        )
    if sampling.n < 1 or not -INT64_MAX - 1 <= sampling.seed <= INT64_MAX:
        raise BugError(f"n is {sampling.n}, and the seed {sampling.seed}")
    if sampling.grammar is not None and not has_masks:
        raise BugError("a request with a grammar came to an engine that fills no masks")
    if sampling.grammar is not None and not spec.decode.root_len:
        raise BugError("a request with a grammar came to a decode mode that takes no masks")
    if request.awaits_kv and (not has_transfers or not max_tokens):
        raise BugError("a request that awaits KV came to an engine that gets none, or for no token")
    if request.outputs and len(request.outputs) != sampling.n:
        raise BugError(f"there are outputs of {len(request.outputs)} of {sampling.n} children")
    for outputs in request.outputs:
        num_outputs = _check_ids(outputs, spec, what="outputs")
        if num_outputs > max_tokens:
            raise BugError(f"{num_outputs} outputs came with max_tokens {max_tokens}")


def _check_ids(data: bytes, spec: EngineSpec, *, what: str) -> int:
    """The number of these requests."""
    ids = array_i32(data)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size):
        raise BugError(f"the {what} has ids that are not within 0 and {spec.vocab_size - 1}")
    return len(ids)
