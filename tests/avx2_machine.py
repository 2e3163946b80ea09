"""A machine with AVX2 and nothing wider, played on whatever has more: the environment in which no
library of a new process takes other instructions.
"""

from __future__ import annotations

AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+avx,+f16c,+fma,+sse4.2",
}
