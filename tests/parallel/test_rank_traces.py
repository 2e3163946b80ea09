"""Random traces on several ranks: each request gets the tokens of one, whatever runs beside it.

The other ranks are threads here, so that a trace takes no start of a process. They run the loop of
a rank's process over real sockets, and sum in shared memory, or by gloo as on several machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import pytest

from aserve.config import Resolved
from aserve.engine_core import LocalExecutor
from aserve.frames import FrameSplitter
from aserve.gpu.parallel.meeting import LOOPBACK, serve_store
from aserve.load import load_rank
from aserve.messages.requests import AdmitRequest
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.processes import RankProcess
from aserve.parallel.rank import Follower
from aserve.parallel.topology import Cluster, Coordinates, Patience
from aserve.progress import ignore_stage
from aserve.text.load import load_tokenizer
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.fakes.toy_device import TOY
from tests.gpu.drive import request, serve
from tests.parallel.test_ranks import STORY, loaded, resolved_of
from tools.train_models.folder import MODELS_DIR, complete_folder

FIRST_SEED = int(os.environ.get("ASERVE_TEST_SEED", "0"))
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
NUM_TRACES = 200 if IS_LARGE else 3
DRAFTERS = ("", "NGRAM", "EAGLE3")
# Every way to divide a model, with the model where it is not the bundled one.
LAYOUTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "tp 2": ({"tensor_parallel_size": 2}, ""),
    "tp 4": ({"tensor_parallel_size": 4}, ""),
    "pp 2": ({"pipeline_parallel_size": 2}, ""),
    "pp 3": ({"pipeline_parallel_size": 3}, ""),
    "tp 2 x pp 2": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ""),
    "dp 2": ({"enable_dp_attention": True, "replicas": 2}, ""),
    "ep 2": ({"expert_parallel_size": 2}, "moe"),
    "ep 4, rows travel": (
        {"expert_parallel_size": 4, "all2all_backend": "deepep_high_throughput"},
        "moe",
    ),
    "ep 2 x pp 2": ({"expert_parallel_size": 2, "pipeline_parallel_size": 2}, "moe"),
}
# Drafters with the folder of their weights. Over the seeds, each meets each layout.
PAIRED = {
    "EAGLE3": "eagle3",
    "NGRAM": "",
    "STANDALONE": "small_lm",
    "NEXTN": "mtp",
    "DFLASH": "dflash",
}


class RankThread(RankProcess):
    """A rank in a thread of this process."""

    def __init__(self, place: Coordinates, executor: LocalExecutor, patience: Patience) -> None:
        self.number = place.rank
        self.executor = executor
        self.patience = patience
        self.socket, theirs = socket.socketpair()
        self._stream = cast(IO[bytes], self.socket.makefile("rwb"))
        self._splitter = FrameSplitter()
        follower = Follower(executor, theirs, place, patience)

        def run() -> None:
            with theirs:
                asyncio.run(follower.run())

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def close(self) -> None:
        self._stream.close()
        self.socket.close()
        self._thread.join()


def joined(
    resolved: Resolved,
    store: Path,
    folder: Path = MODEL_DIR,
    *,
    cluster: Cluster | None = None,
    kv_parts: int | None = None,
) -> ParallelExecutor:
    num_ranks = resolved.num_processes
    patiences = [Patience() for _ in range(num_ranks)]
    first = Coordinates(
        num_ranks=resolved.num_ranks,
        store=str(store),
        num_stages=resolved.machine.pipeline_parallel_size,
        has_own_rows=resolved.dp_size > 1,
        cluster=cluster,
    )
    places = [placed(first, rank, store) for rank in range(num_ranks)]

    def load(place: Coordinates, patience: Patience) -> LocalExecutor:
        return load_rank(resolved, folder, lambda: place, patience=patience, on_stage=ignore_stage)

    with ThreadPoolExecutor(num_ranks) as pool:
        own, *others = pool.map(load, places, patiences)
    parts = zip(places[1:], others, patiences[1:], strict=True)
    threads = [RankThread(*each) for each in parts]
    return ParallelExecutor(own, threads, patiences[0], kv_parts=kv_parts)


@contextlib.contextmanager
def cluster_of(nodes: tuple[int, ...]) -> Iterator[Cluster | None]:
    """Serves the store of some machines. None: they are one."""
    listener = socket.create_server((LOOPBACK, 0))
    cluster = Cluster(nodes, LOOPBACK, LOOPBACK, listener.getsockname()[1])
    served = serve_store(listener)
    yield cluster.part(0, len(nodes))
    del served


def placed(first: Coordinates, rank: int, store: Path) -> Coordinates:
    """The place of a rank. Ranks of different machines have folders of their own, so that they find
    nothing to share."""
    if first.cluster is not None:
        store = store.parent / f"node{first.cluster.nodes[rank]}" / store.name
        store.parent.mkdir(exist_ok=True)
    return msgspec.structs.replace(first, rank=rank, store=str(store))


def options_of(rng: random.Random, drafter: str) -> dict[str, Any]:
    page_size = rng.choice([1, 4, 16])
    lead = rng.randint(1, 3)
    options = {
        "page_size": page_size,
        "num_pages": 2 + -(-110 // page_size) + rng.choice([0, 1, 200]),
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.choice([9, 24, 64]),
        "overlap_depth": lead + rng.randint(0, 1),
        "overlap_lead": lead,
        "no_prefix_cache": rng.choice(["true", "false"]),
    }
    return options | ({"speculative_algorithm": drafter} if drafter else {})


def requests_of(rng: random.Random) -> list[AdmitRequest]:
    stem = [1, *load_tokenizer(MODEL_DIR).encode(STORY * 2, with_special=False)]
    return [
        request(
            f"r{number}",
            [*stem[: rng.randint(1, 60)], rng.randrange(3, 200)],
            seed=rng.randrange(1 << 40),
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            frequency_penalty=rng.choice([0.0, 0.7]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=rng.choice([None, 2]),
            max_tokens=rng.randint(1, 24),
            n=rng.choice([1, 1, 2]),
            grammar=rng.choice([None, None, TOY]),
        )
        for number in range(rng.randint(2, 6))
    ]


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_TRACES))
def test_any_trace_gives_the_tokens_of_one_rank(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    options, asked = options_of(rng, DRAFTERS[seed % len(DRAFTERS)]), requests_of(rng)
    one = serve(loaded(num_pages=2000, page_size=1), asked)
    resolved = resolved_of(tensor_parallel_size=2, **options)
    with cluster_of((0, 1) if seed % 2 else (0, 0)) as cluster:
        executor = joined(resolved, tmp_path / "store", cluster=cluster)
        two = serve(executor, asked, chaos=seed)
    assert two.outputs == one.outputs
    assert two.reasons == one.reasons
    assert two.logprobs.keys() == one.logprobs.keys()
    for key, logprobs in one.logprobs.items():
        assert two.logprobs[key] == pytest.approx(logprobs, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_TRACES // 3))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_tokens_of_one_rank_with_drafts_grammars_and_retraction(
    layout: str, seed: int, tmp_path: Path
) -> None:
    number = seed * len(LAYOUTS) + [*LAYOUTS].index(layout)
    rng = random.Random(number)
    divided, name = LAYOUTS[layout]
    folder = complete_folder(MODELS_DIR / name, tmp_path / "model") if name else MODEL_DIR
    drafter = [*PAIRED][(seed + number) % len(PAIRED)]
    options = {**options_of(rng, drafter), **divided}
    options["max_num_seqs"] += 1
    if PAIRED[drafter]:
        options["speculative_draft_model_path"] = str(DRAFTERS_DIR / PAIRED[drafter])
    if "pipeline_parallel_size" in divided:
        options["overlap_depth"] = divided["pipeline_parallel_size"]
        del options["overlap_lead"]
    first, *others = requests_of(rng)
    params = msgspec.structs.replace(first.sampling, grammar=TOY, max_tokens=24)
    asked = [msgspec.structs.replace(first, sampling=params), *others]
    one = serve(loaded(folder, num_pages=2000, page_size=1), asked)
    executor = joined(resolved_of(**options), tmp_path / "store", folder)
    many = serve(executor, asked, chaos=number, retract_rate=0.2)
    assert many.outputs == one.outputs
    assert many.reasons == one.reasons
    assert many.num_retracted > 0
    assert any(batch.verify is not None for batch in many.batches)
