"""Settings that hold for every test: hypothesis profiles and their seed, torch's threads, Triton's
interpreter.
"""

import gc
import os
import secrets
from importlib.util import find_spec
from random import Random

import hypothesis
import pytest

from aserve.host.kernel_cache import kernel_cache
from aserve.host.memory import collect_rarely
from tests.collected import IGNORED, note_collected
from tests.engine_device import CPU, engine_device, use_device

collect_rarely()  # the imports of all test modules leave hardly any garbage

# torch reads this when it is first imported, so a test without torch need not import it.
# One thread: the tests' tensors are tiny, and sums don't depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels that a test calls are kept where a server keeps them, so that each is compiled once.
CACHE = kernel_cache()
if CACHE is not None:
    os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE))

collect_ignore_glob = [*IGNORED]

# What takes longest starts first, so that no process ends long after the others.
LONGEST = (
    "tests/e2e/test_attacks.py",
    "tests/parity/test_avx2_machine.py",
    "tests/parity/test_real_model.py",
    "tests/grammar/test_library.py",
    "tests/gpu/cuda/test_engine.py",
    "tests/properties/test_scheduler_traces.py",
    "tests/tools/gpu_check/test_check.py",
    "tests/tools/train_tiny/test_training.py",
)
# Their tests load models, whose kernels are compiled before the first test.
ENGINES = ("tests/e2e/", "tests/parity/")
# Files whose tests share nothing that takes time to make: they are handed out one by one.
ONE_BY_ONE = frozenset(
    {
        "tests/bench/test_command.py",
        "tests/e2e/test_server_process.py",
        "tests/tools/gpu_check/test_command.py",
    }
)

# The large profile draws a fresh seed and prints it; ASERVE_TEST_SEED=N repeats it in any profile.
# It stands in the environment, so that every process of a run takes the same.
if os.environ.get("ASERVE_TEST_PROFILE") == "large":
    os.environ.setdefault("ASERVE_TEST_SEED", str(secrets.randbelow(2**32)))
SEED = os.environ.get("ASERVE_TEST_SEED")

hypothesis.settings.register_profile("default", derandomize=SEED is None, deadline=None)
# A mutant need only be found: the smallest input that shows it is worth no time.
hypothesis.settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    database=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.register_profile(
    "large", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[]
)
hypothesis.settings.load_profile(os.environ.get("ASERVE_TEST_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default=CPU, help="the device of tests that run an engine (default: cpu)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """This runs before the same hook of hypothesis, which reads the seed there.

    Triton reads its variable when a kernel is defined, so before any test module is imported. Tests
    that are marked gpu compile their kernels: `pytest -m gpu`.
    """
    use_device(config.getoption("--device"))
    if SEED is not None:
        config.option.hypothesis_seed = SEED
    if config.getoption("-m") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeds_of_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed draws the same one in every run, so no test passes by chance."""
    monkeypatch.setattr(secrets, "randbits", Random(request.node.nodeid).getrandbits)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What tests share is made in one process: within a file, and the server of tests/e2e."""
    note_collected(config, items)
    for item in items:
        path = item.location[0]
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("server"))
        elif path not in ONE_BY_ONE:
            item.add_marker(pytest.mark.xdist_group(path))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (*LONGEST, item.location[0]).index(item.location[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and test items stay, so that no collection of garbage need look at them."""
    gc.freeze()
    runs_engines = any(item.location[0].startswith(ENGINES) for item in session.items)
    if runs_engines and engine_device() == CPU and not session.config.option.collectonly:
        _compile_kernels()


def _compile_kernels() -> None:
    """WHY: in a new checkout the first test that loads a model compiled for more than 120 s on a
    busy machine, which is the timeout of a test.
    """
    import torch

    from aserve.gpu.device.cpu.kernels import compile_kernels_of

    if find_spec("numba") is not None:
        compile_kernels_of(torch.float32, num_threads=1)  # as small models run


def pytest_sessionstart(session: pytest.Session) -> None:
    """Also of a quiet run, and before anything can end it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if SEED is not None and reporter is not None:
        reporter.write_line(f"ASERVE_TEST_SEED={SEED} draws these random inputs again")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SEED is not None and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"ASERVE_TEST_SEED={SEED} draws these random inputs again")
