"""The alternatives of a sampled token, as clients read them."""

from __future__ import annotations

import math

import numpy as np

from aserve.messages.base import pack_i32
from aserve.text.logprobs import alternatives
from tests.text.vocabularies import byte_level_tokenizer


def test_tokens_that_a_grammar_forbids_are_no_alternatives_of_those_that_it_allows() -> None:
    found = alternatives(
        pack_i32([7, 5, 3, 2, 4, 9]),
        np.array([-0.5, -1.0, -math.inf, 0.0, -math.inf, -math.inf], np.float32).tobytes(),
        num_tokens=2,
        num_top=3,
        tokenizer=byte_level_tokenizer(),
    )
    shown = [[(each.token_id, each.logprob) for each in top] for top in found]
    assert shown == [[(7, -0.5), (5, -1.0)], [(2, 0.0)]]
