"""Measures the gain of overlap: the decode rate with two steps in flight over that with one.

Each depth has an engine of its own, with the same load.
"""

from __future__ import annotations

from aserve.bench.batch_times import Scenario
from tools.gpu_check.embedded_rate import embedded_rates
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of


def measure(setting: Setting, _argument: str) -> Figures:
    sizes = setting.sizes
    max_len = sizes.input_len + sizes.output_len
    flags = setting.flags(sizes.small, num_rows=sizes.most_rows, max_len=max_len)
    load = Scenario("overlap", sizes.most_rows, sizes.input_len, sizes.output_len)
    figures: Figures = {}
    rates = []
    for depth in (2, 1):
        resolved = resolved_of(flags | {"overlap_depth": depth, "overlap_lead": depth})
        found = embedded_rates([load], resolved, repeats=sizes.repeats)[load]
        rates.append(found["decode_tok_s"])
        figures[f"depth_{depth}"] = found
        setting.keep(figures)
    return figures | {"gain": round(rates[0] / rates[1], 4)}
