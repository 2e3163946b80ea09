"""The main script of the single binary.

The binary is the command `aserve`. Like the Python interpreter it also takes `-m MODULE`, because a
server starts its processes (the engine, grammar workers, kernel compilers) as
`sys.executable -m MODULE`, and in the binary `sys.executable` is the binary itself.
"""

from __future__ import annotations

import runpy
import sys

PACKAGES = ("aserve", "aserve_kernels")


def main() -> None:
    match sys.argv[1:]:
        case ["-m", module, *_] if module.partition(".")[0] in PACKAGES:
            del sys.argv[:2]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case _:
            from aserve.program import main

            main()


if __name__ == "__main__":
    main()
