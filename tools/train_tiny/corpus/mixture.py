"""The kinds of documents by name. The recipe has their shares."""

from collections.abc import Callable
from functools import partial

from tools.train_tiny.corpus.chat import (
    asked_story_turns,
    chat_document,
    code_turns,
    counting_turns,
    json_turns,
    recall_turns,
    smalltalk_turns,
    story_turns,
    sum_turns,
    tool_turns,
    two_person_turns,
)
from tools.train_tiny.corpus.code import code_document, function_document
from tools.train_tiny.corpus.copying import copy_document, rewritten_document
from tools.train_tiny.corpus.counting import counting_document
from tools.train_tiny.corpus.document import Document, Draw
from tools.train_tiny.corpus.recall import recall_document
from tools.train_tiny.corpus.records import records_document
from tools.train_tiny.corpus.stories import story_document, two_person_document
from tools.train_tiny.corpus.sums import sums_document

TURN_MAKERS = (
    sum_turns,
    json_turns,
    tool_turns,
    recall_turns,
    counting_turns,
    smalltalk_turns,
    code_turns,
    story_turns,
)


def conversation(draw: Draw) -> Document:
    """Two or three requests of different kinds in one chat."""
    return chat_document(draw, *draw.rng.sample(TURN_MAKERS, draw.rng.choice((2, 2, 3))))


def alone(draw: Draw, *, turns: Callable[[Draw], list[tuple[str, Document]]]) -> Document:
    return chat_document(draw, turns)


KINDS: dict[str, Callable[[Draw], Document]] = {
    "story": story_document,
    "recall": recall_document,
    "copy": copy_document,
    "sums": sums_document,
    "records": records_document,
    "counting": counting_document,
    "code": code_document,
    "chat_sum": partial(alone, turns=sum_turns),
    "chat_json": partial(alone, turns=json_turns),
    "chat_tool": partial(alone, turns=tool_turns),
    "chat_recall": partial(alone, turns=recall_turns),
    "chat_story": partial(alone, turns=story_turns),
    "chat_counting": partial(alone, turns=counting_turns),
    "chat_code": partial(alone, turns=code_turns),
    "chat_smalltalk": partial(alone, turns=smalltalk_turns),
    "conversation": conversation,
    "chat_asked_story": partial(alone, turns=asked_story_turns),
    "two_persons": two_person_document,
    "chat_two_persons": partial(alone, turns=two_person_turns),
    "rewritten": rewritten_document,
    "function": function_document,
}
