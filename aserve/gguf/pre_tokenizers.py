"""The pre-tokenizers of byte-level BPE: they cut a text into the words in which bytes are merged. A
GGUF file has the name of its pre-tokenizer alone (`tokenizer.ggml.pre`).

Each is one or more regular expressions (Oniguruma's), which cut what the ones before have left, and
a match is a word. Source: the files tokenizer.json of the models, and `llm_tokenizer_bpe` of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(msgspec.Struct, frozen=True):
    """With `ignores_merges` a word that is in the vocabulary is one token, whatever merges say."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False


def _words(number: str, *, letters: str = r"\p{L}", marks: str = "", ends: str = r"[\r\n]*") -> str:
    """Returns a pattern of contractions, words with the character before them, numbers, punctuation
    with the ends of lines behind it, and spaces.
    """
    punctuation = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{ends}"
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}|{punctuation}|{SPACES}"


def _cased(number: str, *, contractions: str = "", ends: str = r"[\r\n/]*", but: str = "") -> str:
    """Returns a pattern as `_words` does, with words that end before the next capital letter. `but`
    takes characters out of their letters.
    """
    others = rf"\p{{Lm}}\p{{Lo}}\p{{M}}{but}"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{others}]", rf"[\p{{Ll}}{others}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{SPACES}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
PLAIN = PreTokenizer((GPT2,))
DIGITS_ALONE = PreTokenizer((DIGIT, GPT2))
LLAMA3 = PreTokenizer((_words(THREE_DIGITS),))
LLAMA3_WHOLE = PreTokenizer((_words(THREE_DIGITS),), ignores_merges=True)
QWEN2 = PreTokenizer((_words(DIGIT),))
GPT4O = PreTokenizer((_cased(THREE_DIGITS, contractions=f"{CONTRACTIONS}?"),))
CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
WORDS_OF_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
DEEPSEEK3 = PreTokenizer(
    (
        THREE_DIGITS,
        r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
        WORDS_OF_DEEPSEEK3,
    )
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "exaone4", "granite-docling"), PLAIN),
        **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), DIGITS_ALONE),
        **dict.fromkeys(("exaone", "minerva-7b"), DIGITS_ALONE),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), LLAMA3_WHOLE),
        **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "glm4", "glm5"), LLAMA3_WHOLE),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA3),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), QWEN2),
        **dict.fromkeys(("solar-open", "kormo", "f2llmv2"), QWEN2),
        "qwen35": PreTokenizer((_words(DIGIT, letters=r"[\p{L}\p{M}]", marks=r"\p{M}"),)),
        "seed-coder": PreTokenizer((_words(DIGIT, ends=""),)),
        "tekken": PreTokenizer((_cased(DIGIT),), ignores_merges=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
        "kimi-k2": PreTokenizer(
            (
                r"\p{Han}+|"
                + _cased(
                    THREE_DIGITS,
                    contractions=f"{CONTRACTIONS}?",
                    ends=r"[\r\n]*",
                    but=r"&&[^\p{Han}]",
                ),
            )
        ),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
        "deepseek-llm": PreTokenizer(
            (
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
                r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
                r"\s+$",
                CJK,
                r"\p{N}+",
            )
        ),
        "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT)),
        # Of files that are older than these names.
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    }
)
