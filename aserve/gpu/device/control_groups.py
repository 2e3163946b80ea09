"""The control groups around this process, which limit what a container may take.

It knows no resource. Files of the kernel are read below `root`, so that tests can lay out their
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """`is_unified`: of the newer interface, whose files have other names."""

    directory: Path
    is_unified: bool


def enclosing_groups(root: Path, controller: str) -> Iterator[ControlGroup]:
    """From the process's own up to the mount. Inside a container the path may be the host's, and
    only its top is mounted: what is not there has no files."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for group in (below, *below.parents) if below.name else (below,):
            yield ControlGroup(mount / group, is_unified=controllers == "")


def read_text(path: Path) -> str:
    """Empty for what is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
