"""What the client of one sequence saw, and the proof that it is what the plain engine gives: its
tokens, their logprobs, the prompt's scores, the embedding, and one last message that says why the
sequence ended.
"""

from __future__ import annotations

import msgspec

from aserve.errors import ErrorInfo
from aserve.messages.base import array_i32
from aserve.messages.changes import Amend
from aserve.messages.executor import EngineSpec
from aserve.messages.output import Retired, SequenceOutput
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.messages.results import PromptLogprobs, RowLogprobs
from tests.fakes.toy_device import (
    TRANSFER_ERROR,
    PlainOutputs,
    as_changed,
    expected_logprobs,
    expected_prompt,
    forced_ids,
    min_tokens_of,
    plain_outputs,
)

POISON_SEED = 666  # a request with this seed breaks every step that names it


class FailedMask(msgspec.Struct, frozen=True):
    position: int  # the output that it was for
    error: ErrorInfo


class Story:
    """`cancels` are those that came after the request and before its end was seen."""

    def __init__(self, request: AdmitRequest, child: int, spec: EngineSpec) -> None:
        self.request = request
        self.child = child
        self.spec = spec
        self.before: list[int] = (
            array_i32(request.outputs[child]).tolist() if request.outputs else []
        )
        self.tokens: list[int] = []
        self.num_sampled = 0  # of them
        self.logprobs: list[RowLogprobs] = []
        self.scores: list[PromptLogprobs] = []
        self.embeddings: list[bytes] = []
        self.ends: list[Retired] = []
        self.cancels: list[Cancel] = []
        self.changes: list[tuple[int, Amend]] = []  # with the number of outputs before each
        self.failed_mask: FailedMask | None = None

    @property
    def known(self) -> list[int]:
        """The prompt and every output so far."""
        return [*array_i32(self.request.prompt_ids).tolist(), *self.before, *self.tokens]

    def take(self, output: SequenceOutput) -> None:
        assert not self.ends, "an output after the last message"
        position = len(self.before) + len(self.tokens)
        assert output.position == position, "an output is lost or doubled"
        token_ids = array_i32(output.token_ids).tolist()
        num_scored = sum(len(run.chosen) // 4 for run in output.logprobs)
        outputs = self.before + self.tokens
        request = as_changed(self.request, self.changes, len(outputs))
        is_forced = bool(token_ids) and bool(forced_ids(request, outputs))
        wants_logprobs = self.request.sampling.logprobs is not None and not is_forced
        assert num_scored == (len(token_ids) if wants_logprobs else 0)
        self.num_sampled += 0 if is_forced else len(token_ids)
        self.tokens += token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.scores.append(output.prompt_logprobs)
        if output.embedding is not None:
            self.embeddings.append(output.embedding)

    def check(self) -> None:
        name = f"{self.request.request_id}/{self.child}"
        assert len(self.ends) == 1, f"{name} ended {self.ends}"
        plain = plain_outputs(self.request, self.child, self.spec, self.changes)
        got = self.before + self.tokens
        assert got == plain.tokens[: len(got)], f"{name}: {got} is not {plain.tokens}"
        self._check_end(self.ends[0], plain, got)
        self._check_logprobs(plain)
        self._check_prompt()

    def _check_end(self, end: Retired, plain: PlainOutputs, got: list[int]) -> None:
        """Each end has one cause, and says what that cause makes it say."""
        cancel = self.cancels[0] if self.cancels else None
        if end.reason == "error":
            self._check_failure(end, got)
        elif end.reason == "length" or end.stop_id is not None:
            assert got == plain.tokens, f"{end} came early: {got} of {plain.tokens}"
            is_stop = _ends_itself(self.request, plain.tokens)
            stop_id = plain.tokens[-1] if is_stop else None
            assert (end.reason, end.stop_id) == ("stop" if is_stop else "length", stop_id)
        else:
            assert cancel is not None, f"{end}, but nobody cancelled it"
            assert end.reason == cancel.reason
        was_cut = end.reason == "stop" and end.stop_id is None and cancel is not None
        assert end.num_outputs == (cancel.kept if was_cut and cancel is not None else len(got))
        assert (end.error is not None) == (end.reason == "error")
        if self.failed_mask is not None and cancel is None:
            assert end.reason == "error", "a sequence went on after its mask failed"

    def _check_failure(self, end: Retired, got: list[int]) -> None:
        failed = self.failed_mask
        if self.request.awaits_kv and end.error == TRANSFER_ERROR:
            assert not got[len(self.before) :]
            return
        if failed is not None and end.error == failed.error:
            assert len(got) == failed.position, "a token was drawn without its mask"
            return
        assert self.request.sampling.seed == POISON_SEED, "an innocent request was failed"
        assert end.error is not None
        assert "failed twice on this request alone" in end.error.message

    def _check_logprobs(self, plain: PlainOutputs) -> None:
        """A run for each output, one after the other."""
        digests = plain.digests[: self.num_sampled]
        expected = expected_logprobs(self.request, digests, self.spec)
        if expected is None:
            assert not self.logprobs
            return
        assert b"".join(run.chosen for run in self.logprobs) == expected.chosen
        assert b"".join(run.top_ids for run in self.logprobs) == expected.top_ids
        assert b"".join(run.top_logprobs for run in self.logprobs) == expected.top_logprobs

    def _check_prompt(self) -> None:
        """Scores come once each and in order; a client that stayed has all, and the embedding."""
        expected = expected_prompt(self.request, self.child, self.spec)
        embeddings = [] if expected.embedding is None else [expected.embedding]
        if expected.scores is None:
            assert not self.scores
        elif self.scores:
            got = joined(self.scores)
            assert got == cut(expected.scores, len(got.chosen) // 4), self.request.request_id
        if not self.cancels and self.ends[0].reason != "error":
            num_scored = sum(len(scores.chosen) for scores in self.scores)
            assert num_scored == (len(expected.scores.chosen) if expected.scores else 0)
            assert self.embeddings == embeddings
        assert self.embeddings in ([], embeddings)


def joined(runs: list[PromptLogprobs]) -> PromptLogprobs:
    """Runs that follow each other as one, of row 0."""
    position = runs[0].position
    for run in runs:
        assert run.position == position, "a score is lost or doubled"
        position += len(run.chosen) // 4
    return PromptLogprobs(
        row=0,
        position=runs[0].position,
        chosen=b"".join(run.chosen for run in runs),
        ranks=b"".join(run.ranks for run in runs),
        top_ids=b"".join(run.top_ids for run in runs),
        top_logprobs=b"".join(run.top_logprobs for run in runs),
    )


def cut(run: PromptLogprobs, num_tokens: int) -> PromptLogprobs:
    """The first tokens of a run."""
    top_bytes = len(run.top_ids) // (len(run.chosen) // 4) * num_tokens
    return PromptLogprobs(
        row=run.row,
        position=run.position,
        chosen=run.chosen[: 4 * num_tokens],
        ranks=run.ranks[: 4 * num_tokens],
        top_ids=run.top_ids[:top_bytes],
        top_logprobs=run.top_logprobs[:top_bytes],
    )


def _ends_itself(request: AdmitRequest, tokens: list[int]) -> bool:
    return len(tokens) > min_tokens_of(request.sampling) and tokens[-1] in request.end_ids
