"""Settings that hold for every test: hypothesis profiles, torch's threads, Triton's interpreter."""

import os

import hypothesis
import pytest

# torch reads this when it is first imported, so a test without torch need not import it.
# One thread: the tests' tensors are tiny, and sums don't depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("default", derandomize=True, deadline=None)
hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "large", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[]
)
hypothesis.settings.load_profile(os.environ.get("ASERVE_TEST_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Triton reads this when a kernel is defined, so before any test module is imported. Tests that
    are marked gpu compile their kernels: `pytest -m gpu`."""
    if config.getoption("-m") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
