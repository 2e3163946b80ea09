"""bfloat16 bits in compiled code, and in the plain functions that stand for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow, rounded, widen

VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, -3.4e38, 1e-40, torch.inf, -torch.inf]
)


@njit
def compiled_narrow(source: Float32s, target: Floats) -> None:
    narrow(source, target)


@njit
def compiled_widen(source: Floats, target: Float32s) -> None:
    widen(source, target)


@pytest.mark.parametrize("function", [narrow, compiled_narrow])
def test_narrowing_rounds_as_torch_does(function) -> None:
    bits = np.empty(len(VALUES), np.uint16)
    function(VALUES.numpy(), bits)
    expected = VALUES.to(torch.bfloat16).view(torch.uint16).numpy()
    assert (bits == expected).all()


@pytest.mark.parametrize("function", [narrow, compiled_narrow])
def test_a_nan_stays_one(function) -> None:
    """Its low bits alone may say that it is one: cut off, they would leave an infinity."""
    values = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    bits = np.empty(2, np.uint16)
    function(values, bits)
    assert torch.from_numpy(bits).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("function", [widen, compiled_widen])
def test_widening_is_exact(function) -> None:
    half = VALUES.to(torch.bfloat16)
    target = np.empty(len(VALUES), np.float32)
    function(half.view(torch.uint16).numpy(), target)
    assert (target == half.float().numpy()).all()


@njit
def compiled_rounded(value: np.float32, like: Floats) -> np.float32:
    return rounded(value, like)


@pytest.mark.parametrize("function", [rounded, compiled_rounded])
def test_a_value_is_rounded_to_what_an_array_can_hold(function) -> None:
    bits, floats = np.empty(0, np.uint16), np.empty(0, np.float32)
    for value in VALUES.numpy():
        assert function(value, floats) == value
        assert function(value, bits) == torch.tensor(value).bfloat16().item()


@pytest.mark.slow
def test_the_kernels_run_without_a_compiler() -> None:
    """NUMBA_DISABLE_JIT=1 is how one steps through them."""
    program = (
        "import numpy as np, torch\n"
        "from aserve_kernels.cpu import paged_attention as op\n"
        "from aserve_kernels.cpu.host_rows import HostRows, QueryRows\n"
        "from aserve_kernels.paged_rows import Scoring\n"
        "op.compile_paged_attention(torch.bfloat16, 1)\n"
        "column = lambda value: np.array([value], np.int64)\n"
        "queries = QueryRows(column(1), column(5), column(0), column(2))\n"
        "rows = HostRows(np.array([[0, 0], [2, 1]], np.int64), 4, queries)\n"
        "q, k, v = (torch.randn(12, 2, 4).bfloat16() for _ in range(3))\n"
        "got, expected = torch.zeros(2, 2, 4).bfloat16(), torch.zeros(2, 2, 4)\n"
        "op.paged_attention(q[:2], k, v, rows, Scoring(0.5), out=got, num_workers=1)\n"
        "wide = (tensor.float() for tensor in (q[:2], k, v))\n"
        "op.paged_attention_ref(*wide, rows, Scoring(0.5), out=expected)\n"
        "torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)\n"
        "from aserve_kernels.cpu import chunk_attention\n"
        "q, k, v = (torch.randn(12, 2, 32).bfloat16() for _ in range(3))\n"
        "got, expected = torch.zeros(2, 2, 32).bfloat16(), torch.zeros(2, 2, 32)\n"
        "attend = chunk_attention.chunk_attention\n"
        "attend(q[:2], k, v, rows, Scoring(0.5), out=got, num_workers=1)\n"
        "wide = (tensor.float() for tensor in (q[:2], k, v))\n"
        "op.paged_attention_ref(*wide, rows, Scoring(0.5), out=expected)\n"
        "torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)\n"
        "q, k, v = (tensor[:, :, :4].contiguous() for tensor in (q, k, v))\n"
        "from aserve_kernels.cpu import rms_norm\n"
        "from aserve_kernels.reference import rms_norm_ref, rope_and_store_kv_ref\n"
        "rms_norm.compile_rms_norm(torch.bfloat16)\n"
        "inputs = q[:, 0], torch.ones(4), 1e-6\n"
        "got, expected = rms_norm.rms_norm(*inputs), rms_norm_ref(*inputs)\n"
        "torch.testing.assert_close(got, expected)\n"
        "from aserve_kernels.cpu import rope_and_store_kv as op\n"
        "op.compile_rope_and_store_kv(torch.bfloat16)\n"
        "heads, slots = torch.cat((q, k, v), dim=1), torch.arange(12)\n"
        "given = {'cos_sin': k[:, 0], 'weight': torch.ones(4, 4), 'eps': 1e-6}\n"
        "pools, stored = torch.zeros(2, 2, 12, 2, 4).bfloat16()\n"
        "got = op.rope_and_store_kv(heads, slots, tuple(pools), **given)\n"
        "expected = rope_and_store_kv_ref(heads, slots, tuple(stored), **given)\n"
        "torch.testing.assert_close((got, pools), (expected, stored))\n"
    )
    environment = {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
