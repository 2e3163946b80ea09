"""`python -m tools.gpu_check` runs the measurements and tests that need a GPU.

With `--wheels` it first adds packages that the machine lacks. Until then this module imports only
the standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from tools.gpu_check.wheels import OUT, add_wheels


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--out", type=Path, default=Path(OUT))
    known, _ = parser.parse_known_args(arguments)
    if importlib.util.find_spec("aserve_kernels") is None:  # a checkout that is not installed
        sys.path.insert(1, str(Path(__file__).parents[2] / "kernels"))
    if known.wheels is not None:
        try:
            add_wheels(known.wheels, known.out)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"gpu-check: {error}\n")
            return 2
    try:
        from tools.gpu_check.command import run_command
    except ModuleNotFoundError as error:
        sys.stderr.write(f"gpu-check: {error.name} is not installed, nor among the wheels\n")
        return 2
    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
