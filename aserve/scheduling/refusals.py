"""Why a request is not accepted. Nothing here changes the state."""

from __future__ import annotations

from aserve.errors import ErrorInfo, NeverFits, QueueFull
from aserve.scheduling.budget import most_pages
from aserve.scheduling.clients import place_refusal
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def refusal_of(
    state: SchedulerState, children: list[Sequence], *, is_resumed: bool
) -> ErrorInfo | None:
    """Returns why a request can never run, or has no place to wait; None: it can, and has. With
    `is_resumed` it had its place before.
    """
    first = children[0]
    if not fits_alone(state, first):
        needed = most_pages(state, first.max_kv_len)[0]
        usable = state.spec.groups[0].num_pages - 1
        return NeverFits(
            f"This request needs {needed} KV pages of {state.spec.page_size} tokens "
            f"(prompt {first.prompt_len} + max_tokens {first.max_tokens}), but the engine has "
            f"{usable}. Ask for fewer tokens, or start the server with more --num-pages."
        ).info()
    if (longest := first.uncut_len) > state.spec.max_batched_tokens:
        what, cure = ("picture", "") if first.is_causal else ("prompt", "shorten it, or ")
        return NeverFits(
            f"This model computes a {what} in one step, and the {what}'s {longest} tokens "
            f"are more than the {state.spec.max_batched_tokens} of a step: {cure}start the server "
            f"with a larger --max-num-batched-tokens."
        ).info()
    most = state.spec.max_waiting + state.spec.max_rows
    if len(children) > most:
        return NeverFits(
            f"This request asks for n = {len(children)} sequences, but the engine holds at most "
            f"{most}: {state.spec.max_rows} that run and {state.spec.max_waiting} that wait. Ask "
            f"for fewer, or start the server with a larger --max-queue."
        ).info()
    if is_resumed:
        return None
    num_places = state.spec.max_waiting + state.rows.num_free  # these rows are taken soon
    num_left = num_places - state.num_waiting - len(children)
    if num_left < 0:
        return QueueFull(
            f"The queue holds {state.num_waiting} of at most {num_places} waiting sequences, and "
            f"this request adds {len(children)}. Try again later.",
            retry_after_s=1.0,
        ).info()
    num_places = state.spec.max_waiting
    return place_refusal(first.client, len(children), num_free=num_left, num_places=num_places)


def fits_alone(state: SchedulerState, sequence: Sequence, *, max_kv_len: int | None = None) -> bool:
    """Returns whether the sequence could finish if it ran alone: the test at admission to the
    queue.
    """
    num_positions = sequence.max_kv_len if max_kv_len is None else max_kv_len
    needed = most_pages(state, num_positions)
    if (longest := sequence.uncut_len) > 1:
        whole, uncut = state.num_pages(num_positions), state.num_pages(longest)
        needed = tuple(min(whole, pages + uncut) for pages in needed)
    return all(
        need < group.num_pages for need, group in zip(needed, state.spec.groups, strict=True)
    )
