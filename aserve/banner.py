"""What was chosen, in two lines on stdout: nobody has to guess a default. It chooses nothing."""

from __future__ import annotations

from rich.console import Console

from aserve.config import Resolved
from aserve.launch import Launched


def announce(resolved: Resolved, launched: Launched, address: str) -> None:
    spec, options = launched.spec, resolved.scheduler
    pages = spec.groups[0].num_pages - 1
    console = Console(soft_wrap=True)
    console.print(
        f"aserve: {resolved.model_name} at {address}, {launched.about}, "
        f"context {spec.max_model_len} tokens",
        highlight=False,
        markup=False,
    )
    console.print(
        f"aserve: KV {pages} pages of {spec.page_size} = {pages * spec.page_size} tokens; "
        f"{spec.max_rows} rows, queue {options.max_queue}, depth {spec.depth}, lead {spec.lead}",
        highlight=False,
        markup=False,
    )
