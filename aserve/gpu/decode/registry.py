"""Decode modes by name. A new mode is one file in this folder and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode

PLAIN = "autoregressive"
MODES: Mapping[str, Callable[[], DecodeMode]] = {PLAIN: Autoregressive}
