"""How every process logs: lines on stderr. Must not know who logs what."""

from __future__ import annotations

import logging
import sys

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_logging(level: str) -> None:
    """`level` as the option says it: debug, info, warning or error."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
