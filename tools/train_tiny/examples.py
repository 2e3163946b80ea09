"""Eight prompts, plain and chat, that show what the model can do."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from tools.train_tiny.evaluate import Generate, answer_text
from tools.train_tiny.tokenizer import chat_prompt

MAX_TOKENS = 400


@dataclass(frozen=True)
class Example:
    text: str
    is_chat: bool


RECALL = """\
fox=3729
sun=1840
lamp=5512
red=9067
Once upon a time, there was a dog named Max. He lived by the river. Max was very kind.
fox="""

EXAMPLES = (
    Example("Once upon a time, there was a rabbit named Mia.", is_chat=False),
    Example("Write a story about a dog at the beach.", is_chat=True),
    Example("What is 27 plus 15?", is_chat=True),
    Example("Count: 5 6 7 8", is_chat=True),
    Example("Return JSON for Sam.", is_chat=True),
    Example("What is the weather in Rome?", is_chat=True),
    Example("def add(a, b):", is_chat=False),
    Example(RECALL, is_chat=False),
)


def example_answers(generate: Generate, tokenizer: Tokenizer) -> list[tuple[Example, str]]:
    prompts = [prompt_ids(example, tokenizer) for example in EXAMPLES]
    answers = [answer_text(ids, tokenizer) for ids in generate(prompts, MAX_TOKENS)]
    return list(zip(EXAMPLES, answers, strict=True))


def prompt_ids(example: Example, tokenizer: Tokenizer) -> list[int]:
    if example.is_chat:
        return chat_prompt(tokenizer, example.text)
    ids: list[int] = tokenizer.encode(example.text).ids
    return ids


def shown(example: Example, answer: str) -> str:
    """Formats an example for the model card."""
    form = "chat" if example.is_chat else "text"
    return f"{form}> {example.text}\n{answer.rstrip()}"
