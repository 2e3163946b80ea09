"""Installs missing packages from a folder of wheels into a folder of its own, which the processes
of gpu-check search first. Installed packages are not changed.

NOTE: it imports only the standard library, because it runs before anything else can be imported.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

OUT = "build/gpu-check"  # the folder of results, with the contents of the wheels below it
SITE = "site"
STAMP = ".wheels"  # a file in the site: the names of the wheels


def add_wheels(wheels: Path, out: Path) -> Path:
    """Installs the wheels and puts their folder first on this process's path. Raises OSError if
    there are none, and CalledProcessError if pip refuses them.
    """
    site = out / SITE
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise FileNotFoundError(f"--wheels {wheels}: it has no wheels")
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
    """WHY --no-deps: dependencies are installed or in the folder, and nothing is downloaded."""
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    into = ("--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site))
    subprocess.run((*command, *into, *map(str, files)), check=True, stdout=sys.stderr)
