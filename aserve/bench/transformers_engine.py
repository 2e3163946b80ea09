"""transformers' own `generate` on the same model and the same prompts, to be measured beside ours.

It does not know aserve. A static batch: all prompts have one length and get equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class TransformersEngine:
    def __init__(self, model_dir: Path, *, dtype: str, is_dummy: bool) -> None:
        """`is_dummy` makes random weights out of config.json."""
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {
            "dtype": getattr(torch, dtype),
            "attn_implementation": "sdpa",
        }
        if is_dummy:
            config = AutoConfig.from_pretrained(model_dir)
            model = AutoModelForCausalLM.from_config(config, **settings)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_dir, **settings)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> int:
        """How many tokens came out."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return int(output.numel() - ids.numel())
