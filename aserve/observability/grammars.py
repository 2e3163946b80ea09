"""Metrics of grammars: what compiling took and how it ended, and how often it was not needed.

Must not know grammars. Written with the grammar library's reports, on the loop's thread.
"""

from __future__ import annotations

from typing import assert_never

from prometheus_client import CollectorRegistry, Counter, Histogram

from aserve.observability.reports import GrammarCompiled, GrammarKnown, GrammarReport

COMPILE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class GrammarMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._compiles = Counter(
            "aserve_grammar_compiles",
            "Grammars that were compiled, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._compile_s = Histogram(
            "aserve_grammar_compile_seconds",
            "From asking for a grammar to its outcome, queue included",
            buckets=COMPILE_S,
            registry=registry,
        )
        self._cache_hits = Counter(
            "aserve_grammar_cache_hits",
            "Requests whose grammar was known, good or bad, or just being compiled",
            registry=registry,
        )

    def heard(self, report: GrammarReport) -> None:
        match report:
            case GrammarKnown():
                self._cache_hits.inc()
            case GrammarCompiled():
                self._compiles.labels(report.outcome).inc()
                self._compile_s.observe(report.seconds)
            case _:
                assert_never(report)
