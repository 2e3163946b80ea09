"""Kernels for the CPU, compiled by numba.

NOTE: numba starts its threads at the first parallel kernel, and with OpenMP it then sets the number
of threads of the calling thread, which is torch's as well. So they are started here, where torch's
number can be kept.
"""

import numba
import torch
from numba.core import config

TORCH_THREADS = torch.get_num_threads()
numba.set_num_threads(config.NUMBA_NUM_THREADS)
torch.set_num_threads(TORCH_THREADS)
