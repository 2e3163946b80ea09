"""Hands out what a step computed for prompts: the logprobs of their tokens, and embeddings.

Each logprob is handed out once and in order, however often its position is computed. The only
writer of `Sequence.num_scored`.
"""

from __future__ import annotations

from aserve.messages.base import num_values
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import PromptLogprobs, StepResult
from aserve.scheduling.flights import Step
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def hand_out_prompts(state: SchedulerState, result: StepResult, step: Step) -> None:
    """NOTE: held rows are included: their Sample comes later and has no results of prompts."""
    outputs: list[SequenceOutput] = []
    for scores in result.prompt_logprobs:
        index = step.index_of(scores.row)
        if not step.is_dropped(index):
            outputs += _unseen_scores(step.sequences[index], scores)
    for embedding in result.embeddings:
        index = step.index_of(embedding.row)
        if not step.is_dropped(index):
            outputs.append(_prompt_output(step.sequences[index], embedding=embedding.values))
    if outputs:
        state.effects.append(StepOutput(iteration=result.iteration, sequences=tuple(outputs)))


def _unseen_scores(sequence: Sequence, scores: PromptLogprobs) -> list[SequenceOutput]:
    """A sequence that was retracted begins again at the start of a page, before its last score."""
    assert sequence.num_scored >= scores.position, "scores come in order"
    unseen = scores_from(scores, sequence.num_scored)
    if unseen is None:
        return []
    sequence.num_scored += num_values(unseen.chosen)
    return [_prompt_output(sequence, scores=unseen)]


def _prompt_output(
    sequence: Sequence, *, scores: PromptLogprobs | None = None, embedding: bytes | None = None
) -> SequenceOutput:
    return SequenceOutput(
        request_id=sequence.request_id,
        child=sequence.child,
        position=sequence.num_outputs,
        token_ids=b"",
        cached_len=sequence.cached_len,
        prompt_logprobs=scores,
        embedding=embedding,
    )


def scores_from(scores: PromptLogprobs, position: int) -> PromptLogprobs | None:
    """Returns the scores of the tokens from `position` on, or None if there are none."""
    num_tokens, num_seen = num_values(scores.chosen), max(position - scores.position, 0)
    if num_seen >= num_tokens:
        return None
    if not num_seen:
        return scores
    return PromptLogprobs(
        row=scores.row,
        position=scores.position + num_seen,
        chosen=scores.chosen[len(scores.chosen) // num_tokens * num_seen :],
        ranks=scores.ranks[len(scores.ranks) // num_tokens * num_seen :],
        top_ids=scores.top_ids[len(scores.top_ids) // num_tokens * num_seen :],
        top_logprobs=scores.top_logprobs[len(scores.top_logprobs) // num_tokens * num_seen :],
    )
