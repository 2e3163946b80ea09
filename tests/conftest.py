"""Settings that hold for every test: hypothesis profiles and the number of torch's threads."""

import os

import hypothesis

# torch reads this when it is first imported, so a test without torch need not import it.
# One thread: the tests' tensors are tiny, and sums don't depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("default", derandomize=True, deadline=None)
hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "large", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[]
)
hypothesis.settings.load_profile(os.environ.get("ASERVE_TEST_PROFILE", "default"))
