"""The instructions of this processor that compiled code may have."""

from __future__ import annotations

import ctypes
import platform
import sys

from numba.core import config
from numba.core.codegen import get_host_cpu_features

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


def may_use_tiles() -> bool:
    """Asks Linux to let this process, and the threads that it will start, use the tile registers of
    AMX, and returns whether it does (Linux documentation, "Using XSTATE features in user space
    applications")."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    error: int = syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return not error


def usable(features: str, *, has_tiles: bool) -> str:
    """Returns the features of a processor, with those of AMX off where tile registers may not be
    used."""
    return features if has_tiles else features.replace("+amx-", "-amx-")


def compile_for_usable() -> str:
    """Lets numba compile for the machine's features that may be used, unless NUMBA_CPU_FEATURES
    names others, and returns them. Its cache, which it keeps for each set of features, then has no
    instructions that another process may use and this one may not."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    # Results of AMX are rounded by AVX512-bf16, which a virtual machine may hide.
    features = usable(features, has_tiles="+avx512bf16" in features and may_use_tiles())
    config.CPU_FEATURES = features
    return features


FEATURES = compile_for_usable()
HAS_AVX2, HAS_AVX512, HAS_AVX512BW, HAS_AVX512_BF16, HAS_VNNI, HAS_AMX, HAS_AMX_INT8 = (
    f"+{name}" in FEATURES.split(",")
    for name in ("avx2", "avx512f", "avx512bw", "avx512bf16", "avx512vnni", "amx-bf16", "amx-int8")
)
