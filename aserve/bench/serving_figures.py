"""Computes the figures of a load of streamed requests, named as in `vllm bench serve`.

Latencies are in milliseconds, and throughputs in tokens or requests per second.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from aserve.bench.result import Table, mean, median, percentile
from aserve.bench.streamed import Answer
from aserve.errors import ConfigError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def serving_figures(
    answers: Sequence[Answer], *, duration_s: float, limits_ms: Mapping[str, float]
) -> dict[str, float]:
    good = [answer for answer in answers if not answer.error]
    num_outputs = sum(answer.completion_tokens for answer in good)
    num_inputs = sum(answer.prompt_tokens for answer in good)
    ttfts = [answer.ttft_s for answer in good if answer.ttft_s is not None]
    tpots = [answer.tpot_s for answer in good if answer.tpot_s is not None]
    itls = [itl_s for answer in good for itl_s in answer.itls_s]
    figures = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_inputs,
        "total_output_tokens": num_outputs,
        "total_cached_tokens": sum(answer.cached_tokens for answer in good),
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_outputs / duration_s,
        "total_token_throughput": (num_inputs + num_outputs) / duration_s,
        **_times("ttft", ttfts),
        **_times("tpot", tpots),
        **_times("itl", itls),
        **_times("e2el", [answer.e2el_s for answer in good]),
    }
    if limits_ms:
        num_within = sum(_is_within(answer, limits_ms) for answer in good)
        figures["request_goodput"] = num_within / duration_s
    return figures


def medians_of(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over the repeats. The median of integers is an integer."""
    return {name: _median([one[name] for one in runs]) for name in runs[0]}


def figures_table(title: str, figures: Mapping[str, float]) -> Table:
    rows = [
        [name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"]
        for name, value in figures.items()
    ]
    return Table(title, ("figure", "value"), rows)


def read_goodput(text: str | None) -> dict[str, float]:
    """Parses limits such as `ttft:200,tpot:50` to milliseconds by name."""
    limits = {}
    for part in text.replace(",", " ").split() if text else ():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in GOODPUT_METRICS:
            known = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"--goodput {part}: must be NAME:MILLISECONDS with one of {known}")
    return limits


def _is_within(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Returns whether the answer meets all limits. An answer of one token has no TPOT, and meets
    its limit.
    """
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2el": answer.e2el_s}
    return all((times[name] or 0.0) * 1e3 <= limit for name, limit in limits_ms.items())


def _times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"mean_{name}_ms": mean(seconds) * 1e3,
        f"median_{name}_ms": median(seconds) * 1e3,
        f"std_{name}_ms": statistics.pstdev(seconds) * 1e3 if seconds else 0.0,
        f"p99_{name}_ms": percentile(seconds, 99) * 1e3,
    }


def _median(values: list[float]) -> float:
    if all(isinstance(value, int) for value in values):
        return statistics.median_low(values)
    return round(median(values), 4)
