"""Throughput that the READMEs of other engines report for the load of published.py, with their
hardware: on another GPU the figures cannot be compared. Read in 2026; mini-sglang shows a chart.
"""

from __future__ import annotations

from collections.abc import Mapping

PEERS: Mapping[str, str] = {
    "nano-vllm": "1,434 on an RTX 4070 Laptop (8 GB)",
    "vLLM, as nano-vllm measured it": "1,362 on an RTX 4070 Laptop (8 GB)",
    "mini-sglang": "a chart without numbers, on one H200",
}
