"""Settings that hold for every test: hypothesis profiles and their seed, torch's threads, Triton's
interpreter.
"""

import os
import secrets

import hypothesis
import pytest

# torch reads this when it is first imported, so a test without torch need not import it.
# One thread: the tests' tensors are tiny, and sums don't depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The large profile draws a fresh seed and prints it; ASERVE_TEST_SEED=N repeats it in any profile.
# It stands in the environment, so that every process of a run takes the same.
if os.environ.get("ASERVE_TEST_PROFILE") == "large":
    os.environ.setdefault("ASERVE_TEST_SEED", str(secrets.randbelow(2**32)))
SEED = os.environ.get("ASERVE_TEST_SEED")

hypothesis.settings.register_profile("default", derandomize=SEED is None, deadline=None)
hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "large", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[]
)
hypothesis.settings.load_profile(os.environ.get("ASERVE_TEST_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """This runs before the same hook of hypothesis, which reads the seed there.

    Triton reads its variable when a kernel is defined, so before any test module is imported. Tests
    that are marked gpu compile their kernels: `pytest -m gpu`.
    """
    if SEED is not None:
        config.option.hypothesis_seed = SEED
    if config.getoption("-m") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Also of a quiet run, and before anything can end it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if SEED is not None and reporter is not None:
        reporter.write_line(f"ASERVE_TEST_SEED={SEED} draws these random inputs again")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SEED is not None and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"ASERVE_TEST_SEED={SEED} draws these random inputs again")
