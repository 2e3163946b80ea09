"""What other engines' READMEs say of the load in published.py, with the hardware that they name: on
another GPU a figure compares nothing. Facts of their files as of 2026; mini-sglang shows a picture.

It measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

PEERS: Mapping[str, str] = {
    "nano-vllm": "1,434 on an RTX 4070 Laptop (8 GB)",
    "vLLM, as nano-vllm measured it": "1,362 on an RTX 4070 Laptop (8 GB)",
    "mini-sglang": "a picture without numbers, on one H200",
}
