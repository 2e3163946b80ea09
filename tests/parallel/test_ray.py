"""Ranks that Ray places on the two machines of a cluster, which are processes of this one. The
package is optional: `make test-ray`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aserve.errors import ConfigError, EngineDead
from aserve.gpu.parallel.meeting import LOOPBACK
from aserve.parallel import on_ray
from aserve.parallel.leader import ParallelExecutor
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_engine_restarts import Crowd
from tests.e2e.test_nodes import PLAIN, answers_after_death
from tests.gpu.drive import serve
from tests.parallel.test_ranks import CROWDED, asks, loaded

has_ray = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="pip install 'aserve[ray]'")

ON_RAY: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each machine has room for one rank."""
    # Read at Ray's import: its machines then are all at the loopback address.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args=NODE)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_on_two_machines_have_the_tokens_of_one_and_a_lost_machine_ends_the_engine(
    cluster: Any,
) -> None:
    one = serve(loaded(), asks())
    second = cluster.add_node(**NODE)
    executor = loaded(**ON_RAY, **CROWDED)
    assert isinstance(executor, ParallelExecutor)
    assert executor.hosts.division.nodes == (0, 1)
    assert serve(executor, asks(), chaos=3).outputs == one.outputs
    assert executor.ranks[0].process.returncode == 0

    executor = loaded(**ON_RAY, **CROWDED)
    assert isinstance(executor, ParallelExecutor)
    reason = asyncio.run(reason_of_death(executor, lambda: cluster.remove_node(second, False)))
    assert isinstance(reason, EngineDead)
    assert f"at {LOOPBACK}" in str(reason)
    cluster.add_node(**NODE)
    executor = loaded(**ON_RAY, **CROWDED)
    assert serve(executor, asks(), chaos=3).outputs == one.outputs


async def reason_of_death(executor: ParallelExecutor, lose: Any) -> BaseException:
    executor.start(asyncio.get_running_loop())
    await asyncio.get_running_loop().run_in_executor(None, lose)
    async with asyncio.timeout(10):
        reason = await executor.died
    executor.close()
    return reason


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_server_goes_on_with_its_streams_when_an_actor_is_killed(cluster: Any) -> None:
    cluster.add_node(**NODE)
    options = ("-tp", "2", "--distributed-executor-backend", "ray", "--dtype", "float64")
    with ServerProcess(*options) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession(server.address) as client:
            crowd = Crowd(client)
            whole = await asyncio.gather(*map(crowd.ask, PLAIN))
            [actor] = actors()
            assert await answers_after_death(client, actor) == whole
            assert server.metric("aserve_engine_restarts_total") == 1
        code, _ = server.end()
    assert code == 0, server.text
    assert "host 1 at 127.0.0.1" in server.text
    assert "Traceback" not in server.text


def actors() -> list[int]:
    """The processes of Ray's actors that host a rank."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_bytes().startswith(b"ray::RankActor"):
                found.append(int(path.parent.name))
    return found


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_without_room_is_said_so(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "PLACE_S", 1.0)
    with pytest.raises(EngineDead, match="no room for 2 ranks in 1 s; each needs one CPU"):
        loaded(**ON_RAY)


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"aserve\[ray\]"):
        loaded(**ON_RAY)
