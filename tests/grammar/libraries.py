"""Libraries for tests: the bundled tokenizer's vocabulary, real worker processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from aserve.grammar.compile import Vocabulary
from aserve.grammar.library import GrammarLibrary
from aserve.grammar.workers import CompileLimits
from aserve.observability.metrics import GrammarMetrics
from aserve.observability.reports import GrammarReport, StartupStage
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR

MIB = 1 << 20


@functools.cache
def vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(Path(MODEL_DIR))
    ids = range(tokenizer.vocab_size)
    tokens = tuple(b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids)
    return Vocabulary(tokens, tokenizer.vocab_size, tokenizer.eos_ids)


class Rig:
    def __init__(
        self,
        *,
        timeout_s: float = 20.0,
        memory_bytes: int = 256 * MIB,
        cache_bytes: int = 64 * MIB,
        num_workers: int = 2,
    ) -> None:
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self.stages: list[str] = []
        self._metrics = GrammarMetrics(self.registry)
        self.library = GrammarLibrary(
            vocabulary,
            CompileLimits(timeout_s, memory_bytes, num_workers),
            cache_bytes=cache_bytes,
            report=self._report,
            clock=lambda: self.now_s,
        )

    def _report(self, report: GrammarReport | StartupStage) -> None:
        if isinstance(report, StartupStage):
            self.stages.append(report.stage)
        else:
            self._metrics.on_report(report)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"aserve_grammar_{name}_total", labels) or 0.0


@contextmanager
def rig(**limits: float) -> Iterator[Rig]:
    made = Rig(**limits)  # type: ignore[arg-type]  # named as there
    try:
        yield made
    finally:
        made.library.close()
