"""Adds a receipt to the answer of a client that asks for one with `receipt`: as a member of a whole
answer, and of the last event with a choice in a stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic

import msgspec

from aserve.http.openai.answers import ChoiceT, Dialect, UsageBody, ids_of
from aserve.http.openai.checks import unsupported
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.http.state import HttpContext
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk
from aserve.messages.requests import ChatPrompt
from aserve.receipts.facts import Facts
from aserve.receipts.record import Receipt, ReceiptOutput

UNREADABLE = (
    "The server cannot read the files of its model any more, which a receipt hashes. Send the "
    "request without 'receipt', or let the administrator put the files back."
)

logger = logging.getLogger(__name__)


async def receipt_facts(body: CompletionBody | ChatBody, context: HttpContext) -> Facts | None:
    """Returns the facts of the receipt that the client asks for, None if it asks for none.

    NOTE: the first hash of a checkpoint takes long, so a call is made after it: a call names the
    slot of its adapter and the namespace of its weights, which may change hands meanwhile. Facts
    about what is no longer served are found again.
    """
    state, receipts = context.state, context.receipts
    spec, name = state.spec, body.model or context.model_names[0]
    if not body.receipt or spec is None:  # without an engine the request is about to be refused
        return None
    if receipts is None:
        raise unsupported("receipt", "This server makes none.")
    while True:
        served = weights, lora = state.weights, context.loras.find(name)
        if weights is not None:
            if weights.tensors:
                reason = "No checkpoint has the weights, which came as tensors."
                raise unsupported("receipt", reason)
            receipts.use(Path(weights.path))
        adapter_dir = None if lora is None else Path(lora.path)
        try:
            facts = await receipts.find(name, adapter_dir, dtype=spec.dtype)
        except OSError as error:
            logger.warning("no receipt cause=%r", error)
            raise unsupported("receipt", UNREADABLE) from None
        if served == (state.weights, context.loras.find(name)):
            return facts


def with_receipt(
    dialect: Dialect[ChoiceT], facts: Facts | None, context: HttpContext
) -> Dialect[ChoiceT]:
    """Returns a dialect that adds a receipt, or the same one without facts. Raises for tokens that
    one prefill over the receipt's prompt and outputs cannot draw again.
    """
    spec, request = context.state.spec, dialect.call.requests[0]
    if facts is None or spec is None:
        return dialect
    if isinstance(request.prompt, ChatPrompt) and request.prompt.pictures:
        raise unsupported("receipt", "A receipt has the tokens of a prompt and not its pictures.")
    if not spec.decode.root_len:
        raise unsupported("receipt", "A diffusion model does not write its tokens in their order.")
    is_by_chance = spec.decode.whole_windows and not spec.decode.continues_repeats
    if is_by_chance and request.sampling.temperature:
        raise unsupported(
            "receipt",
            "With this server's --speculative-verification tokens depend on the drafts: send "
            "'temperature' 0.",
        )
    return ReceiptDialect(dialect, facts)


class ReceiptDialect(Generic[ChoiceT]):
    """Renders the answers of another dialect, and adds a receipt. The call must return token ids,
    because they are read from its chunks.
    """

    def __init__(self, dialect: Dialect[ChoiceT], facts: Facts) -> None:
        self.call = dialect.call
        self._dialect = dialect
        self._facts = facts
        self._sequences = [_Sequence(index) for index in range(self.call.num_sequences)]
        self._choices: list[ChoiceT] = []  # in the order of the sequences

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        return self._dialect.opening(index, usage)

    def deltas(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> Iterable[bytes]:
        self._sequences[index].add(chunk)
        events = self._dialect.deltas(index, chunk, usage)
        if any(sequence.finish_reason is None for sequence in self._sequences):
            return events
        return self._with_receipt(events, self._sequences)

    def usage(self, usage: UsageBody) -> bytes:
        return self._dialect.usage(usage)

    def new_choice(self, index: int) -> ChoiceT:
        choice = self._dialect.new_choice(index)
        self._choices.append(choice)
        return choice

    def whole_answer(self, choices: list[ChoiceT], usage: UsageBody) -> Iterator[bytes]:
        numbers = {id(choice): number for number, choice in enumerate(self._choices)}
        sequences = [_Sequence(numbers[id(choice)]).with_choice(choice) for choice in choices]
        return self._with_receipt(self._dialect.whole_answer(choices, usage), sequences)

    def _with_receipt(
        self, pieces: Iterable[bytes], sequences: Sequence[_Sequence]
    ) -> Iterator[bytes]:
        """Adds a member to the JSON object with which `pieces` end."""
        last = None
        for piece in pieces:
            if last is not None:
                yield last
            last = piece
        assert last is not None, "the chunk that ends a choice is an event"
        yield b'%b,"receipt":%b}' % (last[:-1], msgspec.json.encode(self._receipt(sequences)))

    def _receipt(self, sequences: Sequence[_Sequence]) -> Receipt:
        call, facts = self.call, self._facts
        prompts = {sequence.number // call.num_children: sequence for sequence in sequences}
        return Receipt(
            id=call.call_id,
            created=call.created,
            model=facts.model,
            settings=facts.settings,
            machine=facts.machine,
            sampling=call.requests[0].sampling,
            prompts=[prompts[number].prompt_ids for number in sorted(prompts)],
            outputs=[
                ReceiptOutput(
                    index,
                    prompt=sequence.number // call.num_children,
                    child=sequence.number % call.num_children,
                    token_ids=sequence.token_ids,
                    finish_reason=sequence.finish_reason,
                )
                for index, sequence in enumerate(sequences)
            ],
        ).sealed()


class _Sequence:
    """The tokens of one sequence of a call, of which `number` is the place among all of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: OutputChunk) -> None:
        self.prompt_ids = self.prompt_ids or ids_of(chunk.prompt_ids)
        self.token_ids += ids_of(chunk.token_ids)
        self.finish_reason = chunk.finish_reason

    def with_choice(self, choice: ChoiceT) -> _Sequence:
        self.prompt_ids, self.token_ids = choice.prompt_ids, choice.token_ids
        self.finish_reason = choice.finish_reason
        return self
