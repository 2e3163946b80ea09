"""The folder in which numba keeps compiled kernels between starts.

An installation may bring kernels that are compiled already, in a folder `compiled` of the package
`aserve_kernels`, which need not be writable: a cache begins with links to them. Numba looks them up
by processor, so another processor compiles its own, beside the links.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from aserve.config import cache_home

UNUSED_S = 30 * 24 * 3600  # a cache that was not used for so long is removed

logger = logging.getLogger(__name__)


def kernel_cache() -> Path | None:
    """Returns the folder for compiled kernels, or None where no folder can be written.

    WHY: there is a folder for each state of the kernels' sources, because numba checks only the
    file of a cached function, not the files of the functions that it calls; and for each place of
    theirs, because numba finds a function by its path, so marks of another place would be wrong.

    NOTE: numba unpickles what it finds there, so only this user may write it.
    """
    package = _kernel_package()
    name = f"kernels-{_digest_of_kernels(package)}"
    try:
        path = _opened(cache_home() / "aserve" / name)
    except OSError as error:
        temporary = _temporary_cache(name, error)
        if temporary is None:
            return None
        path = temporary
    if package is not None:
        with contextlib.suppress(OSError):  # kernels without a link are compiled again
            link_compiled_kernels(package, path)
    return path


def link_compiled_kernels(package: Path, cache: Path) -> None:
    """Links to the compiled kernels that the installation brings, if this cache has none of it.

    Numba keeps the functions of a source folder in a folder that is named after its absolute path,
    so the name is made anew: the installation may lie elsewhere than where they were compiled.
    """
    brought = package / "compiled"
    sources = package / "cpu"
    folder = cache / f"{sources.name}_{hashlib.sha1(str(sources).encode()).hexdigest()}"
    if not brought.is_dir() or folder.exists():
        return
    links = Path(tempfile.mkdtemp(dir=cache))
    try:
        for path in brought.glob("*/*.nb[ic]"):
            (links / path.name).symlink_to(path)
        links.rename(folder)
    except OSError:  # another process was first, or the disk is full
        shutil.rmtree(links, ignore_errors=True)
        return
    for mark in brought.glob("compiled-*"):
        (cache / mark.name).touch()


def _opened(path: Path) -> Path:
    """Makes the folder if it is new, and marks it as used. Raises OSError if it cannot be
    written."""
    is_new = not path.exists()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        os.utime(path)  # the modification time is that of the last start that used it
    if is_new:
        _remove_unused(path.parent)
    return path


def _temporary_cache(name: str, refusal: OSError) -> Path | None:
    try:
        return _opened(_private_folder() / name)
    except OSError:
        logger.warning(
            "every start compiles all kernels, because neither %s (%s) nor a temporary folder can "
            "be written; set XDG_CACHE_HOME to a folder that can",
            *(cache_home(), refusal.strerror),
        )
        return None


def _private_folder() -> Path:
    """Returns a temporary folder of this user alone: the same one for each start, unless somebody
    else has taken its name."""
    path = Path(tempfile.gettempdir()) / f"aserve-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    is_private = is_own and not found.st_mode & 0o077
    return path if is_private else Path(tempfile.mkdtemp(prefix="aserve-"))


def _remove_unused(caches: Path) -> None:
    """Removes old caches of other sources. Another process may remove the same ones meanwhile."""
    for path in caches.glob("kernels-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)


def _kernel_package() -> Path | None:
    package = importlib.util.find_spec("aserve_kernels")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    return next(map(Path, folders), None)


def _digest_of_kernels(package: Path | None) -> str:
    sources = sorted(package.glob("cpu/*.py")) if package is not None else []
    contents = [str(package).encode(), *(path.read_bytes() for path in sources)]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
