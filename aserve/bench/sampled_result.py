"""What a device answers to a step, without computing anything."""

from __future__ import annotations

from aserve.messages import ScheduleBatch, StepResult, array_i32, pack_i32


def result_of(batch: ScheduleBatch, *, vocab_size: int) -> StepResult:
    """One token for each row that samples."""
    num_samples = len(array_i32(batch.sample_rows))
    return StepResult(
        iteration=batch.iteration,
        rows=batch.sample_rows,
        counts=pack_i32([1] * num_samples),
        tokens=pack_i32([batch.iteration % vocab_size] * num_samples),
    )
