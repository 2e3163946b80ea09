"""The engine's half as it is built: options of grammars reach their library."""

from __future__ import annotations

from aserve.channel import Channel
from aserve.config import Facts, Raw, resolve
from aserve.engine_core import EngineCorePorts, LocalEngineCore
from aserve.errors import BugError
from aserve.grammar.frames import Vocabulary
from aserve.grammar.workers import CompileLimits
from aserve.observability.trace import Trace
from tests.fakes.executor import FakeExecutor

OPTIONS = {
    "grammar_workers": 3,
    "grammar_timeout": 4.5,
    "grammar_memory": 1 << 21,
    "grammar_cache": 12_345,
}


def no_vocabulary() -> Vocabulary:
    raise BugError("no grammar came")


async def test_every_option_of_grammars_gets_to_their_library() -> None:
    resolved = resolve(Raw(command_line=OPTIONS), Facts(default_model="none"))
    ports = EngineCorePorts(Channel(), lambda report: None, Trace())
    core = LocalEngineCore(FakeExecutor(), resolved, ports=ports, vocabulary=no_vocabulary)
    library = core._library
    assert library._workers._limits == CompileLimits(4.5, memory_bytes=1 << 21, num_workers=3)
    assert library._threads._max_workers == 4  # one more for a client of which nothing compiles
    assert library._cache._budget_bytes == 12_345
    library.close()
