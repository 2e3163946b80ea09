"""Ranks that share no memory: they sum by gloo and pass hidden states on by TCP, and their tokens
are those of one process. A host starts them on its machine, which here is this one, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aserve.errors import ConfigError
from aserve.frames import framed
from aserve.gpu.parallel.meeting import LOOPBACK
from aserve.host.environment import installed_version
from aserve.parallel.hosts import Division, Entrance, Hosts, RemoteHost, divided
from aserve.parallel.joining import (
    Control,
    EndRanks,
    HostAlive,
    JoinAsHost,
    Leader,
    RankEnded,
    StartRanks,
    ToHost,
    WrongKey,
)
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.rank_host import connected
from aserve.parallel.topology import Cluster, Coordinates
from tests.e2e.server_process import REPOSITORY, children_of, command, environment
from tests.gpu.drive import serve
from tests.parallel.test_rank_traces import cluster_of, joined
from tests.parallel.test_ranks import CROWDED, asks, loaded, resolved_of
from tools.train_models.folder import MODELS_DIR, complete_folder

KEY = "of the nodes"


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        ((0, 1), {"tensor_parallel_size": 2}),
        ((0, 1), {"pipeline_parallel_size": 2}),
        ((0, 1, 2, 3), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ((0, 0, 1, 1), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ((0, 1), {"enable_dp_attention": True, "replicas": 2}),
    ],
    ids=["tp", "pp", "tp x pp", "tp on a node, pp between", "dp"],
)
def test_tokens_without_shared_memory_are_those_of_one_process(
    nodes: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    one = serve(loaded(), asks())
    with cluster_of(nodes) as cluster:
        executor = joined(resolved_of(**options, **CROWDED), tmp_path / "store", cluster=cluster)
        many = serve(executor, asks(), chaos=5)
    assert many.outputs == one.outputs
    assert many.num_cached > 20


def test_only_ranks_of_one_machine_share_memory() -> None:
    """The places of a stage, and of all stages, in two machines with a stage each."""
    cluster = Cluster((0, 0, 1, 1), LOOPBACK, LOOPBACK, 1)
    places = [Coordinates(rank, 2, "store", 2, cluster=cluster) for rank in range(4)]
    assert [place.in_stage.cluster for place in places] == [None] * 4
    assert [place.among_all.cluster for place in places] == [cluster] * 4
    assert [place.num_on_node for place in places] == [2] * 4
    assert [places[1].shares_node(other) for other in range(4)] == [True, True, False, False]
    apart = Coordinates(3, 2, "store", 2, cluster=Cluster((0, 1, 0, 1), LOOPBACK, LOOPBACK, 1))
    assert apart.in_stage.cluster is not None
    assert apart.in_stage.cluster.nodes == (0, 1)
    assert apart.num_on_node == 2
    assert divided(4, 2) == Division({1: (2, 3)}, (0, 0, 1, 1))


def test_strangers_are_sent_away_and_hosts_that_do_not_fit_are_told_why() -> None:
    hosts, division = Hosts(), Division({1: ()}, (0, 1))
    with contextlib.closing(Entrance(LOOPBACK, 0, KEY)) as entrance, ThreadPoolExecutor() as pool:
        leader = Leader(LOOPBACK, entrance.port, KEY)
        joining = pool.submit(hosts.join, entrance, division, "launch")
        with socket.create_connection(leader[:2]) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 4)
            assert stranger.recv(64, socket.MSG_WAITALL)[32:] == bytes(32)  # no proof
        with pytest.raises(WrongKey, match="--dist-key"):
            connected(leader._replace(key="another"), wait_s=5)
        with contextlib.closing(connected(leader, wait_s=5)) as unreadable:
            unreadable.sendall(framed(b"\x82\xa4type\xaaJoinAsRank\xa6launch\xa1\xff"))
            assert unreadable.recv(1) == b""
        own = installed_version("aserve") or "from its source"
        join = JoinAsHost(own, 1, "/", "/", "/")
        older = answer_to(leader, msgspec.structs.replace(join, version="0.0"))
        third = answer_to(leader, msgspec.structs.replace(join, number=2))
        assert isinstance(answer_to(leader, join), StartRanks)
        joining.result(10)
    hosts.close()
    assert isinstance(older, EndRanks)
    assert isinstance(third, EndRanks)
    assert f"has aserve 0.0, and node 0 has {own}" in older.reason
    assert "only [1] are still expected" in third.reason


def answer_to(leader: Leader, join: JoinAsHost) -> ToHost | None:
    control = Control[ToHost](connected(leader, wait_s=5), ToHost)
    with contextlib.closing(control):
        control.send(join)
        return control.receive(10)


@pytest.mark.slow
def test_a_host_runs_ranks_for_one_engine_after_the_other() -> None:
    """Its rank's death is that of the first engine, whose tokens the second one has, too."""
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "dtype": "float32"}
    one = serve(loaded(dtype="float32"), asks())
    with socket.create_server((LOOPBACK, 0)) as free:
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    nodes: dict[str, Any] = {"nnodes": 2, "dist_init_addr": address, "dist_key": KEY}
    with host_process(address) as host:
        first = loaded(**options, **nodes)
        assert isinstance(first, ParallelExecutor)
        reason = asyncio.run(reason_of_death(first, host.pid))
        assert str(reason) == f"rank 1 (host 1 at {LOOPBACK}) was ended by SIGKILL"
        second = loaded(**options, **CROWDED, **nodes)
        assert isinstance(second, ParallelExecutor)
        assert serve(second, asks(), chaos=3).outputs == one.outputs
        assert second.ranks[0].process.returncode == 0
        assert host.wait(30) == 0


@pytest.mark.slow
def test_experts_of_two_machines_change_no_token(tmp_path: Path) -> None:
    """Rows travel between two processes that share no memory, and each rank drafts."""
    model = complete_folder(MODELS_DIR / "moe", tmp_path / "model")
    asked = asks(is_plain=True)
    one = serve(loaded(model), asked)
    with socket.create_server((LOOPBACK, 0)) as free:
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    with host_process(address, "--model", str(model)) as host:
        executor = loaded(
            model,
            expert_parallel_size=2,
            all2all_backend="deepep_high_throughput",
            speculative_algorithm="NGRAM",
            nnodes=2,
            dist_init_addr=address,
            dist_key=KEY,
            **CROWDED,
        )
        assert isinstance(executor, ParallelExecutor)
        many = serve(executor, asked, chaos=3)
        assert many.outputs == one.outputs
        assert any(batch.verify is not None for batch in many.batches)
        assert executor.ranks[0].process.returncode == 0
        assert host.wait(30) == 0


def test_a_host_that_says_nothing_for_long_is_silent_and_nobody_waits_for_it() -> None:
    hosts = Hosts()
    with socket.create_server((LOOPBACK, 0)) as listener:
        far = Control[ToHost](socket.create_connection(listener.getsockname()), ToHost)
        host = hosts.members[1] = RemoteHost(JoinAsHost("", 1, "/", "/", "/"), listener.accept()[0])
    with contextlib.closing(far), contextlib.closing(host.control):
        host.heard_s -= 61.0
        far.send(HostAlive())
        far.send(RankEnded(1, 7))
        assert not host.has_ended()
        assert hosts.note_silent(60.0) is None
        assert host.exit_code(1, 60.0) == 7
        host.heard_s -= 61.0
        assert hosts.note_silent(60.0) is host
        with pytest.raises(TimeoutError):
            host.exit_code(2, 60.0)


@contextlib.contextmanager
def host_process(address: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address)
    arguments = command("serve", *nodes, "-tp", "2", *options)
    process = subprocess.Popen(
        arguments, env=environment() | {"ASERVE_DIST_KEY": KEY}, cwd=REPOSITORY, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def reason_of_death(executor: ParallelExecutor, host_pid: int) -> BaseException:
    """Kills the rank of the host."""
    executor.start(asyncio.get_running_loop())
    [rank] = children_of(host_pid, module="aserve.parallel.rank")
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(10):
        reason = await executor.died
    executor.close()
    return reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_rank": 1}, "--node-rank 1 is not below --nnodes 1"),
        ({"nnodes": 2}, "--dist-init-addr is not given, and has to be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "here:port"}, "here:port has to be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a..b:1"}, "a..b:1 has to be HOST:PORT"),
        ({"nnodes": 3, "dist_init_addr": "a:1"}, "2 ranks .* cannot be divided"),
        ({"nnodes": 2, "dist_init_addr": "a:1"}, "needs --dist-key"),
        ({"nnodes": 2, "sleep_idle_seconds": 9}, "--sleep-idle-seconds with --nnodes 2"),
        ({"nnodes": 2, "distributed_executor_backend": "ray"}, "Ray chooses the machines"),
        ({"nnodes": 2, "replicas": 2}, "--replicas 2 are servers of one machine"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved_of(tensor_parallel_size=2, **options)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen there.*an address of node 0"):
        Entrance("192.0.2.1", 1, KEY)
