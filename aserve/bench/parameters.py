"""How many weights a step works with: counted on transformers' model without storage, any family.

It does not know how they are stored. Of a mixture of experts all are counted, though a small batch
reads fewer.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch


class Parameters(msgspec.Struct, frozen=True):
    """`head` is the product over the vocabulary, which a prompt needs at its last position only.
    The table of input embeddings, of which a step reads a row per token, is in neither.
    """

    body: int
    head: int


def count_parameters(model_dir: Path) -> Parameters:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    total = sum(parameter.numel() for parameter in model.parameters())
    return Parameters(
        body=total - sum(table.numel() for table in tables),
        head=model.get_output_embeddings().weight.numel(),
    )
