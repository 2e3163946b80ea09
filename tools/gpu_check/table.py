"""Writes the table of all measures as Markdown, with date, GPU, driver and versions above it.

A measure without a figure has an empty cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.gpu_check.goals import Verdict
from tools.gpu_check.records import Record

RATES = ("us", "gb_per_s", "of_copy")
DRY = "**This was a dry run: the figures are not those of a GPU.**"


def markdown(verdicts: Sequence[Verdict], records: Mapping[str, Record]) -> str:
    lines = ["| | |", "|---|---|", *_head(records), ""]
    if any(record.is_dry for record in records.values()):
        lines += [DRY, ""]
    lines += ["| measure | goal | measured | |", "|---|---|---|---|"]
    lines += [_line(verdict) for verdict in verdicts]
    if kernels := kernel_rates(records):
        lines += ["", "| kernel | us | GB/s | of a copy |", "|---|---|---|---|"]
        lines += [f"| {name} | {' | '.join(rates)} |" for name, rates in kernels.items()]
    return "\n".join(lines) + "\n"


def kernel_rates(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """Returns the rates from `aserve bench kernels` by the kernel's name."""
    record = records.get("bench-kernels")
    found = record.figures.get("kernels") if record else None
    if not isinstance(found, Mapping):
        return {}
    return {name: [f"{rates[key]:,}" for key in RATES] for name, rates in found.items()}


def hosts_of(records: Mapping[str, Record]) -> list[str]:
    """Returns each machine with a figure, once."""
    hosts = [record.host for record in records.values() if record.host and record.figures]
    shown = dict.fromkeys(f"{host.gpu or 'no GPU'}; {host.machine.cpu}" for host in hosts)
    return list(shown)


def _head(records: Mapping[str, Record]) -> list[str]:
    hosts = [record.host for record in records.values() if record.host and record.figures]
    dates = sorted({host.machine.date[:10] for host in hosts})
    versions = [host.machine.versions | (host.gpu.versions if host.gpu else {}) for host in hosts]
    shown = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in one.items()) for one in versions
    )
    gpus = dict.fromkeys(
        f"{host.gpu.name}, {host.gpu.memory_gib:.0f} GiB, capability {host.gpu.capability}, "
        f"driver {host.gpu.driver}, CUDA {host.gpu.cuda}"
        for host in hosts
        if host.gpu
    )
    machines = dict.fromkeys(f"{host.machine.cores} cores of {host.machine.cpu}" for host in hosts)
    facts = {"date": dates, "GPU": gpus, "machine": machines, "versions": shown}
    return [f"| {name} | {'; '.join(values)} |" for name, values in facts.items()]


def _line(verdict: Verdict) -> str:
    measure = verdict.measure
    text = "; ".join(filter(None, (verdict.text if verdict.value else "", measure.beside)))
    return f"| {measure.about} | {measure.goal} | {verdict.value} | {text} |"
