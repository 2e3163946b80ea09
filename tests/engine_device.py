"""The device that engines of tests run on: the CPU, or the one of `pytest --device NAME`.

`--device example-npu` is the device of tests/outside_device, so that the tests of the engine go
through the interface that every package outside of the tree has. `make test-all` names them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CPU = "cpu"
OUTSIDE = Path(__file__).parent / "outside_device"  # as `pip install --target` leaves a package
VARIABLE = "ASERVE_TEST_DEVICE"


def engine_device() -> str:
    return os.environ.get(VARIABLE, CPU)


def use_device(name: str) -> None:
    """The environment carries it to the processes that run tests and to those that tests start."""
    if name == CPU:
        return
    os.environ[VARIABLE] = name
    sys.path.insert(0, str(OUTSIDE))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(OUTSIDE), *([others] if others else [])])
