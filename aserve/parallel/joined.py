"""The results of data-parallel ranks, joined into those of one engine.

Each rank samples its own rows, whose numbers differ from those of all others. A step has failed if
it has failed on one rank: what the others computed for its rows is not whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from aserve.errors import BugError
from aserve.messages.results import SampleResult, StepFailed, StepResult

Outcome: TypeAlias = StepResult | SampleResult | StepFailed


def joined(parts: Sequence[Outcome]) -> StepResult | StepFailed:
    """Returns the result of a step from those of all ranks, in their order."""
    steps: list[StepResult] = []
    for part in parts:
        if isinstance(part, StepFailed):
            return part
        if not isinstance(part, StepResult):
            raise BugError(f"a rank answered step {part.iteration} by the result of a Sample")
        steps.append(part)
    return StepResult(
        iteration=steps[0].iteration,
        rows=b"".join(step.rows for step in steps),
        counts=b"".join(step.counts for step in steps),
        tokens=b"".join(step.tokens for step in steps),
        logprobs=tuple(record for step in steps for record in step.logprobs),
        prompt_logprobs=tuple(record for step in steps for record in step.prompt_logprobs),
        embeddings=tuple(record for step in steps for record in step.embeddings),
        drafts=tuple(record for step in steps for record in step.drafts),
        took_us=max(step.took_us for step in steps),
    )
