"""The oracle sees errors: breaks one line at a time; every break must turn the random traces red.

    make mutants        or: python -m tests.mutants [NAME]

Works on a copy of the tree in a temporary folder. Exit code 1 if a mutant survives or its line is
gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
GREEN, RED = 0, 1
TRACES = "tests/properties/test_scheduler_traces.py"


class Mutant(msgspec.Struct, frozen=True):
    name: str
    file: str
    line: str
    broken: str


MUTANTS = (
    Mutant(
        "a page one short",
        "aserve/scheduling/decode.py",
        "board.num_pages(start + span))",
        "board.num_pages(start + span - 1))",
    ),
    Mutant(
        "a middle chunk that samples",
        "aserve/scheduling/decode.py",
        "samples = is_whole and not ends",
        "samples = not ends",
    ),
    Mutant(
        "the last chunk's sample not counted in lead",
        "aserve/scheduling/caps.py",
        "return sequence.flights.num_sampling < lead",
        "return sum(f.samples and f.span == 1 for f in sequence.flights) < lead",
    ),
    Mutant(
        "a relay read that expects the iteration before",
        "aserve/scheduling/launch.py",
        "return sequence.relay_iteration if reads_relay else 0",
        "return sequence.relay_iteration - 1 if reads_relay else 0",
    ),
    Mutant(
        "a bound not corrected at commit",
        "aserve/scheduling/commit.py",
        "advance=flight.span - flight.num_drafts + count - 1)",
        "advance=flight.span)",
    ),
    Mutant(
        "drafts trusted after a resync",
        "aserve/scheduling/recover.py",
        "sequence.relay_iteration = 0",
        "sequence.relay_iteration *= 1",
    ),
    Mutant(
        "only the failed step's rows initialised again",
        "aserve/scheduling/recover.py",
        "sequence.written_pages = 0",
        "sequence.written_pages *= sequence.row not in next(iter(board.steps.values())).riders",
    ),
    Mutant(
        "a Launch that names a held row",
        "aserve/scheduling/caps.py",
        "not sequence.is_at_end and not sequence.is_held",
        "not sequence.is_at_end",
    ),
    Mutant(
        "uncommitted pages entering the tree",
        "aserve/scheduling/commit.py",
        "num_pages = min(sequence.committed_len, sequence.tokens.num) // page_size",
        "num_pages = sequence.tokens.num // page_size",
    ),
    Mutant(
        "a row's parameters not sent again on re-admission",
        "aserve/scheduling/launch.py",
        "return tuple(sequence.row_init() for sequence in sequences if not sequence.written_pages)",
        "return tuple(s.row_init() for s in sequences if not s.written_pages | s.num_outputs)",
    ),
    Mutant(
        "a page freed twice",
        "aserve/cache/kv_cache.py",
        "                pages[index] = 0\n",
        "                pages[index] *= 1\n",
    ),
    Mutant(
        "a late result of a finished request counted for the row's new tenant",
        "aserve/scheduling/commit.py",
        "sequence, flight = riders.get(row, (None, None))",
        "sequence = board.running.get(row)\n"
        "        flight = next(iter(sequence.flights), None) if sequence else None",
    ),
    Mutant(
        "a prefix hit that skips positions whose scores are wanted",
        "aserve/scheduling/request.py",
        "            return self.num_scored - 1\n",
        "            pass\n",
    ),
    Mutant(
        "a score given twice after a retraction",
        "aserve/scheduling/prompts.py",
        "_behind(scores, num_seen, of=num_tokens)",
        "_behind(scores, 0, of=num_tokens)",
    ),
    Mutant(
        "an embedding of a sequence that has left",
        "aserve/scheduling/prompts.py",
        "        if flight in sequence.flights:\n            outputs.append(",
        "        if True:\n            outputs.append(",
    ),
)


def main(names: list[str]) -> int:
    console = Console()
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = _copy_tree(Path(folder))
        if _run_traces(tree) != GREEN:
            console.print("the traces are red without any mutant")
            return 1
        for mutant in track(chosen, "mutants", console=console):
            problem = _try(tree, mutant)
            console.print(f"{'KILLED  ' if problem is None else problem}  {mutant.name}")
            if problem is not None:
                survivors.append(mutant)
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


def _copy_tree(folder: Path) -> Path:
    for name in ("aserve", "kernels", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _try(tree: Path, mutant: Mutant) -> str | None:
    """None if the mutant was killed, else what is wrong."""
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.line) != 1:
        return "NO LINE "
    path.write_text(source.replace(mutant.line, mutant.broken))
    try:
        code = _run_traces(tree)
        return None if code == RED else "SURVIVED" if code == GREEN else "NO TEST "
    finally:
        path.write_text(source)


def _run_traces(tree: Path) -> int:
    """pytest's exit code: a mutant that cannot even be imported is not one that was noticed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", TRACES]
    environment = {**os.environ, "ASERVE_TEST_PROFILE": "mutants"}
    environment["PYTHONPATH"] = f"{tree}:{tree / 'kernels'}"
    finished = subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False)
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
