"""`aserve verify`: computes the tokens of a receipt again and says where they differ.

The model gets the prompt with its outputs in one prefill (gpu/teacher_forcing.py), so a receipt of
a thousand tokens takes as long as a prompt of a thousand tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aserve.config import Resolved
from aserve.errors import BugError, ConfigError, InvalidRequest, StepError
from aserve.grammar.compile import Compiler
from aserve.grammar.matching import Rules, SequenceMatcher
from aserve.host.environment import prepare_process
from aserve.load import build_options, find_model, vocabulary_of
from aserve.messages.base import MASK_BITS, ArrayI32, array_i32, num_mask_words, pack_i32
from aserve.messages.changes import LoadLora
from aserve.messages.executor import SchedulerEvent, Ticket
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest, GenerateRequest, TokenPrompt
from aserve.messages.results import BuildMask
from aserve.messages.step import Launch
from aserve.receipts.digest import Digests
from aserve.receipts.record import (
    NUMERIC_OPTIONS,
    ModelDigest,
    Receipt,
    ReceiptOutput,
    this_machine,
)
from aserve.scheduling.reasoning import forced_ids
from aserve.scheduling.request import child_seed
from aserve.scheduling.scheduler import Scheduler
from aserve.text.lengths import PromptLimits
from aserve.text.load import load_text
from aserve.text.prompt import PromptEncoder

if TYPE_CHECKING:
    from aserve.gpu.teacher_forcing import Difference, Expected, Outcome

SAME, DIFFERENT, UNUSABLE = 0, 1, 2  # exit codes
# How far rounding may move a logit when products are summed in another order (docs/receipts.md).
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 2e-3,
    "bfloat16": 0.5,
    "float16": 0.1,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    code: int
    lines: tuple[str, ...]


def options_of_receipt(receipt: Receipt, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the options for computing a receipt again: its settings, unless `given` has others.
    Nothing may come from the prefix cache, because every position is computed. NOTE: a receipt may
    be anybody's, so it sets no other options.
    """
    settings = {name: receipt.settings.get(name) for name in NUMERIC_OPTIONS}
    texts = {name: str(value).lower() for name, value in settings.items() if value}
    lora = {"enable_lora": "true", "max_loras": "1"} if receipt.model.adapter else {}
    return {**texts, **lora, **given, "no_prefix_cache": "true", "eager": "true"}


def verify(resolved: Resolved, receipt: Receipt, *, adapter_dir: Path | None = None) -> Verdict:
    """`resolved` has the options of `options_of_receipt`."""
    if altered := receipt.altered():
        reason = f"altered: the hashes of the receipt do not fit its {', '.join(altered)}"
        return Verdict(UNUSABLE, (reason,))
    prepare_process(resolved.machine.threads)
    model_dir = find_model(resolved)
    if others := [*_other_models(resolved, receipt, model_dir, adapter_dir)]:
        return Verdict(UNUSABLE, tuple(others))
    notes = [*_notes(resolved, receipt)]
    recomputation = Recomputation(resolved, model_dir, adapter_dir)
    outcomes = asyncio.run(_outcomes(recomputation, receipt))
    return verdict_of(receipt, outcomes, notes)


async def _outcomes(recomputation: Recomputation, receipt: Receipt) -> list[Outcome]:
    async with recomputation:
        return await recomputation.outcomes(receipt)


def verdict_of(receipt: Receipt, outcomes: list[Outcome], notes: Iterable[str] = ()) -> Verdict:
    is_different = any(_real(outcome) for outcome in outcomes)
    lines = (line for pair in zip(receipt.outputs, outcomes, strict=True) for line in _told(*pair))
    return Verdict(DIFFERENT if is_different else SAME, (*notes, *lines))


def _other_models(
    resolved: Resolved, receipt: Receipt, model_dir: Path, adapter_dir: Path | None
) -> Iterator[str]:
    digests = Digests()
    model = resolved.model
    has_weights = model.load_format != "dummy"
    found = digests.of(model_dir, has_weights=has_weights, tokenizer=model.tokenizer)
    yield from _differing("model", receipt.model.digest, found)
    if receipt.model.adapter is None:
        return
    if adapter_dir is None:
        yield "the receipt is of a LoRA adapter: name its directory with --adapter"
        return
    yield from _differing("adapter", receipt.model.adapter, digests.of(adapter_dir))


def _differing(what: str, expected: ModelDigest, found: ModelDigest) -> Iterator[str]:
    """WHY: the tokenizer decides the text, but not which token follows which."""
    for name in ("weights", "config"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            yield (
                f"another {what}: the SHA-256 of its {name} is {theirs[:16] or 'missing'} in the "
                f"receipt, and {ours[:16] or 'missing'} here"
            )


def _notes(resolved: Resolved, receipt: Receipt) -> Iterator[str]:
    """Yields a note for each difference from the server that made the receipt which may change the
    last bits of a result.
    """
    here, there = this_machine(), receipt.machine
    for name in here.__struct_fields__:
        if getattr(here, name) != getattr(there, name):
            yield f"note: {name} was {getattr(there, name)}, and here it is {getattr(here, name)}"
    used = dataclasses.asdict(resolved.model) | dataclasses.asdict(resolved.machine)
    used |= dataclasses.asdict(resolved.kv)
    for name, value in receipt.settings.items():
        if name in used and used[name] != value:
            yield f"note: --{name.replace('_', '-')} was {value}, and here it is {used[name]}"


def _real(outcome: Outcome) -> Difference | None:
    """Returns the first difference that rounding cannot explain."""
    return next((each for each in outcome.differences if not each.is_rounding), None)


def _told(output: ReceiptOutput, outcome: Outcome) -> Iterator[str]:
    where = f"choice {output.index}"
    num_tokens = len(output.token_ids)
    difference = _real(outcome)
    if difference is None:
        num_rounded = len(outcome.differences)
        gap = max((each.gap for each in outcome.differences), default=0.0)
        rounded = f"; {num_rounded} of them within rounding, by {gap:.2g}" if num_rounded else ""
        yield f"{where}: yes, {num_tokens} tokens were computed again{rounded}"
        return
    num_same = num_tokens - len(outcome.differences)
    yield (
        f"{where}: no, token {difference.position} is {difference.expected} in the receipt, and "
        f"{difference.drawn} here, whose logit with noise is {difference.gap:.3g} higher; "
        f"{num_same} of {num_tokens} tokens are the same"
    )
    if outcome.variance and outcome.is_plausible:
        yield (
            f"{where}: the tokens are likely ones of this model and prompt, so the seed is another"
        )
    else:
        yield f"{where}: the tokens are no likely ones of this model, prompt and settings"


class Recomputation:
    """A model whose decode mode checks the outputs of one sequence after the other. It loads when
    it is made, and runs between entering and leaving.
    """

    def __init__(self, resolved: Resolved, model_dir: Path, adapter_dir: Path | None) -> None:
        from aserve.gpu.build import build_executor
        from aserve.gpu.teacher_forcing import TeacherForcing

        self._mode = TeacherForcing()
        self._adapter_dir = adapter_dir
        options = dataclasses.replace(build_options(resolved, model_dir), max_rows=1)
        self._executor = build_executor(options, mode=self._mode)
        self._is_deterministic = resolved.machine.deterministic
        self._text = load_text(model_dir, resolved.model)
        spec = self._executor.spec
        limits = PromptLimits(spec.max_model_len, spec.vocab_size)
        self._encoder = PromptEncoder(self._text.tokenizer, template=None, limits=limits)

    async def __aenter__(self) -> Recomputation:
        self._executor.start(asyncio.get_running_loop())
        if self._adapter_dir is not None:
            error = await self._executor.run_job(LoadLora(1, 1, str(self._adapter_dir)))
            if error is not None:
                self._executor.close()
                raise ConfigError(error.message)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.close()

    async def outcomes(self, receipt: Receipt) -> list[Outcome]:
        """Returns the outcome of each output of the receipt."""
        return [await self._outcome(receipt, output) for output in receipt.outputs]

    async def _outcome(self, receipt: Receipt, output: ReceiptOutput) -> Outcome:
        if output.token_ids:
            request = self._request(receipt, output)
            is_exact = self._is_deterministic and this_machine() == receipt.machine
            tolerance = 0.0 if is_exact else TOLERANCES[self._executor.spec.dtype]
            self._mode.expect(self._expected(request, output, tolerance=tolerance))
            await self._compute(request, output)
            if self._mode.outcome.num_checked != len(output.token_ids):
                raise StepError("the engine ended before all tokens were checked")
        return self._mode.taken()

    def _request(self, receipt: Receipt, output: ReceiptOutput) -> AdmitRequest:
        """Returns the request of a single sequence."""
        if not 0 <= output.prompt < len(receipt.prompts):
            raise InvalidRequest(f"the receipt has no prompt {output.prompt}")
        self._encoder.check_ids(output.token_ids, param="outputs")
        sampling = msgspec.structs.replace(
            receipt.sampling,
            seed=child_seed(receipt.sampling.seed, output.child),
            n=1,
            max_tokens=len(output.token_ids),
            min_tokens=min(receipt.sampling.min_tokens, len(output.token_ids)),
            prompt_logprobs=None,
        )
        prompt = TokenPrompt(tuple(receipt.prompts[output.prompt]))
        request = GenerateRequest(
            request_id="receipt",
            prompt=prompt,
            sampling=sampling,
            lora_slot=1 if receipt.model.adapter else 0,
        )
        return self._encoder.prepare(request).admit

    def _expected(
        self, request: AdmitRequest, output: ReceiptOutput, *, tolerance: float
    ) -> Expected:
        from aserve.gpu.teacher_forcing import Expected

        token_ids = np.array(output.token_ids, np.int32)
        masks = None if request.sampling.grammar is None else self._masks(request, token_ids)
        forced = forced_ids(request.reasoning, output.token_ids)
        if forced and masks is None:
            num_words = num_mask_words(self._executor.spec.vocab_size)
            masks = np.full((len(token_ids), num_words), -1, np.int32)
        for position, token_id in forced.items():
            assert masks is not None
            masks[position] = 0
            masks[position].view(np.uint32)[token_id // MASK_BITS] = 1 << token_id % MASK_BITS
        prompt_len = len(array_i32(request.prompt_ids))
        return Expected(prompt_len, token_ids, masks, tolerance=tolerance)

    def _masks(self, request: AdmitRequest, token_ids: ArrayI32) -> ArrayI32:
        """The grammar's mask at each output: int32 [outputs, words]. Behind a token that the
        grammar forbids nothing is allowed, so that this token is the first to differ.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        vocabulary = vocabulary_of(self._text.tokenizer, self._executor.spec.vocab_size)
        rules = Rules(request, Compiler(vocabulary).compile(grammar))
        matcher = SequenceMatcher(rules)
        masks = np.zeros((len(token_ids), num_mask_words(vocabulary.vocab_size)), np.int32)
        for position in range(len(token_ids)):
            new_ids = token_ids[max(position - 1, 0) : position]
            try:
                ready = matcher.fill(BuildMask("receipt", 0, position, new_ids.tobytes()))
            except BugError:
                break
            if ready.error is not None:
                break
            masks[position] = array_i32(ready.mask)
        return masks

    async def _compute(self, request: AdmitRequest, output: ReceiptOutput) -> None:
        """Runs the prompt and all outputs but the last through the scheduler and the device."""
        request = msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, grammar=None),
            reasoning=None,
            outputs=(pack_i32(output.token_ids[:-1]),),
        )
        scheduler = Scheduler(self._executor.spec)
        tickets: deque[Ticket] = deque()
        events: list[SchedulerEvent] = [request]
        while events:
            for effect in scheduler.step(events):
                match effect:
                    case Launch():
                        tickets.append(self._executor.launch(*effect.batches))
                    case Refused():
                        raise ConfigError(f"the receipt cannot be computed: {effect.error.message}")
                    case Retired() if effect.error is not None:
                        raise StepError(effect.error.message)
                    case _:
                        pass
            events = [await tickets.popleft()] if tickets else []
