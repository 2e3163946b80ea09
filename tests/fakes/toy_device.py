"""A device without arithmetic, whose every mistake shows: KV slots hold a hash chain of (token,
position), and the next token is a hash of the ordered list that is read back through the page
table. A stale length, a wrong page, a wrong row, a replayed token or an old parameter changes the
output.

`FakeDevice` executes Launch, Sample and Resync in order, as a stream would; it keeps rows, page
tables, relay and logits exactly as the real executor must. `expected_outputs` is the plain engine:
one request, no pages, no batch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from aserve.amendments import amended_admit
from aserve.errors import StepError
from aserve.messages.base import array_i32, num_mask_words, pack_i32
from aserve.messages.changes import Amend
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, Grammar, SamplingParams
from aserve.messages.results import (
    BuildMask,
    MaskReady,
    PromptLogprobs,
    RowDrafts,
    RowEmbedding,
    RowLogprobs,
    SampleResult,
    StepFailed,
    StepResult,
)
from aserve.messages.step import Resync, RowInit, Sample, ScheduleBatch, stamp_of
from aserve.messages.transfers import KvFailed, KvReady, ReceiveKv
from aserve.scheduling.request import child_seed

POISON = -7  # what the device puts where nobody may read
TRANSFER_ERROR = StepError("the transfer failed").info()
Kv = list[int]
R = TypeVar("R")


def kv_value(previous: int, token: int, position: int) -> int:
    """What a slot holds: a chain, so that a wrong slot read while it was computed shows for
    ever.
    """
    return zlib.crc32(b"%d/%d/%d" % (previous, token, position))


def first_value(prompt: list[int], *, is_causal: bool) -> int:
    """The chain begins with it: a hash of the whole prompt, where tokens see those behind them."""
    return 0 if is_causal else zlib.crc32(np.asarray(prompt, np.int32).tobytes())


def row_key(init: RowInit) -> bytes:
    """Everything a row was told about sampling, but not the row's number."""
    return msgspec.msgpack.encode(msgspec.structs.replace(init, row=0, num_prompt_logprobs=-1))


def hidden_state(views: list[Kv], key: bytes, position: int) -> int:
    """The hash that stands for the logits at `position`: all that the layer groups see, and the
    row's parameters.
    """
    digest = zlib.crc32(key, position)
    for view in views:
        digest = zlib.crc32(np.asarray(view, np.int64).tobytes(), digest)
    return digest


def prompt_scores(
    digests: list[int], *, row: int, position: int, num_top: int, vocab_size: int
) -> PromptLogprobs:
    """The run of scores from `position` on; digests: those of the positions before each token."""
    table = [(digest + i, i) for digest in digests for i in range(num_top)]
    return PromptLogprobs(
        row=row,
        position=position,
        chosen=np.array([digest % 4093 for digest in digests], np.float32).tobytes(),
        ranks=pack_i32([1 + digest % vocab_size for digest in digests]),
        top_ids=pack_i32([value % vocab_size for value, _ in table]),
        top_logprobs=np.array([-i for _, i in table], np.float32).tobytes(),
    )


def token_logprobs(digests: list[int], *, row: int, num_top: int, vocab_size: int) -> RowLogprobs:
    """The logprobs of a row's tokens; digests: those that the tokens were picked from."""
    table = [(digest + 3 * i, i) for digest in digests for i in range(num_top)]
    return RowLogprobs(
        row=row,
        chosen=np.array([digest % 4091 for digest in digests], np.float32).tobytes(),
        top_ids=pack_i32([value % vocab_size for value, _ in table]),
        top_logprobs=np.array([value % 4099 for value, _ in table], np.float32).tobytes(),
    )


def embedding_of(digest: int) -> bytes:
    return np.array([digest % 4093, digest % 4099], np.float32).tobytes()


def pick(digest: int, allowed: list[int]) -> int:
    return allowed[digest % len(allowed)]


# ------------------------------------------------------------------------------- the toy grammar

TOY = Grammar("regex", "toy")  # who asks for it gets the masks of `ToyMatchers`


def allowed_ids(total: int, vocab_size: int) -> list[int]:
    """The toy grammar: after outputs that add up to `total`, only ids of the same remainder
    modulo 3 may follow.
    """
    return [token for token in range(vocab_size) if token % 3 == total % 3]


class ToyMatchers:
    """The matchers of all sequences, each fed each output exactly once."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._totals: dict[tuple[str, int], list[int]] = {}  # (sum, number of ids)

    def fill(self, ask: BuildMask) -> MaskReady:
        total = self._totals.setdefault((ask.request_id, ask.child), [0, 0])
        new_ids = array_i32(ask.new_ids)
        total[0] += int(new_ids.sum())
        total[1] += len(new_ids)
        if total[1] != ask.position:
            raise AssertionError(f"the matcher saw {total[1]} outputs at output {ask.position}")
        drafts = array_i32(ask.drafts).tolist()
        sums: list[int | None] = [total[0]]  # None: a draft that the grammar does not allow
        for token, parent in zip(
            drafts, array_i32(ask.parents).tolist() or range(len(drafts)), strict=True
        ):
            before = sums[parent]
            is_allowed = before is not None and token % 3 == before % 3
            sums.append(before + token if before is not None and is_allowed else None)
        words = np.zeros((len(sums), -(-self.vocab_size // 32)), np.uint32)
        for node, before in enumerate(sums):
            for token in () if before is None else allowed_ids(before, self.vocab_size):
                words[node, token // 32] |= np.uint32(1 << (token % 32))
        return MaskReady(
            request_id=ask.request_id,
            child=ask.child,
            position=ask.position,
            mask=words.view(np.int32).tobytes(),
        )


def ids_of_mask(mask: bytes, vocab_size: int) -> list[int]:
    words = np.frombuffer(mask, np.uint32)
    return [v for v in range(vocab_size) if words[v // 32] >> (v % 32) & 1]


# ------------------------------------------------------------------------------- the plain engine


def first_read(spec: EngineSpec, group: GroupSpec, kv_len: int) -> int:
    """The first position that the token at position `kv_len` depends on. The last token before it
    is computed anew and sees a whole window, but for a block, whose own queries see less behind it.
    """
    return 0 if group.window is None else max(0, kv_len - group.window + 1 - spec.decode.root_len)


def forced_ids(request: AdmitRequest, outputs: list[int]) -> list[int]:
    """What the limit of reasoning forces behind these outputs: what its closing tag lacks."""
    ids = request.reasoning
    if ids is None or ids.max_tokens is None:
        return []
    start = 0 if ids.is_open else _first_end(outputs[:16], ids.opens, 0)
    if start is None or _first_end(outputs, ids.closes, start) is not None:
        return []
    if len(outputs) - start < ids.max_tokens:
        return []
    tag = list(ids.closes[0])
    there = max(n for n in range(len(tag)) if outputs[max(start, len(outputs) - n) :] == tag[:n])
    return tag[there:]


def _first_end(outputs: list[int], tags: tuple[tuple[int, ...], ...], start: int) -> int | None:
    ends = range(start + 1, len(outputs) + 1)
    found = [e for e in ends for tag in tags if tuple(outputs[max(start, e - len(tag)) : e]) == tag]
    return min(found, default=None)


Changes = Iterable[tuple[int, Amend]]  # each with the outputs that were there when it was made


def as_changed(request: AdmitRequest, changes: Changes, num_outputs: int) -> AdmitRequest:
    """The request as it is with so many outputs."""
    for position, change in changes:
        if position <= num_outputs:
            request = amended_admit(request, change)
    return request


class PlainOutputs(NamedTuple):
    """`tokens` are all outputs; `digests` those of the tokens that the engine itself sampled."""

    tokens: list[int]
    digests: list[int]


def expected_outputs(request: AdmitRequest, child: int, spec: EngineSpec) -> list[int]:
    """What the sequence generates when it is alone in the world, up to its end."""
    return plain_outputs(request, child, spec).tokens


def expected_logprobs(
    request: AdmitRequest, digests: list[int], spec: EngineSpec
) -> RowLogprobs | None:
    """Of the tokens with these digests, in one run of row 0; None if the request wants none."""
    num_top = request.sampling.logprobs
    if num_top is None:
        return None
    return token_logprobs(digests, row=0, num_top=num_top, vocab_size=spec.vocab_size)


def plain_outputs(
    request: AdmitRequest, child: int, spec: EngineSpec, changes: Changes = ()
) -> PlainOutputs:
    sampling = request.sampling
    key = row_key(_row_init(request, child))
    tokens = array_i32(request.prompt_ids).tolist()
    prompt_len = len(tokens)
    if request.outputs:
        tokens += array_i32(request.outputs[child]).tolist()
    start = first_value(tokens[:prompt_len], is_causal=request.is_causal)
    chain: Kv = []
    digests: list[int] = []
    while True:
        num_outputs = len(tokens) - prompt_len
        now = as_changed(request, changes, num_outputs)
        max_tokens = now.sampling.max_tokens
        assert max_tokens is not None
        if num_outputs >= max_tokens:
            break
        if num_outputs > min_tokens_of(sampling) and tokens[-1] in request.end_ids:
            break
        forced = forced_ids(now, tokens[prompt_len:])
        if forced:
            tokens += forced[: max_tokens - num_outputs]
            continue
        extend_chain(chain, tokens, start=start)
        views = [chain[first_read(spec, group, len(chain)) :] for group in spec.groups]
        digest = hidden_state(views, key, len(tokens))
        digests.append(digest)
        allowed = list(range(spec.vocab_size))
        if sampling.grammar is not None:
            allowed = allowed_ids(sum(tokens[prompt_len:]), spec.vocab_size)
        tokens.append(pick(digest, allowed))
    return PlainOutputs(tokens[prompt_len:], digests)


def extend_chain(chain: Kv, tokens: list[int], *, start: int) -> None:
    for position in range(len(chain), len(tokens)):
        chain.append(kv_value(chain[-1] if chain else start, tokens[position], position))


def views_of(chain: Kv, spec: EngineSpec) -> list[Kv]:
    return [chain if group.window is None else chain[-group.window :] for group in spec.groups]


class PromptAnswer(NamedTuple):
    """What a request gets of its prompt."""

    scores: PromptLogprobs | None
    embedding: bytes | None


def expected_prompt(request: AdmitRequest, child: int, spec: EngineSpec) -> PromptAnswer:
    """All scores in one run, as if the row were 0."""
    wanted = request.sampling.prompt_logprobs
    tokens = array_i32(request.prompt_ids).tolist()
    start = first_value(tokens, is_causal=request.is_causal)
    chain: Kv = []
    digests: list[int] = []
    for end in range(1, len(tokens) + 1):
        extend_chain(chain, tokens[:end], start=start)
        digests.append(hidden_state(views_of(chain, spec), b"", end))
    is_scored = child == 0 and not any(request.outputs) and len(tokens) > 1
    scores = None
    if wanted is not None and is_scored and not request.awaits_kv:
        scores = prompt_scores(
            digests[:-1], row=0, position=1, num_top=wanted, vocab_size=spec.vocab_size
        )
    return PromptAnswer(scores, embedding_of(digests[-1]) if request.embeds else None)


def min_tokens_of(sampling: SamplingParams) -> int:
    """The toy grammar's masks allow an end at any time."""
    return 0 if sampling.grammar is not None else sampling.min_tokens


# Fields that a row is told as the client gave them.
AS_GIVEN = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "raw_logprobs"),
)


def _row_init(request: AdmitRequest, child: int) -> RowInit:
    sampling = request.sampling
    prompt_len = len(array_i32(request.prompt_ids))
    return RowInit(
        row=0,
        seed=child_seed(sampling.seed, child),
        prompt_len=prompt_len,
        min_len=prompt_len + min_tokens_of(sampling),
        end_ids=request.end_ids,
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        allowed_ids=sampling.allowed_token_ids,
        bad_word_ids=request.bad_word_ids,
        embeds=request.embeds,
        namespace=request.namespace,
        **{name: getattr(sampling, name) for name in AS_GIVEN},
    )


# ------------------------------------------------------------------------------- the device


class Window(NamedTuple):
    """The tokens that a step verifies for a row: the known ones, then drafts."""

    tokens: list[int]
    kv_len: int
    num_drafts: int
    parents: list[int] | None  # of the drafts, in a tree


def tree_shape(num_drafts: int, max_depth: int, kv_len: int) -> list[int]:
    """Returns the parents of a row's drafts, as in DraftTree. They depend on its length."""
    parents: list[int] = []
    depths = [0]
    for node in range(1, num_drafts + 1):
        parent = (kv_len + node * node) % node
        while depths[parent] == max_depth:
            parent = parents[parent - 1]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


class RowState:
    """One row of the row tables and of the relay."""

    def __init__(self, num_groups: int) -> None:
        self.init: RowInit | None = None
        self.key: bytes = b""
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.kv_len = 0  # after the last step that named the row
        # By position, what a recurrent layer knows of all tokens before it.
        self.states: dict[int, int] = {}
        self.last_token = POISON
        self.draft = POISON
        self.seq_len = POISON
        self.written_iter = 0
        self.held: Window | None = None  # whose logits wait for masks


class DeviceBug(Exception):
    """What debug checks on the device find: never allowed to happen in a trace."""


class Emitted(NamedTuple):
    """The tokens that a step gives one row, and the digests that they were picked from."""

    tokens: list[int]
    digests: list[int]


class FakeDevice:
    """Executes commands in order; with drafts it runs the two-token mode.

    `must_fail` and `must_fail_sample` inject commands that fail. `is_unsound` injects ones that run
    to their end and whose result is found to be no good only when it is read, as with NaN logits:
    then later commands run and succeed on what the bad one left behind, until the device `notices`
    or the Resync comes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        must_fail: Callable[[ScheduleBatch], bool] = lambda batch: False,
        must_fail_sample: Callable[[Sample], bool] = lambda sample: False,
        is_unsound: Callable[[ScheduleBatch | Sample], bool] = lambda command: False,
        notices: Callable[[], bool] = lambda: True,
    ) -> None:
        self.spec = spec
        self.kv: list[Kv] = [[POISON] * (g.num_pages * spec.page_size) for g in spec.groups]
        self.rows = [RowState(len(spec.groups)) for _ in range(spec.max_rows + 1)]
        # By slot of the first group: its token, and the token behind it, on which the KV of a
        # drafter with shifted inputs depends.
        num_slots = spec.groups[0].num_pages * spec.page_size
        self.token_pool = [POISON] * num_slots
        self.next_pool = [POISON] * num_slots
        self.checkpoints = [POISON] * spec.num_checkpoints  # states, by page
        self.whole_prompts: set[int] = set()  # seeds of requests that are not causal
        self.is_failed = False
        self.was_unsound = False  # a result since the last Resync was no good
        self.num_ignored = 0  # results that came after a failure and before its Resync
        self.last_iteration = 0
        self._must_fail = must_fail
        self._must_fail_sample = must_fail_sample
        self._is_unsound = is_unsound
        self._notices = notices
        self._written: list[tuple[int, int]] = []  # (group, slot) of the step that runs

    def run(
        self, command: ScheduleBatch | Sample | Resync
    ) -> StepResult | SampleResult | StepFailed | None:
        match command:
            case Resync():
                assert command.iteration == self.last_iteration + 1, "a resync names the next step"
                self.is_failed = self.was_unsound = False
                for row in self.rows:
                    row.held = None
                return None
            case Sample():
                return self._run_sample(command)
            case ScheduleBatch():
                assert command.iteration == self.last_iteration + 1, "iterations count launches"
                self.last_iteration = command.iteration
                return self._run_step(command)

    def receive_kv(
        self, transfer: ReceiveKv, request: AdmitRequest, *, fails: bool
    ) -> KvReady | KvFailed:
        """Runs a transfer: writes the KV as another engine has computed it. One that fails leaves
        anything in the pages.
        """
        spec, child = self.spec, transfer.child
        tokens = array_i32(request.prompt_ids).tolist()
        outputs = array_i32(request.outputs[child]).tolist() if request.outputs else []
        value = 0
        known = plain_outputs(request, child, spec).tokens[: len(outputs) + 1]
        for position, (token, behind) in enumerate(itertools.pairwise([*tokens, *known])):
            value = kv_value(value, token, position)
            if position < transfer.first:
                continue
            slot = int(array_i32(transfer.pages[0])[position // spec.page_size]) * spec.page_size
            slot += position % spec.page_size
            self.token_pool[slot], self.next_pool[slot] = token, behind
            for group, pages in enumerate(transfer.pages):
                page = int(array_i32(pages)[position // spec.page_size])
                if page:
                    slot = page * spec.page_size + position % spec.page_size
                    self.kv[group][slot] = ~value if fails else value
        assert transfer.num_tokens == position + 1
        if fails:
            return KvFailed(request.request_id, child, TRANSFER_ERROR)
        return KvReady(request.request_id, child)

    def _fails_already(self) -> bool:
        if self.was_unsound and self._notices():
            self.is_failed = True
        return self.is_failed

    def _run_step(self, batch: ScheduleBatch) -> StepResult | StepFailed:
        if self._fails_already():
            return _failure(batch.iteration, "an earlier step failed")
        self._apply(batch)
        self._read_checkpoints(batch)
        if self._must_fail(batch):
            self._scramble(batch)
            self._write_checkpoints(batch)
            self.is_failed = True
            return _failure(batch.iteration, "injected")
        result = self._forward(batch)
        judged = self._judge(batch, result)
        self._write_checkpoints(batch)
        return judged

    def _read_checkpoints(self, batch: ScheduleBatch) -> None:
        if batch.states is None:
            return
        kv_lens = _pairs(batch.rows, batch.kv_lens)
        for row, page in _pairs(batch.states.read_rows, batch.states.read_pages).items():
            self.rows[row].states = {kv_lens[row]: self.checkpoints[page]}

    def _write_checkpoints(self, batch: ScheduleBatch) -> None:
        if batch.states is None:
            return
        kv_lens, query_lens = (_pairs(batch.rows, x) for x in (batch.kv_lens, batch.query_lens))
        for row, page in _pairs(batch.states.written_rows, batch.states.written_pages).items():
            assert page, "page 0 is padding"
            end = kv_lens[row] + query_lens[row]
            self.checkpoints[page] = self.rows[row].states.get(end, POISON)

    def _judge(self, command: ScheduleBatch | Sample, result: R) -> R | StepFailed:
        """The result as it is read on the host; an unsound one spoils what its step left behind."""
        self.num_ignored += self.was_unsound
        if not self._is_unsound(command):
            return result
        self.was_unsound = True
        for group, slot in self._written:
            self.kv[group][slot] ^= 0x5A5A
        for row in array_i32(command.rows).tolist():
            state = self.rows[row]
            state.states = {end: value ^ 0x5A5A for end, value in state.states.items()}
            if state.last_token != POISON:
                state.last_token = (state.last_token + 1) % self.spec.vocab_size
        return _failure(command.iteration, "unsound")

    def _forward(self, batch: ScheduleBatch) -> StepResult:
        self._written.clear()
        held = set(array_i32(batch.held_rows).tolist())
        samples = set(array_i32(batch.sample_rows).tolist())
        drafts = array_i32(batch.verify.num_drafts).tolist() if batch.verify else None
        ids = array_i32(batch.input_ids).tolist()
        emitted: dict[int, Emitted] = {}
        scores: list[PromptLogprobs] = []
        embeddings: list[RowEmbedding] = []
        given: list[RowDrafts] = []
        start = 0
        for index, row in enumerate(array_i32(batch.rows).tolist()):
            query_len = int(array_i32(batch.query_lens)[index])
            num_drafts = drafts[index] if drafts else 0
            kv_len = self._read_length(batch, index, row)
            if num_drafts == query_len:
                start += query_len
                emitted[row] = self._denoise(batch, index, kv_len)
                continue
            tokens = self._resolve(batch, index, ids[start : start + query_len], num_drafts)
            start += query_len
            state = self.rows[row]
            state.kv_len = kv_len + query_len
            tree = batch.verify.tree if num_drafts and batch.verify else None
            parents = None if tree is None else tree_shape(num_drafts, tree.max_depth, kv_len)
            window = Window(tokens, kv_len, num_drafts, parents)
            if parents is not None:
                window = self._write_tree(row, window)
            else:
                self._check_next_tokens(row, kv_len, tokens[0])
                self._write_kv(row, tokens, kv_len)
                self._note_tokens(row, kv_len, tokens, int(array_i32(batch.next_ids)[index]))
                scores += self._score(row, kv_len)
                embeddings += self._embed(row)
            if row in held:
                state.held = window
                if num_drafts:
                    own = (window.tokens[-num_drafts:], window.parents or [])
                    given.append(RowDrafts(row, *map(pack_i32, own)))
            elif row in samples:
                emitted[row] = self._sample_window(batch.iteration, row, window)
        _check_covered(ids, start)
        return StepResult(
            batch.iteration,
            *_pack_tokens(emitted),
            logprobs=self._logprobs(emitted),
            prompt_logprobs=tuple(scores),
            embeddings=tuple(embeddings),
            drafts=tuple(given),
        )

    def _sample_window(
        self, iteration: int, row: int, window: Window, masks: list[list[int]] | None = None
    ) -> Emitted:
        """masks: the tokens that are allowed after each node; None: all."""
        allowed = masks or [list(range(self.spec.vocab_size))] * (1 + window.num_drafts)
        if window.parents is not None:
            emitted = self._verify_tree(row, window, allowed)
            self._stash(iteration, row, [window.tokens[0], *emitted.tokens][-1])
            return emitted
        emitted = self._verify(row, window, allowed)
        num_known = len(window.tokens) - window.num_drafts
        known = [*window.tokens[:num_known], *emitted.tokens]
        self._note_tokens(row, window.kv_len, known[:-1], known[-1])
        self._stash(iteration, row, known[-1])
        return emitted

    def _note_tokens(self, row: int, kv_len: int, tokens: list[int], next_token: int) -> None:
        for index, token in enumerate(tokens):
            slot = self._slot(row, 0, kv_len + index)
            self.token_pool[slot] = token
            self.next_pool[slot] = [*tokens, next_token][index + 1]

    def _check_next_tokens(self, row: int, kv_len: int, next_token: int) -> None:
        if not self.spec.decode.key_lookahead or self.was_unsound:
            return  # what follows an unsound result is dropped, whatever it read
        slots = [self._slot(row, 0, position) for position in range(kv_len)]
        expected = [*(self.token_pool[slot] for slot in slots[1:]), next_token][: len(slots)]
        if [self.next_pool[slot] for slot in slots] != expected:
            raise DeviceBug(f"row {row} reads KV that was computed before another token")

    def _score(self, row: int, before: int) -> list[PromptLogprobs]:
        """Of the positions from `before` on, as far as the prompt has a token after them."""
        state = self.rows[row]
        assert state.init is not None
        num_top, end = state.init.num_prompt_logprobs, min(state.kv_len, state.init.prompt_len - 1)
        if num_top < 0 or end <= before:
            return []
        digests = [self._digest(row, kv_len, b"") for kv_len in range(before + 1, end + 1)]
        sizes = {"num_top": num_top, "vocab_size": self.spec.vocab_size}
        return [prompt_scores(digests, row=row, position=before + 1, **sizes)]

    def _logprobs(self, emitted: dict[int, Emitted]) -> tuple[RowLogprobs, ...]:
        """Of the rows that want them, each as many as it has tokens."""
        wanted: list[RowLogprobs] = []
        for row, (_, digests) in emitted.items():
            init = self.rows[row].init
            assert init is not None
            if init.num_logprobs >= 0:
                sizes = {"num_top": init.num_logprobs, "vocab_size": self.spec.vocab_size}
                wanted.append(token_logprobs(digests, row=row, **sizes))
        return tuple(wanted)

    def _embed(self, row: int) -> list[RowEmbedding]:
        state = self.rows[row]
        assert state.init is not None
        if not state.init.embeds or state.kv_len != state.init.prompt_len:
            return []
        return [RowEmbedding(row, embedding_of(self._digest(row, state.kv_len, b"")))]

    def _apply(self, batch: ScheduleBatch) -> None:
        for init in batch.row_inits:
            self.rows[init.row] = RowState(len(self.spec.groups))
            self.rows[init.row].init = init
            self.rows[init.row].key = row_key(init)
            self.rows[init.row].kv_len = -1
        rows, kv_lens = array_i32(batch.rows).tolist(), array_i32(batch.kv_lens).tolist()
        lens = dict(zip(rows, kv_lens, strict=True))
        for group, writes in enumerate(batch.page_writes):
            columns = (array_i32(x).tolist() for x in (writes.rows, writes.columns, writes.pages))
            for row, column, page in zip(*columns, strict=True):
                self.rows[row].tables[group][column] = page
                if column * self.spec.page_size >= lens[row]:
                    self._empty(group, page)

    def _empty(self, group: int, page: int) -> None:
        """Nobody may read what the page's last owner left in it."""
        size = self.spec.page_size
        self.kv[group][page * size : (page + 1) * size] = [POISON] * size

    def _read_length(self, batch: ScheduleBatch, index: int, row: int) -> int:
        """Exact: the device's own length must agree. A bound: at least the published length,
        which is taken.
        """
        host = int(array_i32(batch.kv_lens)[index])
        state = self.rows[row]
        if batch.bounds[index]:
            self._expect(batch, index, row)
            if state.seq_len > host:
                raise DeviceBug(f"row {row}: length {state.seq_len} is above its bound {host}")
            return state.seq_len
        own = state.seq_len if state.seq_len != POISON else state.kv_len
        if own != -1 and own != host:
            raise DeviceBug(f"row {row}: exact length {host}, the device has {own}")
        return host

    def _resolve(
        self, batch: ScheduleBatch, index: int, ids: list[int], num_drafts: int
    ) -> list[int]:
        row = int(array_i32(batch.rows)[index])
        state = self.rows[row]
        resolved = list(ids)
        for place, token in enumerate(ids):
            if place >= len(ids) - num_drafts:
                self._expect(batch, index, row)
                resolved[place] = state.draft
            elif token < 0:
                self._expect(batch, index, row)
                if token != -row:
                    raise DeviceBug(f"row {row} has the placeholder {token}")
                resolved[place] = state.last_token
        return resolved

    def _expect(self, batch: ScheduleBatch, index: int, row: int) -> None:
        expected = int(array_i32(batch.expects)[index])
        found = self.rows[row].written_iter
        if not expected or found != expected:
            raise DeviceBug(
                f"row {row} reads the relay of step {expected}, it holds that of {found}"
            )

    def _write_kv(self, row: int, tokens: list[int], kv_len: int) -> None:
        init = self.rows[row].init
        assert init is not None
        is_causal = init.seed not in self.whole_prompts
        start = first_value(tokens[: init.prompt_len], is_causal=is_causal)
        states = self.rows[row].states
        for position, token in enumerate(tokens, start=kv_len):
            for group, kv in enumerate(self.kv):
                previous = self._value_before(row, group, position) if position else start
                slot = self._slot(row, group, position)
                kv[slot] = states[position + 1] = kv_value(previous, token, position)
                self._written.append((group, slot))
        first = kv_len + len(tokens) - self.spec.decode.max_tokens_per_step
        self.rows[row].states = {end: value for end, value in states.items() if end > first}

    def _value_before(self, row: int, group: int, position: int) -> int:
        """A recurrent layer has it in the states of the row alone."""
        if not self.spec.decode.is_recurrent:
            return self._read_kv(row, group, position - 1)
        state = self.rows[row].states.get(position, POISON)
        if state == POISON and not self.was_unsound:
            raise DeviceBug(f"row {row} begins at position {position} without a state")
        return state

    def _read_kv(self, row: int, group: int, position: int) -> int:
        value = self.kv[group][self._slot(row, group, position)]
        if value == POISON:
            raise DeviceBug(f"row {row} reads position {position} of group {group}, never written")
        return value

    def _slot(self, row: int, group: int, position: int) -> int:
        page = self.rows[row].tables[group].get(position // self.spec.page_size, 0)
        if page == 0:
            raise DeviceBug(f"row {row} reads position {position} of group {group} through no page")
        return page * self.spec.page_size + position % self.spec.page_size

    def _digest(self, row: int, kv_len: int, key: bytes | None = None) -> int:
        views = []
        for group, spec in enumerate(self.spec.groups):
            start = 0 if spec.window is None else max(0, kv_len - spec.window)
            if key is None:
                start = first_read(self.spec, spec, kv_len)
            views.append([self._read_kv(row, group, position) for position in range(start, kv_len)])
        return hidden_state(views, self.rows[row].key if key is None else key, kv_len)

    def _verify(self, row: int, window: Window, allowed: list[list[int]]) -> Emitted:
        """The sampled token after the root, and while drafts agree with what was sampled, the
        ones after them.
        """
        tokens, num_drafts = window.tokens, window.num_drafts
        root_len = window.kv_len + len(tokens) - num_drafts
        digests = [self._digest(row, root_len)]
        emitted = [pick(digests[0], allowed[0])]
        for depth in range(num_drafts):
            if tokens[len(tokens) - num_drafts + depth] != emitted[-1]:
                break
            digests.append(self._digest(row, root_len + depth + 1))
            emitted.append(pick(digests[-1], allowed[depth + 1]))
        if self._num_given(row, 1) == 0:
            emitted, digests = [], []
        if self._publishes:
            self.rows[row].seq_len = root_len + len(emitted) - 1
        return Emitted(emitted, digests)

    def _write_tree(self, row: int, window: Window) -> Window:
        """Writes the KV of all nodes. Drafts differ, so that mostly one of the first is right."""
        vocab_size, parents, kv_len = self.spec.vocab_size, window.parents, window.kv_len
        assert parents is not None
        drafts = [(token - index) % vocab_size for index, token in enumerate(window.tokens[1:])]
        tokens, depths = [window.tokens[0], *drafts], [0]
        self._write_kv(row, tokens[:1], kv_len)
        for node, parent in enumerate(parents, start=1):
            depths.append(depths[parent] + 1)
            for group, kv in enumerate(self.kv):
                slot = self._slot(row, group, kv_len + node)
                previous = self._read_kv(row, group, kv_len + parent)
                kv[slot] = kv_value(previous, tokens[node], kv_len + depths[node])
                self._written.append((group, slot))
        return window._replace(tokens=tokens)

    def _verify_tree(self, row: int, window: Window, allowed: list[list[int]]) -> Emitted:
        """The tokens along the path of drafts that were sampled. The KV of each draft on it is
        moved behind that of its parent.
        """
        tokens, kv_len, parents = window.tokens, window.kv_len, window.parents
        assert parents is not None
        emitted = Emitted([], [])
        last: int | None = 0 if self._num_given(row, 1) else None
        depth = 0
        while last is not None:
            for group, kv in enumerate(self.kv):
                target = self._slot(row, group, kv_len + depth)
                kv[target] = self._read_kv(row, group, kv_len + last)
            depth += 1
            emitted.digests.append(self._digest(row, kv_len + depth))
            emitted.tokens.append(pick(emitted.digests[-1], allowed[last]))
            children = [
                child
                for child, parent in enumerate(parents, start=1)
                if parent == last and tokens[child] == emitted.tokens[-1]
            ]
            last = children[0] if children else None
        self.rows[row].seq_len = kv_len + len(emitted.tokens)
        return emitted

    def _denoise(self, batch: ScheduleBatch, index: int, kv_len: int) -> Emitted:
        """A pass over a block of new tokens: the row gets some of the first ones, or none, and the
        KV of the others is of no use.
        """
        row = int(array_i32(batch.rows)[index])
        if array_i32(batch.expects)[index]:
            self._expect(batch, index, row)
        emitted = Emitted([], [])
        end = kv_len + int(array_i32(batch.query_lens)[index])
        for position in range(kv_len, end):
            emitted.digests.append(self._digest(row, position))
            emitted.tokens.append(pick(emitted.digests[-1], list(range(self.spec.vocab_size))))
            self._write_kv(row, emitted.tokens[-1:], position)
        num_given = self._num_given(row, end - kv_len)
        for position in range(kv_len + num_given, end):
            for group, kv in enumerate(self.kv):
                kv[self._slot(row, group, position)] = POISON
        state = self.rows[row]
        state.seq_len = kv_len + num_given
        state.written_iter = stamp_of(batch.iteration)
        return Emitted(emitted.tokens[:num_given], emitted.digests[:num_given])

    def _num_given(self, row: int, most: int) -> int:
        """The number of new tokens that this step gives the row: any that the mode allows."""
        caps = self.spec.decode
        least = min(caps.min_tokens_per_step, most)
        chance = zlib.crc32(b"%d/%d" % (self.last_iteration, row))
        return least + chance % (most - least + 1)

    @property
    def _publishes(self) -> bool:
        """Whether the host does not know how many tokens a step gives."""
        caps = self.spec.decode
        return caps.max_tokens_per_step > 1 or caps.min_tokens_per_step < 1

    def _stash(self, iteration: int, row: int, last_token: int) -> None:
        """The next draft is right about every other time: what the device itself would sample,
        or something else.
        """
        state = self.rows[row]
        state.last_token = last_token
        state.written_iter = stamp_of(iteration)
        if self.spec.decode.max_tokens_per_step > 1:
            state.draft = self._guess(row, last_token)

    def _guess(self, row: int, token: int) -> int:
        state = self.rows[row]
        views = []
        for group, spec in enumerate(self.spec.groups):
            start = 0 if spec.window is None else max(0, state.seq_len + 1 - spec.window)
            view = [self._read_kv(row, group, position) for position in range(start, state.seq_len)]
            previous = self._read_kv(row, group, state.seq_len - 1) if state.seq_len else 0
            views.append([*view, kv_value(previous, token, state.seq_len)])
        digest = hidden_state(views, state.key, state.seq_len + 1)
        wrong = (digest >> 8) & 1
        return (pick(digest, list(range(self.spec.vocab_size))) + wrong) % self.spec.vocab_size

    def _run_sample(self, sample: Sample) -> SampleResult | StepFailed:
        if self._fails_already():
            return _failure(sample.iteration, "an earlier step failed")
        if self._must_fail_sample(sample):
            self.is_failed = True
            return _failure(sample.iteration, "injected")
        rows = array_i32(sample.rows).tolist()
        size = num_mask_words(self.spec.vocab_size) * 4
        emitted: dict[int, Emitted] = {}
        self._written.clear()
        start = 0
        for row in rows:
            window, self.rows[row].held = self.rows[row].held, None
            if window is None:
                raise DeviceBug(f"row {row} is sampled without logits")
            ends = range(start, start + size * (1 + window.num_drafts), size)
            masks = [
                ids_of_mask(sample.masks[end : end + size], self.spec.vocab_size) for end in ends
            ]
            start = ends.stop
            emitted[row] = self._sample_window(sample.iteration, row, window, masks)
        if start != len(sample.masks):
            raise DeviceBug(f"{len(sample.masks)} bytes of masks for windows of {start}")
        logprobs = self._logprobs(emitted)
        result = SampleResult(sample.iteration, *_pack_tokens(emitted), logprobs=logprobs)
        return self._judge(sample, result)

    def _scramble(self, batch: ScheduleBatch) -> None:
        """A step that fails leaves anything behind in the rows that it named."""
        for row in array_i32(batch.rows).tolist():
            self.rows[row] = RowState(len(self.spec.groups))


def _pairs(rows: bytes, values: bytes) -> dict[int, int]:
    return dict(zip(array_i32(rows).tolist(), array_i32(values).tolist(), strict=True))


def _pack_tokens(emitted: dict[int, Emitted]) -> tuple[bytes, bytes, bytes]:
    counts = [len(row.tokens) for row in emitted.values()]
    flat = [token for row in emitted.values() for token in row.tokens]
    return pack_i32(list(emitted)), pack_i32(counts), pack_i32(flat)


def _check_covered(ids: list[int], end: int) -> None:
    if end != len(ids):
        raise DeviceBug(f"the spans cover {end} of {len(ids)} input ids")


def _failure(iteration: int, why: str) -> StepFailed:
    return StepFailed(iteration, StepError(f"step {iteration} failed: {why}").info())
