"""An engine's process without a model; its argument says what it is like."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError, ErrorInfo, InvalidRequest, StepError
from aserve.messages.changes import EngineJob, LoadLora, LoadWeights
from aserve.messages.step import ScheduleBatch
from aserve.processes.engine import main
from aserve.processes.link import Start
from aserve.progress import OnStage
from tests.fakes.executor import FakeExecutor, FakeTicket

LOST_STEP = 5


class Mortal(FakeExecutor):
    """Its thread ends in one of its first steps."""

    def launch(self, *batches: ScheduleBatch) -> FakeTicket:
        if batches[0].iteration == LOST_STEP:
            self.die(RuntimeError("the device is gone"))
        return super().launch(*batches)


class Stillborn(FakeExecutor):
    async def warm_up(self) -> None:
        raise StepError("the first step failed")


class Sleeper(FakeExecutor):
    async def warm_up(self) -> None:
        await asyncio.Event().wait()


class Stuck(FakeExecutor):
    """No step of a request comes back."""

    def _schedule(self) -> None:
        pass


class Steady(FakeExecutor):
    """Each step takes a while, so that an answer has a middle."""

    step_s = 0.003

    def _schedule(self) -> None:
        self._was_given.set()
        asyncio.get_running_loop().call_later(self.step_s, self.run_next)


class Slow(Steady):
    """An answer outlasts a stall of whoever watches it."""

    step_s = 0.03


def is_there(path: str) -> bool:
    return os.path.exists(path)


class Filed(FakeExecutor):
    """Loads what has a path that exists, and dies of a row whose adapter it has not loaded, and
    once of an adapter beside which a file PATH.fatal is.
    """

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        assert isinstance(job, LoadLora | LoadWeights)
        if is_there(job.path + ".fatal"):
            os.unlink(job.path + ".fatal")
            os._exit(9)
        self.jobs.append(job)
        return None if is_there(job.path) else InvalidRequest("no such adapter").info()

    def launch(self, *batches: ScheduleBatch) -> FakeTicket:
        slots = {init.lora_slot for init in batches[0].row_inits}
        assert slots <= {0, *(job.slot for job in self.jobs if isinstance(job, LoadLora))}
        return super().launch(*batches)


KINDS: dict[str, Callable[[], LocalExecutor]] = {
    "good": FakeExecutor,
    "steady": Steady,
    "slow": Slow,
    "relapsing": Steady,
    "refusing": Steady,
    "filed": Filed,
    "mortal": Mortal,
    "stuck": Stuck,
    "stillborn": Stillborn,
    "sleeper": Sleeper,
}


def load(start: Start, on_stage: OnStage) -> LocalExecutor:
    on_stage("weights", 3, 4)
    kind = sys.argv[1]
    is_second = (start.resolved.debug.record or "").endswith(".1")
    if kind == "wrong" or (kind == "refusing" and is_second):
        raise ConfigError(f"{start.model_dir} is no model")
    if kind == "crash" or (kind == "relapsing" and is_second):
        os._exit(7)
    return KINDS[kind]()


if __name__ == "__main__":
    sys.exit(main(load))
