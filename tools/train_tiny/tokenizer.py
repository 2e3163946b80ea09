"""The byte-level BPE tokenizer: its training, its reserved tokens and its chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 2048
PAD, BOS, EOS, MASK, USER, ASSISTANT, SYSTEM, EOT = range(8)
RESERVED = (
    "pad", "bos", "eos", "mask", "user", "assistant", "system", "eot",
    "image_pad", "vision_start", "vision_end", "tool_call", "/tool_call", "think", "/think", "unk",
)  # fmt: skip
RESERVED_TOKENS = tuple(f"<|{name}|>" for name in RESERVED)
# These stay in decoded text, so that a client can find reasoning and tool calls.
VISIBLE = frozenset(RESERVED_TOKENS[RESERVED.index("tool_call") : RESERVED.index("unk")])

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{ content }}
{%- else -%}
{%- for part in content or [] -%}{{ part.text if part.type == 'text' else '' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set is_led = messages and messages[0].role in ('system', 'developer') -%}
{%- if tools or is_led -%}
<|system|>{{ text(messages[0].content) if is_led else '' }}
{%- if tools -%}
{{ '\\n' if is_led else '' }}Tools: {{ tools | map(attribute='function.name') | join(', ') }}
{%- endif -%}
<|eot|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
<|user|>{{ text(message.content) }}<|eot|>
{%- elif message.role == 'assistant' -%}
<|assistant|>{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<|tool_call|>{"name": "{{ call.function.name }}", "arguments": \
{{ arguments if arguments is string else arguments | tojson }}}<|/tool_call|>
{%- endfor -%}
<|eot|>
{%- elif message.role == 'tool' -%}
<|system|>Tool result: {{ text(message.content) }}<|eot|>
{%- elif not (is_led and loop.first) -%}
<|system|>{{ text(message.content) }}<|eot|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def trained_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains the tokenizer. Each digit is a token, each byte has a token, and texts begin
    with BOS.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(RESERVED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = RESERVED_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return with_visible_tokens(tokenizer)


def with_visible_tokens(tokenizer: Tokenizer) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    for added in described["added_tokens"]:
        added["special"] = added["content"] not in VISIBLE
    return Tokenizer.from_str(json.dumps(described))


def load_tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def save_tokenizer(tokenizer: Tokenizer, model_dir: Path, *, max_len: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for transformers."""
    tokenizer.save(str(model_dir / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": f"<|{name}|>" for name in ("pad", "bos", "eos", "mask", "unk")},
        # Older versions of transformers read the template from here.
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(described, indent=2) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def chat_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Returns the ids that the chat template makes of one user message, with a generation
    prompt.
    """
    ids = tokenizer.encode(question, add_special_tokens=False).ids
    return [BOS, USER, *ids, EOT, ASSISTANT]
