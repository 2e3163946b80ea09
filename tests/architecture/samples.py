"""Sources made for the rules: what each must see, with a part of its message, and must not."""

from textwrap import indent

from tests.architecture import bans, caps, imports
from tests.architecture.source import Rule


def function(body: str, head: str = "def f():") -> str:
    return "\n".join([head, *(f"    {line}" for line in body.splitlines())]) + "\n"


def methods(count: int, prefix: str = "") -> str:
    return "class A:\n" + "".join(f"    def {prefix}f{i}(self): ...\n" for i in range(count))


PLAIN = "aserve/engine.py"
STATE = "aserve/scheduling/scheduler.py"
PAGES = "aserve/cache/pools.py"
PUMP = "aserve/actors/scheduler.py"
BASE = "aserve/actors/base.py"
RUNNER = "aserve/gpu/runner.py"
KERNEL = "kernels/aserve_kernels/gather.py"
TEST = "tests/test_x.py"

METHOD = "class A:\n" + indent(function(function("x = 1\n" * 41, "def g():")), "    ")

FORBIDDEN: dict[tuple[Rule, str], dict[str, str]] = {
    (caps.sizes, PLAIN): {
        function("x = 1\n" * 41): "f has 41 statements, at most 40",
        METHOD: "A.f has 42 statements",
        "X = 1\n" * 251: "the file has 251 statements, at most 250",
    },
    (caps.shapes, PLAIN): {
        "def f(a, b, c, d, *, e, f, g, h): ...": "f has 8 parameters, at most 7",
        "class A:\n @staticmethod\n def g(a, b, c, d, e, f, g, h): ...": "A.g has 8 parameters",
        methods(16): "A has 16 public methods, at most 15",
        function("for a in b:\n while a:\n  with a:\n   if a: b()"): "f has 4 levels of nesting",
        function(
            "match a:\n case 1:\n  try: b()\n  finally:\n   for x in y:\n    if x: z()"
        ): "4 levels",
    },
    (caps.small_files, PLAIN): {"x = 1\n" * 24: "the file has 24 statements: merge it"},
    (imports.directions, STATE): {
        "import torch": "must not import torch",
        function("from time import monotonic"): "must not import time.monotonic",
    },
    (imports.directions, PUMP): {
        "from aserve.gpu.executor import X": "must not import aserve.gpu.executor.X",
        "from ..gpu import executor": "must not import aserve.gpu.executor",
    },
    (imports.directions, RUNNER): {
        "from aserve.cache import pools": "must not import aserve.cache.pools",
    },
    (imports.directions, "aserve/messages.py"): {
        "if TYPE_CHECKING:\n    import torch": "must not import torch"
    },
    (imports.directions, "aserve/frontend.py"): {
        "from tests import fakes": "doesn't know its tests"
    },
    (imports.directions, "aserve/newcomer/x.py"): {"": "aserve.newcomer.x is in no row"},
    (imports.directions, KERNEL): {
        "import aserve.messages": "must not import aserve.messages",
        "import numba": "must not import numba",
    },
    (imports.torch_homes, PLAIN): {function("import torch.nn"): "torch.nn is imported outside"},
    (imports.lazy_imports, PLAIN): {
        "import xgrammar": "xgrammar takes seconds",
        "from transformers import AutoModelForCausalLM": "AutoModelForCausalLM takes seconds",
    },
    (bans.vague_names, "aserve/text/utils.py"): {"": "'utils' says nothing"},
    (bans.host_syncs, RUNNER): {"y = x.sum().item()": ".item() waits"},
    (bans.pickles, PLAIN): {
        function("import pickle"): "pickle: use msgspec",
        "np.load(f, allow_pickle=True)": "allow_pickle=True",
        "torch.load(f, weights_only=False)": "weights_only=False",
        "dist.broadcast_object_list(x)": "dist.broadcast_object_list pickles",
    },
    (bans.evals, PLAIN): {"eval('1')": "eval()", function("exec(x)"): "exec()"},
    (bans.remote_code, PLAIN): {
        "AutoTokenizer.from_pretrained(x)": "may run a checkpoint's code",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)": "may run a checkpoint's code",
    },
    (bans.module_state, PLAIN): {
        "cache = {}": "cache is module state",
        "_engine: Engine | None = None": "_engine is module state",
        "try:\n    fast = 1\nexcept ImportError:\n    pass": "fast is module state",
        function("global X\nX = 1"): "global X",
        "SEEN = []\n" + function("SEEN.append(1)"): "SEEN belongs to the module",
        "SEEN = {}\n" + function("if x:\n    SEEN[1] = 2"): "SEEN belongs to the module",
    },
    (bans.broad_excepts, PLAIN): {
        "try: x()\nexcept Exception as e: pass": "catches everything",
        "try: x()\nexcept (OSError, BaseException): pass": "catches everything",
        "with contextlib.suppress(Exception): x()": "catches everything",
    },
    (bans.tasks, PLAIN): {
        "asyncio.create_task(x())": "only aserve/actors/base.py",
        "asyncio.get_running_loop().create_task(x())": "starts tasks",
    },
    (bans.polling, PLAIN): {
        "time.sleep(1)": "time.sleep blocks",
        "async def f():\n    await asyncio.sleep(0)": "asyncio.sleep(0) polls",
        "from time import sleep": "so that sleeping is seen",
    },
    (bans.environment, PLAIN): {
        "os.environ['HOME']": "the environment is read in",
        "from os import environ": "the environment is read in",
    },
    (bans.impurities, STATE): {"x = np.random.default_rng(0)": "no chance"},
    (bans.impurities, PAGES): {function("open('x')"): "open()"},
    (bans.type_ignores, PLAIN): {
        "x = 1  # type: ignore\n": "the reason",
    },
    (bans.drafter_names, STATE): {function("x.is_eagle()"): "'is_eagle' names a drafter"},
    (bans.drafter_names, RUNNER): {function("if mode == 'ngram': pass"): "'ngram' names a drafter"},
    (bans.skips, TEST): {
        "pytest.skip('no')": "pytest.skip: no test is skipped",
        "@pytest.mark.skipif(True)\ndef f(): ...": "pytest.mark.skipif: no test is skipped",
    },
}
