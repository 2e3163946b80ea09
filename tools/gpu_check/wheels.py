"""Packages that are missing here, out of a folder of wheels: into a folder of their own, which the
processes of this check find first.

Must import only the standard library: it runs before anything else can be imported. It touches
nothing that is installed.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

OUT = "build/gpu-check"  # where results go, and below it what the wheels hold
SITE = "site"
STAMP = ".wheels"  # in the site: what it was made of


def add_wheels(wheels: Path, out: Path) -> Path:
    """The folder that they are in now, first on this process's path. An OSError or
    CalledProcessError if there are none, or pip refuses them.
    """
    site = out / SITE
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise FileNotFoundError(f"--wheels {wheels}: there is no wheel in it")
    names = "\n".join(file.name for file in files)
    stamp = site / STAMP
    if not stamp.exists() or stamp.read_text() != names:
        _install(files, site)
        stamp.write_text(names)
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
    return site


def _install(files: list[Path], site: Path) -> None:
    """WHY --no-deps: what a wheel needs is here already, or in the folder; nothing is fetched."""
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    into = ("--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site))
    subprocess.run((*command, *into, *map(str, files)), check=True, stdout=sys.stderr)
