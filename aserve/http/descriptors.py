"""Raises the limit on open files, so that the process can hold its maximum of connections."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

OTHER_FILES = 192  # files of the model and the loop, and pipes to workers


def descriptors_for(max_connections: int) -> int:
    """Raises the soft limit as far as the hard one allows, and returns how many connections fit.

    WHY: a process without free descriptors can accept no connection, not even to refuse it.
    """
    wanted = max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed >= wanted:
        return max_connections
    fitting = max(1, allowed - OTHER_FILES)
    logger.warning(
        "open_files=%s leave room for max_connections=%s instead of %s",
        allowed,
        fitting,
        max_connections,
    )
    return fitting
